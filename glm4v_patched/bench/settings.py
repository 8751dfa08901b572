"""What a measurement is asked for. Each field of a dataclass here is an option of the command, with
its default and help; needs no torch, so that ``--help`` and mistakes are answered at once."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import Field, asdict, dataclass, fields
from typing import Any

from ..engine.options import TRAINED, EngineOptions, EngineSection
from ..inference.questions import CACHES
from ..models.quantized_weights import check_weights_option, resolve_cache
from ..option_fields import option
from ..paths import expand_path

# What bench calls otherwise than a recipe and its command.
RECIPE_TO_BENCH_TERMS = {"engine.": "", "data.": "", "--processes": "--gpus"}
RECIPE_TO_BENCH_TERMS |= {"--device cpu": "--device cpu --config FILE"}


def image_size(text: str) -> str:
    sides = text.split("x")
    if len(sides) != 2 or not all(side.isdecimal() and 0 < int(side) <= 65500 for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r}; expected pixels as 4000x3000")
    return text


def in_bench_terms(told: str) -> str:
    """What a recipe would be told, for those who asked bench."""
    for theirs, ours in RECIPE_TO_BENCH_TERMS.items():
        told = told.replace(theirs, ours)
    return told


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What every process of a training measures; :class:`EngineSection` has options of its own."""

    trained: str = option("lora_lm", "what of the model", choices=TRAINED)
    micro_batch: int = option(1, "samples in a step of one GPU", ge=1)
    text_tokens: int = option(512, "ids of text in a sample, beside its image", ge=1)
    shortest_text: int | None = option(None, "texts from so many ids up to --text-tokens, evenly")
    packed: bool = option(False, "all samples in one row, instead of padded rows")
    reuse_features: bool = option(False, "image features are there, as from the second epoch on")
    from_files: str | None = option(
        None, "read samples from JPEG files of this size", metavar="WxH", type=image_size
    )
    model: str | None = option(
        None, "these weights, not random ones", metavar="FOLDER", type=expand_path
    )
    warm_up: int = option(3, "steps before the timed ones", ge=1)
    steps: int = option(5, "timed steps", ge=1)
    config: str | None = option(None, "config.json of another size", metavar="FILE", type=expand_path)
    engine: EngineSection = EngineSection()

    def __post_init__(self) -> None:
        # Late, for it imports pydantic, which no other command needs.
        from ..finetune.recipe.rules import conflicts

        of_recipe = [in_bench_terms(fault.text) for fault in conflicts(self.recipe_fields())]
        if faults := [*of_recipe, *self._conflicts()]:
            raise ValueError("\n".join(faults))

    def _conflicts(self) -> Iterator[str]:
        longest, shortest = self.text_tokens, self.shortest_text
        if shortest is not None and not 1 <= shortest <= longest:
            yield f"shortest_text is {shortest}; expected from 1 to text_tokens, which is {longest}"
        if self.packed and self.from_files is not None:
            yield "packed with from_files, whose samples are padded: leave out one of them"

    @classmethod
    def read(cls, text: str) -> "Settings":
        """The settings of :meth:`text`; what is left out has its default."""
        values = json.loads(text)
        return cls(**values | {"engine": EngineSection(**values.get("engine", {}))})

    def text(self) -> str:
        return json.dumps(asdict(self))

    def changed_values(self) -> dict[str, Any]:
        """What is not the default."""
        every: list[tuple[Any, Field]] = [
            (self, each) for each in fields(TrainingSettings) if each.name != "engine"
        ]
        every += [(self.engine, each) for each in fields(EngineSection)]
        found = {each.name: (getattr(of, each.name), each.default) for of, each in every}
        return {name: value for name, (value, default) in found.items() if value != default}

    def recipe_fields(self) -> dict[str, Any]:
        """What a recipe has, too, by its names there."""
        named = {f"engine.{name}": value for name, value in asdict(self.engine).items()}
        return named | {"trained": self.trained, "data.reuse_features": self.reuse_features}

    def engine_options(self) -> EngineOptions:
        return EngineOptions(trained=self.trained, **asdict(self.engine))

    def text_lengths(self) -> list[int]:
        """Ids of text of each sample of a step, the longest first."""
        longest, shortest = self.text_tokens, self.shortest_text or self.text_tokens
        steps = max(self.micro_batch - 1, 1)
        return [longest - (longest - shortest) * i // steps for i in range(self.micro_batch)]


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """Where it is measured."""

    gpus: int = option(2, "processes, one for each GPU", ge=1)
    device: str = option("cuda", "cpu: for a small --config", choices=("cuda", "cpu"))
    timeout: float = option(600, "seconds for one row", ge=1)


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """What of generation is measured, and how. Fields without a help are options already."""

    batch: tuple[int, ...] = option((1, 8, 32), "rows at once, each number measured", ge=1)
    new_tokens: int = option(128, "of each answer", ge=2)
    prompt_tokens: int = option(40, "ids of text beside a prompt's image", ge=1)
    cache: str = option("auto", "auto: static, if steps can be recorded", choices=CACHES)
    repeats: int = option(3, "timed answers of each batch; their median counts", ge=1)
    config: str | None = None
    device: str = "cuda"
    weights: str | None = None

    def __post_init__(self) -> None:
        check_weights_option(self.weights, self.device, self.cache)
        if self.device == "cpu" and self.config is None:
            raise ValueError(FULL_SIZE_ON_CPU)

    @property
    def resolved_cache(self) -> str:
        """The cache that is measured."""
        return resolve_cache(self.cache, self.weights, "static")


FULL_SIZE_ON_CPU = (
    "--device cpu with the real model, of 13.9 billion weights: expected --config of a small one"
)
