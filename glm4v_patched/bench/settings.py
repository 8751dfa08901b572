"""What a measurement is asked for. Each field of a dataclass here is an option of the command, with
its default and help; needs no torch, so that ``--help`` and mistakes are answered at once."""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..engine.activation_policies import EVERY, POLICIES, check_policy
from ..engine.options import OPTIMIZERS, TRAINED, EngineOptions
from ..inference.command import CACHES
from ..models.quantised_weights import check_weights, kept_cache
from ..option_fields import option
from ..paths import expand

GATHERS_OF_DEEPSPEED = ("allgather_sequential", "use_all_reduce_for_fetch_params")
# What bench calls otherwise than a recipe and its command.
OWN_WORDS = {"engine.": "", "data.": "", "--processes": "--gpus"}
OWN_WORDS |= {"--device cpu": "--device cpu --config FILE"}


def at_least(least: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text}; expected at least {least}")
        return value

    return number


def json_object(text: str) -> str:
    try:
        is_object = isinstance(json.loads(text), dict)
    except ValueError:
        is_object = False
    if not is_object:
        expected = """expected a JSON object as '{"name": true}'"""
        raise argparse.ArgumentTypeError(f"{text!r}; {expected}")
    return text


def policy(text: str) -> str:
    try:
        check_policy("model", text, or_auto=True)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def picture_size(text: str) -> str:
    sides = text.split("x")
    if len(sides) != 2 or not all(side.isdecimal() and 0 < int(side) <= 65500 for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r}; expected pixels as 4000x3000")
    return text


def in_own_words(told: str) -> str:
    """What a recipe would be told, for those who asked bench."""
    for theirs, ours in OWN_WORDS.items():
        told = told.replace(theirs, ours)
    return told


_POLICIES = f"auto (by memory), {', '.join(POLICIES)} or '{EVERY}'"
_ONE, _JSON = {"type": at_least(1)}, {"metavar": "JSON", "type": json_object}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every process of a training measures. Fields that :class:`EngineOptions` has, too, mean
    the same there."""

    trained: str = option("lora_lm", "what of the model", choices=TRAINED)
    micro_batch: int = option(1, "samples in a step of one GPU", **_ONE)
    text_tokens: int = option(512, "ids of text in a sample, beside its image", **_ONE)
    shortest_text: int | None = option(None, "texts from so many ids up to --text-tokens, evenly")
    packed: bool = option(False, "all samples in one row, instead of padded rows")
    attn_implementation: str = option("sdpa", "of transformers", metavar="NAME")
    zero_stage: int = option(3, "0 is one process without DeepSpeed", choices=(0, 1, 2, 3))
    fp8: bool = option(False, "matrix products in fp8, on Ada, Hopper and newer")
    optimizer: str = option("adamw", "adamw_8bit needs bitsandbytes", choices=OPTIMIZERS)
    offload: bool = option(False, "keep the optimizer's states on the CPU")
    memory_limit: float | None = option(
        None, "GiB that torch may allocate on a GPU", type=at_least(1, float)
    )
    tower: str = option(
        "auto", f"activations the vision tower keeps: {_POLICIES}", metavar="P", type=policy
    )
    language: str = option("auto", "the same for the language model", metavar="P", type=policy)
    compile: bool = option(True, "leave layers uncompiled", flag="--no-compile")
    stage3_max_live_parameters: float | None = option(
        None, "default: by memory", type=at_least(0, float)
    )
    gather_in_place: bool = option(True, "gather as DeepSpeed does", flag="--copy-gathered")
    layers_ahead: int = option(3, "of the GPU the CPU may be; 0: any number", type=at_least(0))
    reuse_features: bool = option(False, "image features are there, as from the second epoch on")
    loss_chunk_size: int = option(1024, "positions whose logits are held at once", **_ONE)
    all_logits: bool = option(False, "logits of all positions at once, without chunks")
    profile: bool = option(False, "also say which kernels the GPU ran in a step")
    from_files: str | None = option(
        None, "train by the recipe, from JPEG files of this size", metavar="WxH", type=picture_size
    )
    model: str | None = option(
        None, "with --from-files: these weights, not random ones", metavar="FOLDER", type=expand
    )
    zero_options: str = option("{}", "laid over DeepSpeed's zero_optimization", **_JSON)
    warm_up: int = option(3, "steps before the timed ones", **_ONE)
    steps: int = option(5, "timed steps", **_ONE)
    config: str | None = option(None, "config.json of another size", metavar="FILE", type=expand)
    against: str | None = option(
        None, "the original's code, measured, too", metavar="FOLDER", type=expand
    )

    def __post_init__(self) -> None:
        # Late, for it imports pydantic, which no other command needs.
        from ..finetune.recipe.rules import conflicts

        of_recipe = [in_own_words(fault.text) for fault in conflicts(self.known())]
        if faults := [*of_recipe, *self._conflicts()]:
            raise ValueError("\n".join(faults))

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


# What a recipe's engine has, too; and what else a row of --from-files may ask for.
OF_ENGINE = {"zero_stage", "fp8", "tower", "language", "compile", "optimizer", "offload"}
OF_ENGINE |= {"memory_limit"}
OF_THE_RECIPE = {"trained", "micro_batch", "text_tokens", "shortest_text", "warm_up", "steps"}
OF_THE_RECIPE |= {"from_files", "model", "config", *OF_ENGINE}

DEFAULTS = {each.name: each.default for each in fields(Settings)}


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What of generation is measured, and how. Fields without a help are options already."""

    batch: tuple[int, ...] = option((1, 8, 32), "rows at once, each number measured", **_ONE)
    new_tokens: int = option(128, "of each answer", type=at_least(2))
    prompt_tokens: int = option(40, "ids of text beside a prompt's picture", **_ONE)
    cache: str = option("auto", "auto: static, if steps can be recorded", choices=CACHES)
    repeats: int = option(3, "timed answers of each batch; their median counts", **_ONE)
    attn_implementation: str = "sdpa"
    config: str | None = None
    against: str | None = None
    device: str = "cuda"
    weights: str | None = None

    def __post_init__(self) -> None:
        check_weights(self.weights, self.device, self.cache)
        if faults := [*self._conflicts()]:
            raise ValueError("\n".join(faults))

    def _conflicts(self) -> Iterator[str]:
        if self.device == "cpu" and self.config is None:
            yield REAL_ON_CPU
        if self.against is None:
            return
        if self.weights is not None:
            told = f"--weights {self.weights} is not of the original's code"
            yield f"{told}, of --against: leave out one"
        if not Path(self.against, "config.json").is_file():
            expected = "expected a folder with the published repository"
            yield f"--against {self.against} has no config.json: {expected}"

    @property
    def kept(self) -> str:
        """The cache that is measured."""
        return kept_cache(self.cache, self.weights, "static")


REAL_ON_CPU = (
    "--device cpu with the real model, of 13.9 billion weights: expected --config of a small one"
)
