"""What a measurement is asked for; needs no torch, so that mistakes are answered at once."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..engine.activation_policies import EVERY, POLICIES, check_policy
from ..engine.options import OPTIMIZERS, TRAINED, trains_tower

GATHERS_OF_DEEPSPEED = ("allgather_sequential", "use_all_reduce_for_fetch_params")
# What fields were called in older rows and in their commands.
OLD_NAMES = {
    "workload": "trained",
    "attention": "attn_implementation",
    "loss_chunk": "loss_chunk_size",
    "kept_gathered": "stage3_max_live_parameters",
}


def _option(default: Any, help: str, **more: Any) -> Any:
    """A field that is an option of the command.

    Args:
        more: ``choices``; ``at_least``, the smallest number; ``flag``, where the option's name is
            not the field's; ``metavar``, as in argparse.
    """
    return field(default=default, metadata={"help": help, **more})


_POLICIES = f"auto (by memory), {', '.join(POLICIES)} or '{EVERY}'"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One workload, measured by every process of a group. Each field is an option of the command,
    and says there what it is."""

    trained: str = _option("lora_lm", "what of the model", choices=TRAINED)
    micro_batch: int = _option(1, "samples in a step of one GPU", at_least=1)
    text_tokens: int = _option(512, "ids of text in a sample, beside its image", at_least=1)
    shortest_text: int | None = _option(
        None, "text lengths from this up to --text-tokens, evenly; default: all alike", metavar="N"
    )
    packed: bool = _option(False, "all samples in one row, instead of padded rows")
    attn_implementation: str = _option("sdpa", "of transformers", metavar="NAME")
    liger: bool = _option(False, "RMSNorm and SwiGLU of Liger-Kernel")
    zero_stage: int = _option(3, "0 is one process without DeepSpeed", choices=(0, 1, 2, 3))
    optimizer: str = _option("adamw", "adamw_8bit needs bitsandbytes", choices=OPTIMIZERS)
    offload: bool = _option(False, "keep the optimizer's states on the CPU")
    memory_limit: float | None = _option(
        None, "cap on what torch may allocate on a GPU", at_least=1, metavar="GIB"
    )
    tower: str = _option("auto", f"activations the vision tower keeps: {_POLICIES}", metavar="P")
    language: str = _option("auto", "the same for the language model", metavar="P")
    compile: bool = _option(True, "leave layers uncompiled", flag="--no-compile")
    stage3_max_live_parameters: float | None = _option(
        None, "of DeepSpeed; default: by memory", at_least=0, metavar="N"
    )
    gather_in_place: bool = _option(
        True, "ZeRO-3 gathers into a buffer and copies, as DeepSpeed does", flag="--copy-gathered"
    )
    layers_ahead: int = _option(
        3, "layers the CPU may be ahead of the GPU under ZeRO-3; 0: any number", at_least=0
    )
    reuse_features: bool = _option(False, "image features are there, as from the second epoch on")
    loss_chunk_size: int = _option(1024, "positions whose logits are held at once", at_least=1)
    all_logits: bool = _option(False, "logits of all positions at once, without chunks")
    profile: bool = _option(False, "also say which kernels the GPU ran in a step")
    zero_options: str = _option("{}", "laid over DeepSpeed's zero_optimization", metavar="JSON")
    warm_up: int = _option(3, "steps before the timed ones", at_least=1)
    steps: int = _option(5, "timed steps", at_least=1)
    config: str | None = _option(None, "config.json of another size than the real", metavar="FILE")
    against: str | None = _option(
        None, "folder with the original's code, measured beside ours", metavar="FOLDER"
    )

    def __post_init__(self) -> None:
        if faults := [*self._faults()]:
            raise ValueError("\n".join(faults))

    def _faults(self) -> Iterator[str]:
        for each in fields(self):
            value, name = getattr(self, each.name), each.name
            choices, least = each.metadata.get("choices"), each.metadata.get("at_least")
            if choices and value not in choices:
                yield f"{name} is {value!r}; expected one of {', '.join(map(str, choices))}"
            if least is not None and value is not None and not least <= value < math.inf:
                yield f"{name} is {value}; expected at least {least}"
        for name in ("tower", "language"):
            try:
                check_policy(name, getattr(self, name), or_auto=True)
            except ValueError as error:
                yield str(error)
        if self.shortest_text is not None and not 1 <= self.shortest_text <= self.text_tokens:
            yield (
                f"shortest_text is {self.shortest_text}; expected from 1 to text_tokens, which is "
                f"{self.text_tokens}"
            )
        yield from self._conflicts()

    def _conflicts(self) -> Iterator[str]:
        try:
            own = [name for name in self.zero_changes() if name.endswith(GATHERS_OF_DEEPSPEED)]
        except ValueError as error:
            yield str(error)
            own = []
        if own and self.compile and self.gather_in_place:
            yield (
                f"zero_options has {', '.join(own)}, which says how DeepSpeed gathers, and weights "
                "are gathered in place: add --copy-gathered"
            )
        if self.packed and self.against is not None:
            yield "the original's code takes no packed rows: leave out packed"
        if self.trained == "qlora" and self.zero_stage != 0:
            yield (
                f"qlora with ZeRO stage {self.zero_stage}: weights of 4 bits cannot be sharded by "
                "ZeRO; use stage 0"
            )
        if self.offload and self.zero_stage == 0:
            yield "offload with ZeRO stage 0: ZeRO offloads the optimizer, use stage 1 to 3"
        if self.offload and self.optimizer == "adamw_8bit":
            yield "offload with adamw_8bit, which runs on a GPU: use adamw, or leave out offload"
        if self.reuse_features and trains_tower(self.trained):
            yield (
                f"{self.trained} trains the vision tower: its features change with every step and "
                "cannot be reused; use lm, lora_lm or qlora"
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


def settings_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's settings by their names of today; what an older row does not know is left out."""
    return {OLD_NAMES.get(name, name): value for name, value in row["settings"].items()}


DEFAULTS = {each.name: each.default for each in fields(Settings)}
