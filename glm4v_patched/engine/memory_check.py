"""Refuses what surely does not fit into a machine's memory; what may fit is tried."""

from ..remote.configuration_chatglm import ChatGLMConfig
from ..terminal_text import format_bytes
from .memory_plan import NON_TORCH_BYTES, Batch, decide, estimate, offloaded, states
from .options import EngineOptions
from .ram import free_ram

ERROR_OF_ESTIMATES = 0.15
"""An estimate of memory may err by so much (tests/engine/test_memory_plan.py)."""


def find_memory_problem(
    config: ChatGLMConfig, options: EngineOptions, batch: Batch, free: float, share: float = 1.0
) -> str:
    """What to tell the user where a training does not fit; empty where it may.

    On a GPU only what lies there between two steps is held against its memory. On a CPU, where the
    system would end processes at random, it is the estimated peak.

    Args:
        free: Bytes of each GPU (:func:`memory_plan.apply_memory_limit`); 0 on a CPU.
        share: Of all processes, those on this machine.
    """
    room, ram = free - NON_TORCH_BYTES, free_ram()
    if free and (needed := states(config, options, batch)) > room:
        return (
            f"weights, gradients and optimizer take {format_bytes(needed)} of each GPU, which has "
            f"{format_bytes(room)}; expected more GPUs with engine.zero_stage 3, engine.offload true, "
            "engine.optimizer adamw_8bit, or another trained"
        )
    of_ram = f"of the machine's memory, of which {format_bytes(ram)} are free; expected"
    if (needed := share * offloaded(config, options)) > ram:
        return (
            f"engine.offload is true, and the optimizer takes {format_bytes(needed)} {of_ram} a "
            "machine with more, or another trained: lm, lora_all or lora_lm"
        )
    if free:
        return ""
    decided = decide(config, options, batch, free)
    needed += share * batch.processes * estimate(config, decided, batch)
    if needed <= ram * (1 + ERROR_OF_ESTIMATES):
        return ""
    return f"a step takes {format_bytes(needed)} {of_ram} a smaller model, or fewer or shorter rows"
