"""Whether this machine can measure what is asked for, told before anything is built."""

from collections.abc import Sequence

from ..engine.gpus import find_gpus
from .settings import Settings, in_own_words


def require_machine(measurements: Sequence[Settings], processes: int, on_cpu: bool) -> None:
    """Raise ``ValueError`` with a line for each thing that this machine lacks, as a recipe would be
    refused. What may fit is tried: only what is surely too large is refused."""
    from ..finetune.preflight import faults_of_device
    from ..models.placement import Device, place

    device: Device = "cpu" if on_cpu else "cuda"
    asked = measurements[0]
    try:
        place(processes, device, asked.zero_stage)
    except ValueError as error:
        raise ValueError(in_own_words(str(error))) from None
    found = faults_of_device(asked.known(), device, processes)
    faults = [in_own_words(fault.text) for fault in found]
    if on_cpu and asked.config is None:
        real = "--device cpu with the real model, of 13.9 billion weights"
        faults.append(f"{real}: expected --config of a small one")
    if not faults:
        faults = [line for asked in measurements if (line := _too_large(asked, processes, on_cpu))]
    if faults:
        raise ValueError("\n".join(dict.fromkeys(faults)))


def _too_large(settings: Settings, processes: int, on_cpu: bool) -> str:
    # Late, for they import torch: the checks before are answered at once.
    from ..engine.memory_check import fault_of_memory
    from ..engine.memory_plan import within_limit
    from .roofline import batch_of, config_of

    free = 0.0 if on_cpu else min(gpu.memory for gpu in find_gpus().found[:processes])
    free = within_limit(free, settings.memory_limit)
    config = config_of(settings)
    batch = batch_of(settings, config, processes)
    told = fault_of_memory(config, settings.engine_options(), batch, free)
    at = f"{settings.trained}, micro-batch {settings.micro_batch}, on {processes} processes"
    return told and f"{at}: {in_own_words(told)}"
