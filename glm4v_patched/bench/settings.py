"""What a measurement is asked for; needs no torch, so that mistakes are answered at once."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from ..engine.activation_policies import EVERY, POLICIES, check_policy
from ..engine.options import OPTIMIZERS, TRAINED, EngineOptions
from ..option_fields import check_object, faults_of_fields, option

GATHERS_OF_DEEPSPEED = ("allgather_sequential", "use_all_reduce_for_fetch_params")


# What bench calls otherwise than a recipe and its command.
OWN_WORDS = {"engine.": "", "data.": "", "--processes": "--gpus"}
OWN_WORDS |= {"--device cpu": "--device cpu --config FILE"}


def in_own_words(told: str) -> str:
    """What a recipe would be told, for those who asked bench."""
    for theirs, ours in OWN_WORDS.items():
        told = told.replace(theirs, ours)
    return told


def picture_size(name: str, text: str) -> tuple[int, int]:
    """Width and height in pixels, of ``WxH``."""
    width, _, height = text.partition("x")
    if not all(side.isdecimal() and 0 < int(side) <= 65500 for side in (width, height)):
        raise ValueError(f"{name} is {text!r}; expected pixels as 4000x3000")
    return int(width), int(height)


_policy = partial(check_policy, or_auto=True)
_POLICIES = f"auto (by memory), {', '.join(POLICIES)} or '{EVERY}'"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every process of a group measures. Each field is an option, and says there what it is.

    Fields that :class:`EngineOptions` has, too, mean the same there.
    """

    trained: str = option("lora_lm", "what of the model", choices=TRAINED)
    micro_batch: int = option(1, "samples in a step of one GPU", at_least=1)
    text_tokens: int = option(512, "ids of text in a sample, beside its image", at_least=1)
    shortest_text: int | None = option(None, "texts from so many ids up to --text-tokens, evenly")
    packed: bool = option(False, "all samples in one row, instead of padded rows")
    attn_implementation: str = option("sdpa", "of transformers", metavar="NAME")
    liger: bool = option(False, "RMSNorm and SwiGLU of Liger-Kernel")
    zero_stage: int = option(3, "0 is one process without DeepSpeed", choices=(0, 1, 2, 3))
    fp8: bool = option(False, "matrix products in fp8, on Ada, Hopper and newer")
    optimizer: str = option("adamw", "adamw_8bit needs bitsandbytes", choices=OPTIMIZERS)
    offload: bool = option(False, "keep the optimizer's states on the CPU")
    memory_limit: float | None = option(None, "GiB that torch may allocate on a GPU", at_least=1)
    tower: str = option(
        "auto", f"activations the vision tower keeps: {_POLICIES}", metavar="P", check=_policy
    )
    language: str = option("auto", "the same for the language model", metavar="P", check=_policy)
    compile: bool = option(True, "leave layers uncompiled", flag="--no-compile")
    stage3_max_live_parameters: float | None = option(None, "default: by memory", at_least=0)
    gather_in_place: bool = option(True, "gather as DeepSpeed does", flag="--copy-gathered")
    layers_ahead: int = option(3, "of the GPU the CPU may be; 0: any number", at_least=0)
    reuse_features: bool = option(False, "image features are there, as from the second epoch on")
    loss_chunk_size: int = option(1024, "positions whose logits are held at once", at_least=1)
    all_logits: bool = option(False, "logits of all positions at once, without chunks")
    profile: bool = option(False, "also say which kernels the GPU ran in a step")
    from_files: str | None = option(
        None, "train by the recipe, from JPEG files of this size", metavar="WxH", check=picture_size
    )
    model: str | None = option(
        None, "with --from-files: these weights, not random ones", metavar="FOLDER"
    )
    zero_options: str = option(
        "{}", "laid over DeepSpeed's zero_optimization", metavar="JSON", check=check_object
    )
    warm_up: int = option(3, "steps before the timed ones", at_least=1)
    steps: int = option(5, "timed steps", at_least=1)
    config: str | None = option(None, "config.json of another size", metavar="FILE")
    against: str | None = option(None, "the original's code, measured, too", metavar="FOLDER")

    def __post_init__(self) -> None:
        # Late, for it imports pydantic, which no other command needs.
        from ..finetune.recipe_rules import conflicts

        of_recipe = [in_own_words(fault.text) for fault in conflicts(self.known())]
        if faults := [*faults_of_fields(self), *of_recipe, *self._conflicts()]:
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
