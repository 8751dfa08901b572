"""Whether this machine can measure what is asked for, told before anything is built."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..engine.gpus import find_gpus
from ..engine.ram import free_ram
from ..patch.recognition import is_glm4v
from .settings import Settings

GB = 10**9
# Of a weight that is trained with its optimizer on the CPU: fp32 copy and two moments.
OFFLOADED = 12


def require_machine(measurements: Sequence[Settings], processes: int, on_cpu: bool) -> None:
    """Raise ``ValueError`` with a line for each thing that this machine lacks.

    What may fit is tried: only what is surely too large is refused. On a GPU that is what lies
    there between two steps; on a CPU, where the system would end processes at random, the
    estimated peak.
    """
    config = measurements[0].config
    if config is not None:
        _require_config(Path(config))
    elif on_cpu:
        raise ValueError(
            "--device cpu with the real model, of 13.9 billion weights: expected --config of a "
            "small one"
        )
    memory = 0 if on_cpu else _memory_of_gpus(processes)
    told = [fault for settings in measurements for fault in _too_large(settings, processes, memory)]
    if told:
        raise ValueError("\n".join(dict.fromkeys(told)))


def _memory_of_gpus(processes: int) -> int:
    """Of the smallest GPU."""
    gpus = find_gpus()
    if not gpus.found:
        raise ValueError(
            f"there is no GPU: {gpus.reason}; on a CPU bench measures small models: --device cpu "
            "--config FILE"
        )
    if len(gpus) < processes:
        raise ValueError(
            f"--gpus {processes} on a machine with {len(gpus)}: expected --gpus {len(gpus)}"
            f"{' or fewer' * (len(gpus) > 1)}"
        )
    return min(gpu.memory for gpu in gpus.found[:processes])


def _require_config(file: Path) -> None:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--config {file} cannot be read: {reason}") from None
    # A file of sizes alone need not say what it is of.
    if not isinstance(config, dict) or not is_glm4v({"model_type": "chatglm"} | config):
        raise ValueError(
            f"--config {file} is not of a glm-4v; expected an object with a vision_config"
        )


def _too_large(settings: Settings, processes: int, gpu_memory: int) -> Iterator[str]:
    # Late, for they import torch: the checks before are answered at once.
    from ..engine.memory_plan import count_parameters, decide, estimate, states
    from .sizes import batch_of, config_of, options_of

    config = config_of(settings)
    batch, options = batch_of(settings, config, processes), options_of(settings)
    told = f"{settings.trained}, micro-batch {settings.micro_batch}, on {processes} processes"
    if gpu_memory:
        limit = settings.memory_limit
        room = gpu_memory if limit is None else min(gpu_memory, limit * 2**30)
        needed = states(config, options, batch)
        if needed > room:
            yield (
                f"{told}: weights, gradients and optimizer take {needed / GB:.1f} GB of each GPU, "
                f"which has {room / GB:.1f} GB; expected more --gpus with --zero-stage 3, "
                "--offload, --optimizer adamw_8bit, or another --trained"
            )
            return
        of_tower, of_language = count_parameters(config)
        trained = {"full": of_tower + of_language, "lm": of_language}.get(settings.trained, 0)
        needed = OFFLOADED * trained * settings.offload
        cure = "expected no --offload, or another --trained"
    else:
        needed = processes * estimate(config, decide(config, options, batch, free=0), batch)
        cure = "expected a smaller --config, --micro-batch or --text-tokens"
    room = free_ram()
    if needed > room:
        yield (
            f"{told}: takes {needed / GB:.1f} GB of the machine's memory, of which "
            f"{room / GB:.1f} GB are free; {cure}"
        )
