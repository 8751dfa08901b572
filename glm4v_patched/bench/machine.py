"""Whether this machine can measure what is asked for, told before anything is built."""

from collections.abc import Iterator, Sequence

from ..engine.gpu_facts import compute_capabilities, fault_of_fp8
from ..engine.gpus import find_gpus
from ..engine.ram import free_ram
from ..printed import in_bytes
from .settings import Settings


def require_machine(measurements: Sequence[Settings], processes: int, on_cpu: bool) -> None:
    """Raise ``ValueError`` with a line for each thing that this machine lacks.

    What may fit is tried: only what is surely too large is refused. On a GPU that is what lies
    there between two steps; on a CPU, where the system would end processes at random, the
    estimated peak.
    """
    gpus, memory = find_gpus(), 0
    wants_fp8 = measurements[0].fp8
    if on_cpu and wants_fp8:
        raise ValueError("fp8 runs on a GPU, and --device is cpu: leave out --fp8")
    if on_cpu and measurements[0].config is None:
        real = "--device cpu with the real model, of 13.9 billion weights"
        raise ValueError(f"{real}: expected --config of a small one")
    if not on_cpu:
        if not gpus.found:
            small = "on a CPU bench measures small models: --device cpu --config FILE"
            raise ValueError(f"there is no GPU: {gpus.reason}; {small}")
        if (found := len(gpus)) < processes:
            cure = f"expected --gpus {found}{' or fewer' * (found > 1)}"
            raise ValueError(f"--gpus {processes} on a machine with {found}: {cure}")
        memory = min(gpu.memory for gpu in gpus.found[:processes])
        if wants_fp8:
            capabilities = compute_capabilities(processes)
            for gpu, capability in zip(gpus.found, capabilities, strict=False):
                if fault := fault_of_fp8(gpu.name, capability):
                    raise ValueError(fault)
    if told := [line for asked in measurements for line in _too_large(asked, processes, memory)]:
        raise ValueError("\n".join(dict.fromkeys(told)))


def _too_large(settings: Settings, processes: int, gpu_memory: int) -> Iterator[str]:
    # Late, for they import torch: the checks before are answered at once.
    from ..engine.memory_plan import decide, estimate, offloaded, states
    from .roofline import batch_of, config_of

    config, options = config_of(settings), settings.engine_options()
    batch = batch_of(settings, config, processes)
    told = f"{settings.trained}, micro-batch {settings.micro_batch}, on {processes} processes"
    if gpu_memory:
        limit = settings.memory_limit
        room = gpu_memory if limit is None else min(gpu_memory, limit * 2**30)
        if (needed := states(config, options, batch)) > room:
            yield (
                f"{told}: weights, gradients and optimizer take {in_bytes(needed)} of each GPU, "
                f"which has {in_bytes(room)}; expected more --gpus with --zero-stage 3, "
                "--offload, --optimizer adamw_8bit, or another --trained"
            )
            return
        needed, cure = offloaded(config, options), "no --offload, or another --trained"
    else:
        needed = processes * estimate(config, decide(config, options, batch, free=0), batch)
        cure = "a smaller --config, --micro-batch or --text-tokens"
    if needed > (room := free_ram()):
        yield (
            f"{told}: takes {in_bytes(needed)} of the machine's memory, of which "
            f"{in_bytes(room)} are free; expected {cure}"
        )
