"""Whether this machine can measure what is asked for, told before anything is built."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from ..engine.gpus import find_gpus
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
    if on_cpu and config is None:
        raise ValueError(
            "--device cpu with the real model, of 13.9 billion weights: expected --config of a "
            "small one"
        )
    gpus = () if on_cpu else find_gpus()
    if not on_cpu and not gpus.found:
        raise ValueError(
            f"there is no GPU: {gpus.reason}; on a CPU bench measures small models: --device cpu "
            "--config FILE"
        )
    if not on_cpu and len(gpus) < processes:
        raise ValueError(
            f"--gpus {processes} on a machine with {len(gpus)}: expected --gpus {len(gpus)}"
            f"{' or fewer' * (len(gpus) > 1)}"
        )
    smallest = min((gpu.memory for gpu in gpus.found[:processes]), default=0) if gpus else 0
    faults = [_too_large(settings, processes, smallest) for settings in measurements]
    if told := [*dict.fromkeys(filter(None, faults))]:
        raise ValueError("\n".join(told))


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


def _too_large(settings: Settings, processes: int, gpu_memory: int) -> str | None:
    # Late, for they import torch: the checks before are answered at once.
    from ..engine.memory_plan import count_parameters, decide, estimate, states
    from .sizes import batch_of, config_of, options_of

    config = config_of(settings)
    batch, options = batch_of(settings, config, processes), options_of(settings)
    told = f"{settings.workload}, micro-batch {settings.micro_batch}, on {processes} processes"
    if gpu_memory:
        limit = settings.memory_limit
        room = gpu_memory if limit is None else min(gpu_memory, limit * 2**30)
        needed = states(config, options, batch)
        if needed > room:
            return (
                f"{told}: weights, gradients and optimizer take {needed / GB:.1f} GB of each GPU, "
                f"which has {room / GB:.1f} GB; expected more --gpus with --zero-stage 3, "
                "--offload, --optimizer adamw_8bit, or another --workload"
            )
        tower, language = count_parameters(config)
        trained = {"full": tower + language, "lm": language}.get(settings.workload, 0)
        needed = OFFLOADED * trained if settings.offload else 0
        cure = "expected no --offload, or another --workload"
    else:
        needed = processes * estimate(config, decide(config, options, batch, free=0), batch)
        cure = "expected a smaller --config, --micro-batch or --text-tokens"
    room = free_ram()
    if needed <= room:
        return None
    return (
        f"{told}: takes {needed / GB:.1f} GB of the machine's memory, of which {room / GB:.1f} GB "
        f"are free; {cure}"
    )


def free_ram() -> float:
    """Bytes that processes can take before the kernel ends some: free, and within the limit of
    this one's control groups (which containers set)."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    limits = [int(available[1]) * 1024]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kind, group = line.split(":", 2)
        if kind == "":
            folders = ["/sys/fs/cgroup" + group, "/sys/fs/cgroup"]
            names = "memory.max", "memory.current", "inactive_file"
        elif "memory" in kind.split(","):
            root = "/sys/fs/cgroup/memory"
            folders = [root + group, root]
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        limits += [_free_in_group(Path(folder), *names) for folder in folders]
    return float(max(min(limits), 0))


def _free_in_group(folder: Path, limit: str, used: str, reclaimed: str) -> float:
    """What a control group leaves, in bytes; infinite where it sets no limit.

    Args:
        limit, used: Names of its files.
        reclaimed: Key of ``memory.stat``: pages of files, which go when memory is needed.
    """

    def read(name: str) -> str:
        return path.read_text().strip() if (path := folder / name).is_file() else ""

    if not read(limit).isdecimal():  # "max", or the group at the root, which has none
        return float("inf")
    pages = re.search(rf"^{reclaimed} (\d+)$", read("memory.stat"), re.MULTILINE)
    return int(read(limit)) - int(read(used) or 0) + (int(pages[1]) if pages else 0)
