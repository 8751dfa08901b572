"""What a recipe may say, typed and checked; needs no torch, so that mistakes are answered at once.

A recipe is a YAML or JSON file. Fields of ``trainer`` have the names of transformers'
``TrainingArguments``.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..training.choices import check_policy, trains_tower


class RecipeError(ValueError):
    """A recipe cannot be; the message has a line for each fault."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _policy(policy: str) -> str:
    check_policy("layers", policy, or_auto=True)
    return policy


Policy = Annotated[str, AfterValidator(_policy)]
AtLeastOne = Annotated[int, Field(ge=1)]


class Data(_Section):
    """What is learned."""

    train: str
    """JSONL file of conversations."""
    pack_to: AtLeastOne | None = None
    """Pack conversations into rows of at most so many positions, none longer; the batch size then
    counts such rows."""
    on_bad: Literal["fail", "skip"] = "fail"
    """What to do about rows that cannot be used: end with their list, or leave them out."""
    reuse_features: bool | str = False
    """A picture goes through the vision tower, which must be frozen, only the first time. What came
    out is kept in the folder named; or, if true, in the memory of each process, up to 16 GiB, which
    is of use to a single process: others draw other pictures in each epoch."""


class Lora(_Section):
    """Adapters, where ``trained`` asks for them."""

    rank: AtLeastOne = 8
    """Rank of the adapters."""


class Engine(_Section):
    """How it is computed: numbers may round differently, what is learned is the same."""

    zero_stage: Literal[0, 1, 2, 3] = 3
    """Of DeepSpeed; 0 is a single process without it. What is trained is then held in fp32, and
    computed with under autocast where ``precision`` is bf16."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Of the computation and of what is saved."""
    tower: Policy = "auto"
    """Which activations the vision tower's layers keep (:mod:`activations`); "auto" is the fastest
    for which the GPUs' free memory suffices ("full" on a CPU)."""
    language: Policy = "auto"
    """The same for the language model's layers."""
    compile: bool = False
    """Compile the layers of both towers."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW with its states in fp32, or in 8 bits (bitsandbytes)."""
    offload: bool | Literal["auto"] = "auto"
    """Keep the optimizer's states and the fp32 weights on the CPU; "auto": where nothing else
    fits."""


class TrainerFields(_Section):
    """Fields of transformers' ``TrainingArguments``."""

    max_steps: AtLeastOne
    """Updates of the weights."""
    per_device_train_batch_size: AtLeastOne
    """Rows in a step of one process."""
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """The highest of the schedule."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the order of rows, and of adapters."""
    save_steps: AtLeastOne | None = None
    """Save a checkpoint to continue from every so many steps (not at the last one, where the model
    itself is saved); none if null."""
    save_total_limit: AtLeastOne | None = None
    """Keep so many of the newest checkpoints; all if null."""


class Recipe(_Section):
    """What to train and how."""

    model: str
    """Folder, or id of the Hub."""
    out: str
    """Folder for checkpoints and what is trained; of LoRA, the adapters alone."""
    data: Data
    trainer: TrainerFields
    trained: Literal["full", "lm", "lora_lm", "lora_all", "qlora"] = "full"
    """full: all weights; lm: all but the vision tower and its adapter; lora_lm: LoRA on the
    language model; lora_all: on both towers; qlora: as lora_lm, on weights of 4 bits."""
    lora: Lora = Lora()
    engine: Engine = Engine()
    revision: str | None = None
    """Branch, tag or commit of a model on the Hub."""
    max_nonfinite_steps: AtLeastOne = 3
    """End the run after so many steps in a row whose loss or gradient norm is NaN or infinite. One
    may be a matter of its batch, and newer DeepSpeed leaves it out; of weights that have become
    NaN, every later step is such a one."""

    @model_validator(mode="after")
    def _check_together(self) -> "Recipe":
        engine = self.engine
        if engine.offload is True and engine.zero_stage == 0:
            raise ValueError(
                "engine.offload with zero_stage 0: ZeRO offloads the optimizer; expected "
                "engine.zero_stage 1, 2 or 3, or engine.offload to be false"
            )
        if engine.offload is True and engine.optimizer == "adamw_8bit":
            raise ValueError(
                "engine.offload with adamw_8bit, which runs on a GPU: expected engine.optimizer to "
                "be adamw, or engine.offload to be false"
            )
        if self.trained == "qlora" and engine.zero_stage != 0:
            raise ValueError(
                f"qlora with engine.zero_stage {engine.zero_stage}: weights of 4 bits cannot be "
                "sharded; expected engine.zero_stage 0, and one process"
            )
        if self.revision is not None and (not self.revision or Path(self.model).is_dir()):
            raise ValueError(
                f"revision is {self.revision!r} of {self.model}; expected null for a folder, and "
                "a branch, tag or commit for an id of the Hub"
            )
        if self.data.reuse_features == "":
            raise ValueError("data.reuse_features is ''; expected true, false or a folder")
        if self.data.reuse_features and trains_tower(self.trained):
            raise ValueError(
                f"{self.trained} trains the vision tower, whose features change with every step "
                "and cannot be reused; expected trained to be lm, lora_lm or qlora, or "
                "data.reuse_features to be false"
            )
        return self

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Recipe":
        """Raises :class:`RecipeError` with all faults."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise RecipeError("\n".join(map(_fault, error.errors()))) from None

    def override(self, values: Mapping[str, Any]) -> "Recipe":
        """This recipe with other values of some fields, by dotted names as ``engine.compile``.

        Raises:
            RecipeError: a field is unknown or a value cannot be.
        """
        nested = self.model_dump()
        for name, value in values.items():
            *sections, field = name.split(".")
            place = nested
            for section in sections:
                place = place[section]
            place[field] = value
        return self.of(nested)

    def flat(self) -> dict[str, Any]:
        """Values by dotted names."""
        values = {}
        for name, value in self.model_dump().items():
            if isinstance(value, dict):
                values |= {f"{name}.{field}": part for field, part in value.items()}
            else:
                values[name] = value
        return values

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Of the fields that a recipe may leave out, by dotted names."""
        return _defaults(cls)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.model_dump(), indent=2))

    @classmethod
    def read(cls, path: Path) -> "Recipe":
        """Raises :class:`RecipeError`, which names the file, with all faults."""
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path} is neither YAML nor JSON: {error}") from None
        try:
            return cls.of(values)
        except RecipeError as error:
            raise RecipeError(f"{path} is no recipe:\n{error}") from None


def _defaults(section: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    values = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, _Section):
            values |= _defaults(field.annotation, f"{prefix}{name}.")
        elif not field.is_required():
            values[prefix + name] = field.default
    return values


def _fault(error: Mapping[str, Any]) -> str:
    name = ".".join(map(str, error["loc"]))
    match error["type"]:
        case "missing":
            return f"{name} is missing"
        case "extra_forbidden":
            return f"{name} is not a field of a recipe"
        case _:
            text = error["msg"].removeprefix("Value error, ")
            return f"{name} is {error['input']!r}: {text}" if name else text
