"""On what processes run: GPUs, each its own, or the CPU; needs no torch."""

from dataclasses import dataclass
from typing import Literal

from ..engine.gpus import find_gpus

Device = Literal["cuda", "cpu"]


class PlacementError(ValueError):
    """Processes do not fit here; ``field`` is what asks for them."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


@dataclass(frozen=True)
class Placement:
    """On what a training runs: so many processes, each on a GPU of its own, or all on the CPU."""

    processes: int
    on_cpu: bool = False
    local_processes: int | None = None  # those on this machine; None for all

    @property
    def share(self) -> float:
        """Of all processes, those on this machine."""
        return (self.local_processes or self.processes) / self.processes


def place_processes(processes: int | None, device: Device = "cuda", zero_stage: int = 3) -> Placement:
    """Where so many processes run: of None one on each GPU; on a CPU, or without ZeRO, a single
    one. Raises :class:`PlacementError` for fewer GPUs than processes, or several and no ZeRO."""
    if zero_stage == 0 and processes not in (None, 1):
        raise PlacementError(
            "engine.zero_stage",
            f"engine.zero_stage 0 on {processes} processes: without ZeRO a single one trains; "
            "expected --processes 1, or engine.zero_stage 1, 2 or 3",
        )
    if device == "cpu":
        return Placement(processes or 1, on_cpu=True)
    gpus = find_gpus()
    if not gpus.devices:
        raise PlacementError(
            "--device",
            f"there is no GPU: {gpus.reason}; to use the CPU: --device cpu",
        )
    wanted = processes or (1 if zero_stage == 0 else len(gpus))
    if len(gpus) < wanted:
        raise PlacementError(
            "--processes",
            f"{wanted} processes on {len(gpus)} GPUs: each process needs its own GPU; expected "
            f"--processes {len(gpus)}{' or fewer' * (len(gpus) > 1)}, or --device cpu",
        )
    return Placement(wanted)
