"""Find out whether a training certainly does not fit into memory. One that may fit is tried."""

from ..remote.configuration_chatglm import ChatGLMConfig
from ..terminal_text import format_bytes
from .memory_plan import (
    NON_TORCH_BYTES,
    BatchShape,
    decide_options,
    estimate_peak_bytes,
    model_state_bytes,
    offloaded_bytes,
)
from .options import EngineOptions
from .ram import free_ram

ESTIMATE_ERROR = 0.15
"""Largest relative error of a memory estimate (tests/engine/test_memory_plan.py)."""


def find_memory_problem(
    config: ChatGLMConfig,
    options: EngineOptions,
    batch: BatchShape,
    free: float,
    local_process_share: float = 1.0,
) -> str:
    """Return why a training does not fit into memory, for the user; "" if it may fit.

    On a GPU only the persistent state must fit into the free memory. On a CPU, where the system
    would kill processes at random, the estimated peak must fit.

    Args:
        free: Usable bytes of each GPU (:func:`memory_plan.apply_memory_limit`); 0 on a CPU.
        local_process_share: The fraction of all processes that run on this machine.
    """
    usable, ram = free - NON_TORCH_BYTES, free_ram()
    if free and (needed := model_state_bytes(config, options, batch)) > usable:
        return (
            f"weights, gradients and optimizer states need {format_bytes(needed)} on each GPU, "
            f"which has {format_bytes(usable)} free; expected more GPUs with engine.zero_stage 3, "
            "engine.offload true, engine.optimizer adamw_8bit, or fewer trained weights"
        )
    memory = f"of the machine's memory, of which {format_bytes(ram)} are free"
    if (needed := local_process_share * offloaded_bytes(config, options)) > ram:
        return (
            f"engine.offload is true, and the optimizer states need {format_bytes(needed)} "
            f"{memory}; expected a machine with more, or trained lm, lora_all or lora_lm"
        )
    if free:
        return ""
    decided = decide_options(config, options, batch, free)
    needed += local_process_share * batch.processes * estimate_peak_bytes(config, decided, batch)
    if needed <= ram * (1 + ESTIMATE_ERROR):
        return ""
    return (
        f"a step takes {format_bytes(needed)} {memory}; expected a smaller model, or fewer or "
        "shorter samples"
    )
