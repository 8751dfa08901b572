"""What a measurement is asked for; needs no torch, so that mistakes are answered at once."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from ..engine.activation_policies import EVERY, POLICIES, check_policy
from ..engine.options import OPTIMIZERS, TRAINED, EngineOptions

GATHERS_OF_DEEPSPEED = ("allgather_sequential", "use_all_reduce_for_fetch_params")


# What bench calls otherwise than a recipe and its command.
OWN_WORDS = {"engine.": "", "data.": "", "--processes": "--gpus"}
OWN_WORDS |= {"--device cpu": "--device cpu --config FILE"}


def in_own_words(told: str) -> str:
    """What a recipe would be told, for those who asked bench."""
    for theirs, ours in OWN_WORDS.items():
        told = told.replace(theirs, ours)
    return told


def _option(default: Any, help: str, **more: Any) -> Any:
    """A field that is an option of the command. More: its ``choices``, the smallest number
    (``at_least``), its ``flag`` where that is not the field's name, argparse's ``metavar``."""
    return field(default=default, metadata={"help": help, **more})


_POLICIES = f"auto (by memory), {', '.join(POLICIES)} or '{EVERY}'"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every process of a group measures. Each field is an option, and says there what it is.

    Fields that :class:`EngineOptions` has, too, mean the same there.
    """

    trained: str = _option("lora_lm", "what of the model", choices=TRAINED)
    micro_batch: int = _option(1, "samples in a step of one GPU", at_least=1)
    text_tokens: int = _option(512, "ids of text in a sample, beside its image", at_least=1)
    shortest_text: int | None = _option(None, "texts from so many ids up to --text-tokens, evenly")
    packed: bool = _option(False, "all samples in one row, instead of padded rows")
    attn_implementation: str = _option("sdpa", "of transformers", metavar="NAME")
    liger: bool = _option(False, "RMSNorm and SwiGLU of Liger-Kernel")
    zero_stage: int = _option(3, "0 is one process without DeepSpeed", choices=(0, 1, 2, 3))
    fp8: bool = _option(False, "matrix products in fp8, on Ada, Hopper and newer")
    optimizer: str = _option("adamw", "adamw_8bit needs bitsandbytes", choices=OPTIMIZERS)
    offload: bool = _option(False, "keep the optimizer's states on the CPU")
    memory_limit: float | None = _option(None, "GiB that torch may allocate on a GPU", at_least=1)
    tower: str = _option("auto", f"activations the vision tower keeps: {_POLICIES}", metavar="P")
    language: str = _option("auto", "the same for the language model", metavar="P")
    compile: bool = _option(True, "leave layers uncompiled", flag="--no-compile")
    stage3_max_live_parameters: float | None = _option(None, "default: by memory", at_least=0)
    gather_in_place: bool = _option(True, "gather as DeepSpeed does", flag="--copy-gathered")
    layers_ahead: int = _option(3, "of the GPU the CPU may be; 0: any number", at_least=0)
    reuse_features: bool = _option(False, "image features are there, as from the second epoch on")
    loss_chunk_size: int = _option(1024, "positions whose logits are held at once", at_least=1)
    all_logits: bool = _option(False, "logits of all positions at once, without chunks")
    profile: bool = _option(False, "also say which kernels the GPU ran in a step")
    from_files: str | None = _option(
        None, "train through the recipe, from JPEG files of this size: 4000x3000", metavar="WxH"
    )
    model: str | None = _option(
        None, "with --from-files: these weights, not random ones", metavar="FOLDER"
    )
    zero_options: str = _option("{}", "laid over DeepSpeed's zero_optimization", metavar="JSON")
    warm_up: int = _option(3, "steps before the timed ones", at_least=1)
    steps: int = _option(5, "timed steps", at_least=1)
    config: str | None = _option(None, "config.json of another size", metavar="FILE")
    against: str | None = _option(None, "the original's code, measured, too", metavar="FOLDER")

    def __post_init__(self) -> None:
        # Late, for it imports pydantic, which no other command needs.
        from ..finetune.config import conflicts

        of_recipe = [in_own_words(fault.text) for fault in conflicts(self.known())]
        if faults := [*self._faults_of_fields(), *of_recipe, *self._conflicts()]:
            raise ValueError("\n".join(faults))

    def _faults_of_fields(self) -> Iterator[str]:
        for each in fields(self):
            value, name = getattr(self, each.name), each.name
            choices, least = each.metadata.get("choices"), each.metadata.get("at_least")
            if choices and value not in choices:
                yield f"{name} is {value!r}; expected one of {', '.join(map(str, choices))}"
            if least is not None and value is not None and not least <= value < math.inf:
                yield f"{name} is {value}; expected at least {least}"
        policies = ("tower", self.tower), ("language", self.language)
        checks: list[Callable] = [partial(check_policy, *of, or_auto=True) for of in policies]
        for check in (*checks, self.zero_changes, self.picture_size):
            try:
                check()
            except ValueError as error:
                yield str(error)

    def _conflicts(self) -> Iterator[str]:
        longest, shortest = self.text_tokens, self.shortest_text
        own = ", ".join(name for name in GATHERS_OF_DEEPSPEED if name in self.zero_options)
        if shortest is not None and not 1 <= shortest <= longest:
            yield f"shortest_text is {shortest}; expected from 1 to text_tokens, which is {longest}"
        if own and self.compile and self.gather_in_place:
            yield f"zero_options has {own}, but weights are gathered in place: add --copy-gathered"
        for name in ("packed", "fp8"):
            if getattr(self, name) and self.against is not None:
                yield f"the original's code, of against, knows no {name}: leave out one of them"
        if self.trained == "qlora" and self.compile:
            yield "qlora is not compiled, as in a recipe that does not ask for it: add --no-compile"
        if self.model is not None and self.from_files is None:
            yield f"model is {self.model}, without from_files: weights are then random"
        if self.from_files is not None:
            rest = DEFAULTS.keys() - OF_THE_RECIPE
            if changed := sorted(n for n in rest if getattr(self, n) != DEFAULTS[n]):
                yield f"from_files takes the recipe's own {', '.join(changed)}: leave them out"

    def known(self) -> dict[str, Any]:
        """What a recipe has, too, by its names there."""
        named = {f"engine.{name}": getattr(self, name) for name in OF_ENGINE}
        named |= {"trained": self.trained, "data.reuse_features": self.reuse_features}
        return named | {"engine.zero_quantized_weights": "quantized_weights" in self.zero_options}

    def engine_options(self) -> EngineOptions:
        """The recipe's defaults, but for what is asked; of the original's code, nothing of ours."""
        shared = DEFAULTS.keys() & {each.name for each in fields(EngineOptions)}
        asked = {name: getattr(self, name) for name in shared}
        if self.against is not None:
            asked |= {"tower": "full", "language": "full", "compile": False}
            asked |= {"norms_in_place": False, "layers_ahead": 0}
        return EngineOptions(skip_logits=not self.all_logits, **asked)

    def text_lengths(self) -> list[int]:
        """Ids of text of each sample of a step, the longest first."""
        longest, shortest = self.text_tokens, self.shortest_text or self.text_tokens
        steps = max(self.micro_batch - 1, 1)
        return [longest - (longest - shortest) * i // steps for i in range(self.micro_batch)]

    def picture_size(self) -> tuple[int, int]:
        """Width and height that ``from_files`` asks for; the model's own where it does not."""
        width, _, height = (self.from_files or "1120x1120").partition("x")
        if not all(side.isdecimal() and 0 < int(side) <= 65500 for side in (width, height)):
            raise ValueError(f"from_files is {self.from_files!r}; expected pixels as 4000x3000")
        return int(width), int(height)

    def zero_changes(self) -> dict:
        """``zero_options``, read."""
        with suppress(ValueError):
            if isinstance(changes := json.loads(self.zero_options), dict):
                return changes
        expected = """expected a JSON object as '{"overlap_comm": false}'"""
        raise ValueError(f"zero_options is {self.zero_options!r}; {expected}")


# What a recipe's engine has, too; and what else a row of --from-files may ask for.
OF_ENGINE = {"zero_stage", "fp8", "tower", "language", "compile", "optimizer", "offload"}
OF_ENGINE |= {"memory_limit"}
OF_THE_RECIPE = {"trained", "micro_batch", "text_tokens", "shortest_text", "warm_up", "steps"}
OF_THE_RECIPE |= {"from_files", "model", "config", *OF_ENGINE}

DEFAULTS = {each.name: each.default for each in fields(Settings)}
