"""Settings of measurements. Each field of these dataclasses is an option of the command.

Imports no torch, so that ``--help`` and wrong options are answered at once.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import Field, asdict, dataclass, fields
from typing import Any

from ..engine.options import TRAINED_CHOICES, EngineOptions, EngineSection
from ..inference.questions import CACHES
from ..models.quantized_weights import check_weights_option, choose_cache_implementation
from ..option_fields import option
from ..paths import expand_path

# Names in messages about recipes, and the names of the same options of bench.
RECIPE_TO_BENCH_TERMS = {"engine.": "", "data.": "", "--processes": "--gpus"}
RECIPE_TO_BENCH_TERMS |= {"--device cpu": "--device cpu --config FILE"}


def image_size(text: str) -> str:
    """Validate an image size such as ``4000x3000`` for argparse, and return it."""
    sides = text.split("x")
    if len(sides) != 2 or not all(side.isdecimal() and 0 < int(side) <= 65500 for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r}; expected width and height as 4000x3000")
    return text


def in_bench_terms(message: str) -> str:
    """Replace names of recipe fields in a message by the options of bench."""
    for recipe_term, bench_term in RECIPE_TO_BENCH_TERMS.items():
        message = message.replace(recipe_term, bench_term)
    return message


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of one measurement of training, the same in every process.

    ``engine`` has the options of :class:`EngineSection`, as a recipe has them.
    """

    trained: str = option("lora_lm", "which weights are trained", choices=TRAINED_CHOICES)
    micro_batch: int = option(1, "samples in a step of one GPU", ge=1)
    text_tokens: int = option(512, "text tokens in a sample, besides its image", ge=1)
    shortest_text: int | None = option(
        None, "text tokens of the shortest sample; lengths rise evenly up to --text-tokens"
    )
    packed: bool = option(False, "pack all samples into one sequence, instead of padding them")
    reuse_features: bool = option(False, "reuse image features, as from the second epoch on")
    from_files: str | None = option(
        None, "read samples from JPEG files of this size", metavar="WxH", type=image_size
    )
    model: str | None = option(
        None, "train these weights, not random ones", metavar="FOLDER", type=expand_path
    )
    warm_up: int = option(3, "steps before the timed ones", ge=1)
    steps: int = option(5, "timed steps", ge=1)
    config: str | None = option(
        None, "config.json of a model of another size", metavar="FILE", type=expand_path
    )
    engine: EngineSection = EngineSection()

    def __post_init__(self) -> None:
        # Imported here, because this module imports pydantic, which --help does not need.
        from ..finetune.recipe.rules import conflicts

        problems = [in_bench_terms(problem.text) for problem in conflicts(self.recipe_fields())]
        problems += self._conflicts()
        if problems:
            raise ValueError("\n".join(problems))

    def _conflicts(self) -> Iterator[str]:
        longest, shortest = self.text_tokens, self.shortest_text
        if shortest is not None and not 1 <= shortest <= longest:
            yield f"shortest_text is {shortest}; expected from 1 to text_tokens, which is {longest}"
        if self.packed and self.from_files is not None:
            yield "packed does not work with from_files, whose samples are padded: drop one of them"

    @classmethod
    def from_json(cls, text: str) -> "TrainingSettings":
        """Return the settings that :meth:`to_json` wrote; missing ones have their defaults."""
        values = json.loads(text)
        return cls(**values | {"engine": EngineSection(**values.get("engine", {}))})

    def to_json(self) -> str:
        """Return the settings as JSON."""
        return json.dumps(asdict(self))

    def changed_values(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, by name."""
        owned_fields: list[tuple[Any, Field]] = [
            (self, field) for field in fields(TrainingSettings) if field.name != "engine"
        ]
        owned_fields += [(self.engine, field) for field in fields(EngineSection)]
        return {
            field.name: value
            for owner, field in owned_fields
            if (value := getattr(owner, field.name)) != field.default
        }

    def recipe_fields(self) -> dict[str, Any]:
        """Return the settings that a recipe also has, by their names in a recipe."""
        engine = {f"engine.{name}": value for name, value in asdict(self.engine).items()}
        return engine | {"trained": self.trained, "data.reuse_features": self.reuse_features}

    def engine_options(self) -> EngineOptions:
        """Return the options that the engine takes."""
        return EngineOptions(trained=self.trained, **asdict(self.engine))

    def text_lengths(self) -> list[int]:
        """Return the number of text tokens of each sample of a step, the longest first."""
        longest, shortest = self.text_tokens, self.shortest_text or self.text_tokens
        intervals = max(self.micro_batch - 1, 1)
        return [longest - (longest - shortest) * i // intervals for i in range(self.micro_batch)]


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """Processes and devices of a measurement."""

    gpus: int = option(2, "processes, one for each GPU", ge=1)
    device: str = option("cuda", "cpu needs a small --config", choices=("cuda", "cpu"))
    timeout: float = option(600, "seconds after which a measurement is stopped", ge=1)


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """Settings of the measurements of generation.

    Another dataclass declares the options of the fields that have no help text here.
    """

    batch: tuple[int, ...] = option((1, 8, 32), "batch sizes; each is measured", ge=1)
    new_tokens: int = option(128, "tokens of each answer", ge=2)
    prompt_tokens: int = option(40, "text tokens of a prompt, besides its image", ge=1)
    cache: str = option(
        "auto", "auto: static, if decode steps can be captured as CUDA graphs", choices=CACHES
    )
    repeats: int = option(3, "timed runs of each batch size; the median counts", ge=1)
    config: str | None = None
    device: str = "cuda"
    weights: str | None = None

    def __post_init__(self) -> None:
        check_weights_option(self.weights, self.device, self.cache)
        if self.device == "cpu" and self.config is None:
            raise ValueError(FULL_SIZE_ON_CPU_MESSAGE)

    @property
    def resolved_cache(self) -> str:
        """The kind of cache that is measured: ``auto`` is resolved."""
        return choose_cache_implementation(self.cache, self.weights, "static")


FULL_SIZE_ON_CPU_MESSAGE = (
    "--device cpu would measure the full-size model, of 13.9 billion weights; expected a --config "
    "of a small one"
)
