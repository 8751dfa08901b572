"""What can be told of a training before anything expensive starts; needs no torch."""

from dataclasses import dataclass
from typing import Literal

from ..training.gpus import find_gpus
from .config import RecipeError

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Placement:
    """On what a training runs: so many processes, each on a GPU of its own, or all on the CPU."""

    processes: int
    on_cpu: bool = False


def place(processes: int | None, device: Device = "cuda", zero_stage: int = 3) -> Placement:
    """Args:
        processes: None for one on each GPU; on a CPU, or without ZeRO, for a single one.
        device: "cpu", to train without GPUs, however many there are.

    Raises:
        RecipeError: there are fewer GPUs than processes, or several processes and no ZeRO.
    """
    if zero_stage == 0 and processes not in (None, 1):
        raise RecipeError(
            f"engine.zero_stage 0 on {processes} processes: without ZeRO a single one trains; "
            "expected --processes 1, or engine.zero_stage 1, 2 or 3"
        )
    if device == "cpu":
        return Placement(processes or 1, on_cpu=True)
    gpus = find_gpus()
    if processes is None:
        processes = 1 if zero_stage == 0 else max(len(gpus), 1)
    if len(gpus) < processes:
        if gpus.found:
            raise RecipeError(
                f"{processes} processes and {len(gpus)} GPUs: each process needs one of its own; "
                f"expected --processes {len(gpus)} or fewer, or --device cpu"
            )
        raise RecipeError(
            f"there is no GPU: {gpus.reason}; to train on the CPU all the same, add --device cpu"
        )
    return Placement(processes)
