"""The fields of a recipe, typed and checked.

A recipe is a YAML or JSON file. Fields of ``trainer`` are those of transformers'
``TrainingArguments``. Mistakes are reported at once, for torch is imported only where a recipe has
such a field that is not declared here.
"""

import difflib
import functools
import json
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, create_model
from pydantic.fields import FieldInfo

from ..atomic import write_atomically
from ..engine.options import (
    LANGUAGE_TARGETS,
    PARTS,
    TOWER_TARGETS,
    TRAINED,
    EngineOptions,
    LoraOptions,
    check_trained,
    is_lora,
    trains_vision,
)
from .other_names import OTHER_VALUES, cure
from .recipe_data import Data
from .recipe_file import (
    Document,
    Fault,
    RecipeError,
    place_all,
    read_document,
    read_scalar,
    shown,
    shown_name,
)
from .recipe_trainer import MAY_CHANGE_TOO, TrainerFields, refusal, whole_section
from .recipe_types import (
    MAY_CHANGE,
    AtLeastOne,
    Expected,
    Folder,
    Policy,
    Section,
    Text,
    check_whole,
    conflicts,
    refuse,
)

TARGETS = tuple(dict.fromkeys([*LANGUAGE_TARGETS, *TOWER_TARGETS]))
Target = Literal["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "fc1", "fc2"]


class Lora(Section):
    """Adapters, where ``trained`` asks for them."""

    rank: Annotated[int, Field(ge=1, le=4096), Expected("a whole number from 1 to 4096")] = 8
    """Rank of the adapters; the model's layers have at most 4096."""
    alpha: AtLeastOne | None = None
    """What they add is multiplied by alpha / rank; null: twice the rank. Here and below, adapters
    that go on being trained keep what they have where null is said."""
    dropout: Annotated[
        float | None, Field(ge=0, lt=1), Expected("a number from 0 to below 1 or null")
    ] = None
    """Of their input, in training; null: 0."""
    targets: Annotated[
        list[Target] | Literal["all-linear"] | None,
        Expected(f"a list of {', '.join(TARGETS)}, or all-linear or null"),
    ] = None
    """The linear layers that have adapters, of each layer of what "trained" says (fc1 and fc2 are
    the vision tower's, dense_... the language model's); null: query_key_value."""
    use_rslora: bool | None = None
    """Multiply by alpha / sqrt(rank) instead; null: false."""
    use_dora: bool | None = None
    """Learn the weights' magnitudes, too (not with engine.zero_stage 3); null: false."""

    def options(self, trained: str = "lora_all") -> LoraOptions:
        """For the engine."""
        given = self.model_dump()
        if self.targets == "all-linear":
            on_tower = TOWER_TARGETS if trained == "lora_all" else ()
            given["targets"] = tuple(dict.fromkeys([*LANGUAGE_TARGETS, *on_tower]))
        elif self.targets is not None:
            given["targets"] = tuple(self.targets)
        return LoraOptions(**given)


class EngineFields(Section):
    """How it is computed: numbers may round differently, what is learned is the same."""

    zero_stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(check_whole)] = 3
    """Of DeepSpeed; 0 is a single process without it. What is trained is then held in fp32, and
    computed with under autocast where precision is bf16."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Of the computation and of what is saved."""
    fp8: bool = False
    """Matrix products in fp8 (GPUs of compute capability 8.9 and newer, bf16 otherwise): faster,
    and rounded more coarsely. What is saved is bf16 as without it."""
    # Under ZeRO-3, to or from selective policies, it changes the rounding.
    tower: Annotated[Policy, MAY_CHANGE] = "auto"
    """Which activations the vision tower's layers keep; "auto" is the fastest
    for which the GPUs' free memory suffices ("full" on a CPU)."""
    language: Annotated[Policy, MAY_CHANGE] = "auto"
    """The same for the language model's layers."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the layers; "auto": on a GPU, for 300 steps or more. Compiling takes about a minute,
    and a step is then a quarter shorter."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW with its states in fp32, or in 8 bits (bitsandbytes)."""
    offload: bool | Literal["auto"] = "auto"
    """Keep the optimizer's states and the fp32 weights on the CPU; "auto": where nothing else
    fits."""
    memory_limit: Annotated[Annotated[float, Field(ge=1, le=1e6)] | None, MAY_CHANGE] = None
    """GiB that torch may allocate on a GPU, where others use it, too; null: all that is free."""
    zero_hpz_partition_size: AtLeastOne = 1
    """DeepSpeed's ZeRO++ (hpZ): the GPUs of one machine, which then keep a second copy of the
    weights between them, so that the backward pass gathers nothing over the network; 1 for none."""
    zero_quantized_weights: bool = False
    """DeepSpeed's ZeRO++ (qwZ): gather weights in 8 bits; needs CUDA's compiler."""
    zero_quantized_gradients: bool = False
    """DeepSpeed's ZeRO++ (qgZ): sum gradients in 4 bits; needs CUDA's compiler."""


def _join_parts(value: Any) -> Any:
    """A list of parts as one name; of all that have a name, that one."""
    if isinstance(value, list):
        if not value or not all(isinstance(part, str) for part in value):
            raise ValueError("no list of parts")
        value = "+".join(value)
    if not isinstance(value, str):
        return value
    check_trained(value)
    if value in TRAINED:
        return value
    ordered = "+".join(part for part in PARTS if part in value.split("+"))
    return {"+".join(PARTS): "full", "language_model": "lm"}.get(ordered, ordered)


class Recipe(Section):
    """What to train and how."""

    # What is behind model and data.train is compared by its contents.
    model: Annotated[Text, Expected("a folder or an id of the Hub"), MAY_CHANGE]
    """What to start from."""
    out: Annotated[Folder, MAY_CHANGE]
    """For checkpoints and what is trained; of LoRA, the adapters alone."""
    data: Data
    trainer: TrainerFields
    trained: Annotated[
        str,
        BeforeValidator(_join_parts),
        Expected(f"{', '.join(TRAINED)}, or a list of {', '.join(PARTS)}"),
    ] = "full"
    """full: all weights; lm: all but the vision tower and its adapter; lora_lm: LoRA on the
    language model; lora_all: on the vision tower, too; qlora: as lora_lm, on weights of 4 bits. Or
    parts of the model, as [adapter, language_model]."""
    lora: Lora = Lora()
    engine: EngineFields = EngineFields()
    revision: Annotated[Text | None, Expected("a branch, tag or commit or null"), MAY_CHANGE] = None
    """Of a model on the Hub; where model is a folder of adapters, of the one under them."""
    from_scratch: list[Text] = []
    """Beginnings of the names of weights that the model's folder lacks on purpose, and that are
    trained from random ones. Every other weight must be there."""
    max_nonfinite_steps: Annotated[AtLeastOne, MAY_CHANGE] = 3
    """End the run after so many steps in a row whose loss or gradient norm is NaN or infinite. One
    may be a matter of its batch, and newer DeepSpeed leaves it out; of weights that have become
    NaN, every later step is such a one."""

    @classmethod
    def of(cls, values: Any) -> "Recipe":
        """Raises :class:`RecipeError` with all faults."""
        checked = check_values(values)
        if checked.recipe is None:
            raise RecipeError.of([fault.text for fault in checked.faults])
        return checked.recipe

    def override(self, values: Mapping[str, Any]) -> "Recipe":
        """This recipe with other values of some fields, by dotted names as ``engine.compile``.

        Raises:
            RecipeError: a field is unknown or a value cannot be.
        """
        nested, misplaced = place_all(self.model_dump(), values)
        if misplaced:
            raise RecipeError.of([fault.text for fault in misplaced])
        return self.of(nested)

    def engine_options(self) -> EngineOptions:
        """What is asked of the engine, "auto" where that is left open."""
        lora = self.lora.options(self.trained)
        return EngineOptions(trained=self.trained, lora=lora, **self.engine.model_dump())

    def flat(self) -> dict[str, Any]:
        """Values by dotted names."""
        values: dict[str, Any] = {}
        for name, value in self.model_dump().items():
            if isinstance(value, dict):
                values |= {f"{name}.{field}": part for field, part in value.items()}
            else:
                values[name] = value
        return values

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Of the fields that a recipe may leave out, by dotted names."""
        return {name: field.default for name, field in fields() if not field.is_required()}

    def write(self, path: Path) -> None:
        """As JSON, which is YAML, too."""
        text = json.dumps(self.model_dump(), indent=2, ensure_ascii=False)
        write_atomically(path, text + "\n")

    @classmethod
    def read(cls, path: Path, overrides: Sequence[str] = ()) -> "Recipe":
        """The recipe of a file, with fields laid over it, as ``engine.compile=true``.

        Raises:
            RecipeError: with a line for each fault, which begins with the file, or "command line".
        """
        document = read_document(path).override(overrides)
        checked = check_values(document.values)
        if checked.recipe is None or document.faults:
            raise located(document, checked.faults)
        return checked.recipe


@functools.cache
def whole_recipe() -> type[Recipe]:
    """With the fields that only transformers knows, whose import takes seconds."""
    return create_model("Recipe", __base__=Recipe, trainer=(whole_section(), ...))


@dataclass(frozen=True)
class Checked:
    """``known`` has the values, by dotted names, that can be relied on although others cannot."""

    recipe: Recipe | None
    faults: list[Fault]
    known: dict[str, Any]


def check_values(values: Any) -> Checked:
    """All that is wrong with nested values, or the recipe that they make."""
    if not isinstance(values, Mapping):
        kind = "is empty" if values is None else f"is {shown(values)}"
        text = f"the recipe {kind}; expected sections and fields, as in model: FOLDER"
        return Checked(None, [Fault("", text)], {})
    whole = _kind_of(values)
    recipe, faults = None, []
    try:
        recipe = whole.model_validate(dict(values))
    except ValidationError as error:
        faults = list(_faults_of(error, whole))
    wrong = {fault.name for fault in faults}
    known = {}
    for name, field in fields(whole):
        value = _given(values, name, field)
        if not any(name == fault or name.startswith(fault + ".") for fault in wrong):
            known[name] = _join_parts(value) if name == "trained" else value
    faults += conflicts(known)
    return Checked(None if faults else recipe, faults, known)


def _kind_of(values: Mapping) -> type[Recipe]:
    """The one that has the fields of ``trainer``: the whole one only where it must be."""
    trainer = values.get("trainer")
    names = trainer if isinstance(trainer, Mapping) else ()
    others = [name for name in names if name not in TrainerFields.model_fields]
    return Recipe if all(refusal(str(name)) for name in others) else whole_recipe()


def located(document: Document, faults: Sequence[Fault]) -> RecipeError:
    """The error that lists these faults and the document's with file and line, in their order."""
    ordered = sorted(
        [*document.faults, *faults], key=lambda f: f.line or document.lines.get(f.name, 0)
    )
    return RecipeError.of([document.where(f.name, f.line) + f.text for f in ordered])


def fields(section: type[Section] = Recipe) -> Iterator[tuple[str, FieldInfo]]:
    """Every field, by its dotted name."""
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            yield from ((f"{name}.{inner}", found) for inner, found in fields(field.annotation))
        else:
            yield name, field


def may_change() -> frozenset[str]:
    """Fields, by their dotted names, that the continuation of a run may have other values of."""
    declared = {name for name, field in fields() if MAY_CHANGE in field.metadata}
    return frozenset(declared | {f"trainer.{name}" for name in MAY_CHANGE_TOO})


def describe_fields() -> str:
    """A paragraph for each field that is declared: its name, what it may be, its default, what it
    does."""
    lines = []
    for name, field in fields():
        default = "required" if field.is_required() else f"default {_word(field.default)}"
        lines.append(f"{name}: {expected(field)} ({default})")
        told = " ".join((field.description or "").split())
        lines += textwrap.wrap(told, 96, initial_indent="    ", subsequent_indent="    ")
    # Only the import of transformers tells which; it takes seconds.
    lines.append("trainer: any other field of transformers' TrainingArguments, too; see there")
    return "\n".join(lines)


def expected(field: FieldInfo) -> str:
    """What a field may be, in words."""
    return _any_of(_choices(_annotated(field)))


def _annotated(field: FieldInfo) -> Any:
    return Annotated[(field.annotation, *field.metadata, None)]


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        words = [item.words for item in metadata if isinstance(item, Expected)]
        return words[-1:] or _choices(inner)
    if get_origin(annotation) in (Union, UnionType):
        return [words for part in get_args(annotation) for words in _choices(part)]
    if get_origin(annotation) is Literal:
        return [_word(value) for value in get_args(annotation)]
    return _PLAIN_WORDS[get_origin(annotation) or annotation]


_PLAIN_WORDS: dict[Any, list[str]] = {
    bool: ["true", "false"],
    NoneType: ["null"],
    int: ["a whole number"],
    float: ["a number"],
    str: ["text"],
    dict: ["a section"],
    list: ["a list"],
    Any: ["what TrainingArguments takes"],
}


def _any_of(choices: Sequence[str]) -> str:
    *first, last = choices
    return f"{', '.join(first)} or {last}" if first else last


def _some(names: Sequence[str], last: str = "and", most: int = 12) -> str:
    """The names, or the first of many."""
    if len(names) > most:
        return f"{', '.join(names[:most])} ... ({len(names)} fields: glm4v-patched train --help)"
    return _any_of(names) if last == "or" else ", ".join(names)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)


def _is_section(annotation: Any) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _given(values: Mapping, name: str, field: FieldInfo) -> Any:
    for part in name.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return field.default
        values = values[part]
    return values


def _faults_of(error: ValidationError, recipe: type[Recipe]) -> Iterator[Fault]:
    told = set()
    for detail in error.errors(include_url=False, include_context=False):
        path = [str(part) for part in detail["loc"]]
        kind, value = detail["type"], detail["input"]
        if kind in ("extra_forbidden", "invalid_key"):
            yield Fault(".".join(path), _unknown(path, recipe))
            continue
        name, found = _find(path, recipe)
        if name in told:
            continue  # each choice of a union is an error
        told.add(name)
        if kind == "missing":
            for inner, missing in _fields_under(name, found):
                if missing.is_required():
                    yield Fault(inner, f"{inner} is missing; expected {expected(missing)}")
        elif isinstance(found, FieldInfo):
            hint = _hint_of_share(value) if name == "data.eval" else _hint(value, found)
            if isinstance(value, str) and (meant := OTHER_VALUES.get(name, {}).get(value)):
                hint = f"; did you mean {meant}?"
            yield Fault(name, f"{name} is {shown(value)}; expected {expected(found)}{hint}")
        else:
            text = f"expected a section with {_some([*found.model_fields])}"
            yield Fault(name, f"{name} is {shown(value)}; {text}")


def _hint_of_share(value: Any) -> str:
    """A number that is no share is not meant to be the name of a file, either."""
    if type(value) not in (int, float):
        return ""
    percent = f", and {value / 100:g} of {value:g}%" if 0 < value < 100 else ""
    return f" (0.05 holds out 5% of the rows{percent}; for so many rows, name a file with them)"


def _hint(value: Any, field: FieldInfo) -> str:
    """Where quotes, or their absence, are all that is wrong."""
    match value:
        case str():
            other, hint = read_scalar(value), " (without quotes)"
        case bool() | int() | float():
            other, hint = shown(value), " (in quotes)"
        case _:
            return ""
    try:
        TypeAdapter(_annotated(field)).validate_python(other, strict=True)
    except ValidationError:
        return ""
    return hint


def _find(path: Sequence[str], section: type[Section]) -> tuple[str, FieldInfo | type[Section]]:
    """The name of the field that a path leads to or into, and the field or, if it is one, the
    section."""
    names = []
    for part in path:
        names.append(part)
        field = section.model_fields[part]
        if not _is_section(field.annotation):
            return ".".join(names), field
        section = field.annotation
    return ".".join(names), section


def _fields_under(name: str, found: FieldInfo | type[Section]) -> list[tuple[str, FieldInfo]]:
    if isinstance(found, FieldInfo):
        return [(name, found)]
    return [(f"{name}.{inner}", field) for inner, field in fields(found)]


def _unknown(path: Sequence[str], recipe: type[Recipe]) -> str:
    names = [name for name, _ in fields(recipe)]
    name = shown_name(".".join(path))
    told = f"{name} is not a field of a recipe"
    if path[0] == "trainer" and len(path) == 2 and (text := refusal(path[1])):
        return text
    if len(path) == 1 and path[0] in names:
        section, _, field = path[0].partition(".")
        return f"{name} is one key; expected {field} under {section}"
    section, around = _find(path[:-1], recipe)
    assert not isinstance(around, FieldInfo)
    near = {known.rpartition(".")[2]: known for known in names}
    near |= {inner: f"{section}.{inner}".strip(".") for inner in around.model_fields}
    if path[-1] not in near and (text := cure(path[-1])):
        return f"{told}; {text}"
    if close := difflib.get_close_matches(path[-1], near, 1):
        return f"{told}; did you mean {near[close[0]]}?"
    return f"{told}; expected {_some([*around.model_fields], 'or')}"


refuse(
    "engine.offload, engine.zero_stage",
    lambda offload, zero_stage: offload is True and zero_stage == 0,
    "engine.offload with engine.zero_stage 0: ZeRO offloads the optimizer; expected "
    "engine.zero_stage 1, 2 or 3, or engine.offload to be false",
)
refuse(
    "engine.offload, engine.optimizer",
    lambda offload, optimizer: offload is True and optimizer == "adamw_8bit",
    "engine.offload with adamw_8bit, which runs on a GPU: expected engine.optimizer to be adamw, "
    "or engine.offload to be false",
)
refuse(
    "engine.zero_hpz_partition_size, engine.zero_stage",
    lambda size, zero_stage: size > 1 and zero_stage != 3,
    "engine.zero_hpz_partition_size {0} with engine.zero_stage {1}: only stage 3 shards weights; "
    "expected engine.zero_stage 3, or 1 in its place",
)
refuse(
    "engine.zero_quantized_weights, engine.zero_quantized_gradients, engine.zero_stage",
    lambda weights, gradients, zero_stage: (weights or gradients) and zero_stage != 3,
    "engine.zero_quantized_weights or _gradients with engine.zero_stage {2}: only stage 3 gathers "
    "weights; expected engine.zero_stage 3, or false",
)
refuse(
    "trained, engine.zero_stage",
    lambda trained, zero_stage: trained == "qlora" and zero_stage != 0,
    "qlora with engine.zero_stage {1}: weights of 4 bits cannot be sharded; expected "
    "engine.zero_stage 0, and one process",
)
refuse(
    "engine.fp8, trained",
    lambda fp8, trained: fp8 and trained == "qlora",
    "engine.fp8 with trained qlora, whose weights have 4 bits; expected trained lora_lm, or "
    "engine.fp8 to be false",
)
refuse(
    "engine.fp8, engine.precision",
    lambda fp8, precision: fp8 and precision == "fp32",
    "engine.fp8 with engine.precision fp32: products in fp8 give bf16; expected engine.precision "
    "bf16, or engine.fp8 to be false",
)
refuse(
    "engine.fp8, trained, lora.use_dora",
    lambda fp8, trained, use_dora: fp8 and use_dora and is_lora(trained),
    "engine.fp8 with lora.use_dora: DoRA takes norms of weights, which are then in fp8; expected "
    "lora.use_dora to be null, or engine.fp8 to be false",
)
refuse(
    "engine.fp8, engine.zero_quantized_weights",
    lambda fp8, quantized: fp8 and quantized,
    "engine.fp8 with engine.zero_quantized_weights, which quantises in another way what is "
    "gathered; expected one of them to be false",
)
refuse(
    "revision, model",
    # Beside adapters, it is of the model under them.
    lambda revision, model: (
        revision is not None
        and os.path.isdir(model)
        and not os.path.isfile(os.path.join(model, "adapter_config.json"))
    ),
    'revision is "{0}" of {1}, a folder; expected null',
)
refuse(
    "data.reuse_features, trained",
    lambda reuse_features, trained: reuse_features and trains_vision(trained),
    "data.reuse_features with trained {1}, which trains the vision tower or its adapter: its "
    "features change with every step; expected trained to be lm, lora_lm or qlora, or "
    "data.reuse_features to be false",
)
refuse(
    "lora.targets, trained",
    lambda targets, trained: is_lora(trained) and targets == [],
    "lora.targets is an empty list; expected names of linear layers, or null",
)
refuse(
    "lora.targets, trained",
    lambda targets, trained: (
        trained in ("lora_lm", "qlora")
        and isinstance(targets, list)
        and not {*targets} <= {*LANGUAGE_TARGETS}
    ),
    "lora.targets is {0}, with layers of the vision tower, and trained is {1}; expected lora_all",
)
refuse(
    "lora.use_dora, trained, engine.zero_stage",
    lambda use_dora, trained, zero_stage: use_dora and is_lora(trained) and zero_stage == 3,
    "lora.use_dora with engine.zero_stage 3: DoRA takes norms of whole weights, and ZeRO-3 shards "
    "them; expected engine.zero_stage 0, 1 or 2, or lora.use_dora to be null",
)
