"""The matrix of trainings that must give the numbers of one process without sharding.

A cell is one combination of the axes below. The versions of transformers and DeepSpeed are axes
too, but of the environment: tests/noxfile.py installs them one pair after the other.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import product

from packaging.version import Version

TRANSFORMERS = ("4.57.6", "5.8.0", "5.17.0", "5.23.0")
# The newest of each minor release that is supported; 5.1.0 is not.
EVERY_TRANSFORMERS = ("4.57.6", "5.0.0", "5.2.0", "5.3.0", "5.4.0", "5.5.4", "5.6.2")
EVERY_TRANSFORMERS += ("5.7.0", "5.8.1", "5.9.0", "5.10.4", "5.11.0", "5.12.1", "5.13.1")
EVERY_TRANSFORMERS += ("5.14.1", "5.15.1", "5.16.1", "5.17.0", "5.18.0", "5.19.0", "5.20.2")
EVERY_TRANSFORMERS += ("5.21.1", "5.22.2", "5.23.0", "5.24.0")
# 0.19.2 is the last one without DeepSpeed's own fix for frozen weights in a checkpoint.
DEEPSPEED = ("0.16.9", "0.18.9", "0.19.2", "0.19.8")

ZERO_STAGES = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3}
WITHOUT_DEEPSPEED = ("fsdp2", "ddp", "ddp_static_graph")
REENTRANT = (True, False, "unset")
WEIGHTS = (
    "all",
    "lora_language",
    "lora_both",
    "lora_modules_to_save",
    "frozen_vision",
    "frozen_language",
)
PRECISIONS = ("fp32", "bf16", "bf16_autocast")
PERSISTENCE = ("0", "default")


@dataclass(frozen=True)
class Cell:
    """One training of ``steps`` steps on two processes.

    Attributes:
        strategy: a key of ``ZERO_STAGES`` or one of ``WITHOUT_DEEPSPEED``.
        weights: what is trained.
        use_reentrant: of the activation checkpoints; "unset" leaves it to transformers and "off"
            enables none.
        precision: "fp32"; "bf16" weights; "bf16_autocast" over fp32 weights.
        persistence: ZeRO-3 only. "0" shards every parameter and sets live parameters, reuse
            distance and prefetching to 0 too: the harshest setting. "default" is DeepSpeed's.
        images: which ranks have one. "rank0", in every step, or "changing".
        skip_logits: the loss in chunks, without logits.
    """

    strategy: str
    weights: str = "all"
    use_reentrant: bool | str = False
    precision: str = "fp32"
    persistence: str | None = None
    steps: int = 3
    images: str = "rank0"
    skip_logits: bool = False

    @property
    def is_zero3(self) -> bool:
        return ZERO_STAGES.get(self.strategy) == 3

    @property
    def name(self) -> str:
        """The strategy and the values that differ from the defaults."""
        values = [self.strategy]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                values.append(f"{field.name}={value}")
        return "-".join(values)


def make_cells(strategies: Iterable[str]) -> list[Cell]:
    """Return all cells of the strategies; similar cells are neighbors."""
    return [
        Cell(strategy, weights, use_reentrant, precision, persistence)
        for strategy, precision, weights, use_reentrant in product(
            strategies, PRECISIONS, WEIGHTS, REENTRANT
        )
        for persistence in (PERSISTENCE if ZERO_STAGES.get(strategy) == 3 else (None,))
    ]


def known_limit(cell: Cell, deepspeed: str | None) -> str | None:
    """Return why no model can pass this cell, or None; such a cell is not run."""
    if deepspeed is None:
        return None
    version = Version(deepspeed)
    if cell.is_zero3 and cell.weights == "lora_modules_to_save" and version < Version("0.19.8"):
        return (
            "DeepSpeed before 0.19.8 takes the wrapper of peft's modules_to_save for the module "
            "inside it; it fails on two linear layers as well: use DeepSpeed 0.19.8"
        )
    if cell.strategy in ("zero1", "zero2") and version == Version("0.18.9"):
        return (
            "DeepSpeed 0.18.9 gathers updated weights into views that torch 2.13 and gloo may not "
            "write to; it fails on two linear layers as well: use DeepSpeed 0.19.8"
        )
    return None
