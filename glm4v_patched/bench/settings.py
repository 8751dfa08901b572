"""What a measurement is asked for."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from ..engine.activation_policies import check_policy
from ..engine.options import check_optimizer, check_trained, trains_tower

GATHERS_OF_DEEPSPEED = ("allgather_sequential", "use_all_reduce_for_fetch_params")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One workload, measured by every process of a group.

    The samples of a step have from ``text_tokens`` down to ``shortest_text`` ids of text, evenly;
    they are padded to one length, or ``packed`` into one row. ``attention`` is an implementation
    of transformers; with ``liger`` RMSNorm and SwiGLU are Liger-Kernel's.

    ``tower`` and ``language`` are policies of :mod:`activation_checkpointing`, or "auto", as is a
    ``kept_gathered`` of None (:func:`memory_plan.choose_kept`); that is a number of weights
    (:func:`zero_config`). ``gather_in_place`` spares the copies of gathered weights
    (:mod:`deepspeed.gather`). ``layers_ahead`` is how far the CPU may be before the GPU under
    ZeRO-3 (:mod:`deepspeed.throttle`), 0 for any distance. ``memory_limit`` in GiB caps what a
    process may allocate.

    ``config`` is a JSON file of another size than the real one; ``against`` is a folder with the
    original modelling code, measured in the place of ours; ``all_logits`` computes the loss from
    logits of all positions; ``profile`` adds a profiled step; ``zero_options`` is a JSON object
    that is laid over DeepSpeed's ``zero_optimization``.
    """

    workload: str
    micro_batch: int = 1
    text_tokens: int = 512
    shortest_text: int | None = None
    packed: bool = False
    attention: str = "sdpa"
    liger: bool = False
    zero_stage: int = 3
    optimizer: str = "adamw"
    offload: bool = False
    memory_limit: float | None = None
    tower: str = "auto"
    language: str = "auto"
    compile: bool = True
    kept_gathered: float | None = None
    gather_in_place: bool = True
    layers_ahead: int = 3
    reuse_features: bool = False
    loss_chunk: int = 1024
    all_logits: bool = False
    profile: bool = False
    zero_options: str = "{}"
    warm_up: int = 3
    steps: int = 5
    config: str | None = None
    against: str | None = None

    def __post_init__(self):
        if faults := [*self._faults()]:
            raise ValueError("\n".join(faults))

    def _faults(self) -> Iterator[str]:
        for check in (
            lambda: check_trained(self.workload),
            lambda: check_policy("tower", self.tower, or_auto=True),
            lambda: check_policy("language", self.language, or_auto=True),
            lambda: check_optimizer(self.optimizer),
            self._check_zero_options,
        ):
            try:
                check()
            except ValueError as error:
                yield str(error)
        if self.zero_stage not in (0, 1, 2, 3):
            yield f"the ZeRO stage is {self.zero_stage}; expected 0, 1, 2 or 3"
        for name in ("micro_batch", "text_tokens", "warm_up", "steps", "loss_chunk"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}; expected at least 1"
        if self.shortest_text is not None and not 1 <= self.shortest_text <= self.text_tokens:
            yield (
                f"shortest_text is {self.shortest_text}; expected from 1 to text_tokens, which is "
                f"{self.text_tokens}"
            )
        if self.memory_limit is not None and not 0 < self.memory_limit < math.inf:
            yield f"memory_limit is {self.memory_limit}; expected a number above 0, in GiB"
        if self.kept_gathered is not None and not 0 <= self.kept_gathered < math.inf:
            yield f"kept_gathered is {self.kept_gathered}; expected a number of weights"
        if self.layers_ahead < 0:
            yield f"layers_ahead is {self.layers_ahead}; expected at least 0"
        yield from self._conflicts()

    def _conflicts(self) -> Iterator[str]:
        if self.packed and self.against is not None:
            yield "the original's code takes no packed rows: leave out packed"
        if self.workload == "qlora" and self.zero_stage != 0:
            yield (
                f"qlora with ZeRO stage {self.zero_stage}: weights of 4 bits cannot be sharded by "
                "ZeRO; use stage 0"
            )
        if self.offload and self.zero_stage == 0:
            yield "offload with ZeRO stage 0: ZeRO offloads the optimizer, use stage 1 to 3"
        if self.offload and self.optimizer == "adamw_8bit":
            yield "offload with adamw_8bit, which runs on a GPU: use adamw, or leave out offload"
        if self.reuse_features and trains_tower(self.workload):
            yield (
                f"{self.workload} trains the vision tower: its features change with every step and "
                "cannot be reused; use lm, lora_lm or qlora"
            )

    def _check_zero_options(self) -> None:
        own = [name for name in self.zero_changes() if name.endswith(GATHERS_OF_DEEPSPEED)]
        if own and self.compile and self.gather_in_place:
            raise ValueError(
                f"zero_options has {', '.join(own)}, which says how DeepSpeed gathers, and weights "
                "are gathered in place: add --copy-gathered"
            )

    def text_lengths(self) -> list[int]:
        """Ids of text of each sample of a step, the longest first."""
        longest, shortest = self.text_tokens, self.shortest_text or self.text_tokens
        steps = max(self.micro_batch - 1, 1)
        return [longest - (longest - shortest) * i // steps for i in range(self.micro_batch)]

    def zero_changes(self) -> dict:
        """``zero_options``, read."""
        try:
            changes = json.loads(self.zero_options)
        except ValueError as error:
            raise ValueError(f"zero_options {self.zero_options!r} is not JSON: {error}") from error
        if not isinstance(changes, dict):
            raise ValueError(
                f"zero_options is {self.zero_options!r}; expected an object as in "
                """'{"overlap_comm": false}'"""
            )
        return changes

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        return cls(**json.loads(text))
