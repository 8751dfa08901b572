"""Placement of training processes: one GPU for each, or the CPU for all. Needs no torch."""

from dataclasses import dataclass
from typing import Literal

from ..engine.gpus import find_gpus

Device = Literal["cuda", "cpu"]


class PlacementError(ValueError):
    """The processes cannot be placed on this machine.

    ``field`` is the option, or the recipe's field, that the user has to change.
    """

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


@dataclass(frozen=True)
class Placement:
    """The devices of a training: one GPU for each process, or the CPU for all.

    Attributes:
        processes: Number of processes on all machines.
        on_cpu: Whether all processes run on the CPU.
        local_processes: Number of processes on this machine; None means all.
    """

    processes: int
    on_cpu: bool = False
    local_processes: int | None = None

    @property
    def local_world_size(self) -> int:
        """Number of processes on this machine."""
        return self.local_processes or self.processes

    @property
    def local_process_share(self) -> float:
        """The fraction of all processes that run on this machine."""
        return self.local_world_size / self.processes


def place_processes(
    processes: int | None, device: Device = "cuda", zero_stage: int = 3
) -> Placement:
    """Return the placement of processes on this machine.

    Args:
        processes: Number of processes. None means one per GPU; on a CPU or without ZeRO, one.
        device: The kind of device on which the processes run.
        zero_stage: The stage of ZeRO; 0 means no ZeRO.

    Raises:
        PlacementError: There are fewer GPUs than processes, or several processes without ZeRO.
    """
    if zero_stage == 0 and processes not in (None, 1):
        raise PlacementError(
            "engine.zero_stage",
            f"engine.zero_stage is 0 with {processes} processes, but training without ZeRO uses "
            "one process; expected --processes 1, or engine.zero_stage 1, 2 or 3",
        )
    if device == "cpu":
        return Placement(processes or 1, on_cpu=True)
    gpus = find_gpus()
    if not gpus.devices:
        raise PlacementError(
            "--device", f"there is no GPU: {gpus.reason}; to use the CPU: --device cpu"
        )
    needed = processes or (1 if zero_stage == 0 else len(gpus))
    if len(gpus) < needed:
        raise PlacementError(
            "--processes",
            f"{needed} processes on {len(gpus)} GPUs: each process needs its own GPU; expected "
            f"--processes {len(gpus)}{' or fewer' * (len(gpus) > 1)}, or --device cpu",
        )
    return Placement(needed)
