"""The fields of a recipe, typed and checked.

A recipe is a YAML or JSON file. Fields of ``trainer`` are those of transformers'
``TrainingArguments``. Mistakes are reported at once, for torch is imported only where a recipe has
such a field that is not declared here.
"""

import difflib
import functools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ...engine.options import (
    MODEL_PARTS,
    TRAINED,
    EngineOptions,
    EngineSection,
    LoraOptions,
    check_trained,
)
from ...paths import PathError
from .data import Data
from .file import (
    MAX_PROBLEMS,
    RecipeProblem,
    RecipeError,
    set_nested,
    read_document,
    shown,
    short_name,
)
from .other_names import OTHER_VALUES, field_suggestion, trainer_field_refusal
from .rules import conflicts
from .trainer import UNDECLARED_MAY_CHANGE, TrainerFields, installed_fields
from .types import (
    MAY_CHANGE,
    AtLeastOne,
    Expected,
    Folder,
    PathText,
    Section,
    Text,
    annotated,
    expected,
)


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
    ordered = "+".join(part for part in MODEL_PARTS if part in value.split("+"))
    return {"+".join(MODEL_PARTS): "full", "language_model": "lm"}.get(ordered, ordered)


class Recipe(Section):
    """What to train and how."""

    # What is behind model and data.train is compared by its contents.
    model: Annotated[PathText, Expected("a folder or an id of the Hub"), MAY_CHANGE]
    """What to start from."""
    out: Annotated[Folder, MAY_CHANGE]
    """For checkpoints and what is trained; of LoRA, the adapters alone."""
    data: Data
    trainer: TrainerFields
    trained: Annotated[
        str,
        BeforeValidator(_join_parts),
        Expected(f"{', '.join(TRAINED)}, or a list of {', '.join(MODEL_PARTS)}"),
    ] = "full"
    """full: all weights; lm: all but the vision tower and its projector; lora_lm: LoRA on the
    language model; lora_all: on the vision tower, too; qlora: as lora_lm, on weights of 4 bits. Or
    parts of the model, as [projector, language_model]."""
    lora: LoraOptions = LoraOptions()
    engine: EngineSection = EngineSection()
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
            raise RecipeError([fault.text for fault in checked.faults])
        return checked.recipe

    def override(self, values: Mapping[str, Any]) -> "Recipe":
        """This recipe with other values of some fields, by dotted names as ``engine.compile``.

        Raises:
            RecipeError: a field is unknown or a value cannot be.
        """
        return self.of(set_nested(self.model_dump(), values))

    def engine_options(self) -> EngineOptions:
        """What is asked of the engine, "auto" where that is left open."""
        return EngineOptions(trained=self.trained, lora=self.lora, **vars(self.engine))

    def flat(self) -> dict[str, Any]:
        """Values by dotted names."""
        return {".".join(path): value for path, value in _by_path(self.model_dump())}

    @classmethod
    def read(cls, path: Path, overrides: Sequence[str] = ()) -> "Recipe":
        """The recipe of a file, with fields laid over it, as ``engine.compile=true``.

        Raises:
            RecipeError: with a line for each fault, which begins with the file, or "command line".
        """
        document = read_document(path).override(overrides)
        checked = check_values(document.values)
        if checked.recipe is None:
            raise document.error(checked.faults)
        return checked.recipe


# Under ZeRO-3, to or from selective policies, it changes the rounding.
ENGINE_MAY_CHANGE = {"engine.tower", "engine.language", "engine.memory_limit"}


class Checked(NamedTuple):
    """``known`` has the values, by dotted names, that can be relied on although others cannot."""

    recipe: Recipe | None
    faults: list[RecipeProblem]
    known: dict[str, Any]


def check_values(values: Any) -> Checked:
    """All that is wrong with nested values, or the recipe that they make.

    Each field is looked at by itself, so that one that is wrong hides no other.
    """
    if not isinstance(values, Mapping):
        kind = "is empty" if values is None else f"is {shown(values)}"
        text = f"the recipe {kind}; expected sections and fields, as in model: FOLDER"
        return Checked(None, [RecipeProblem("", text)], {})
    given, faults = dict(_by_path(values)), []
    known = {}
    for name, field in fields():
        section, path = (name.partition(".")[0],), tuple(name.split("."))
        if path in given or (section in given and section != path):
            continue
        if field.is_required():
            faults.append(RecipeProblem(name, f"{name} is missing; expected {expected(annotated(field))}"))
        else:
            known[name] = field.default
    for path, value in given.items():
        name = ".".join(path)
        if (kind := _type_of(path)) is None:
            faults.append(RecipeProblem(name, _describe_key(path, value, len(faults))))
        elif value is not None or path in DECLARED:  # else it is the default of this release
            try:
                known[name] = _adapter(path).validate_python(value)
            except ValidationError as error:
                faults.append(RecipeProblem(name, _describe_misfit(name, value, kind, error)))
    faults += conflicts(known)
    if faults:
        return Checked(None, faults, known)
    return Checked(Recipe.model_validate(set_nested({}, known)), [], known)


def _by_path(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Values of fields, and what stands in place of a section."""
    for name, value in values.items():
        if name in SECTIONS and isinstance(value, Mapping):
            yield from (((name, str(inner)), part) for inner, part in value.items())
        else:
            yield (str(name),), value


@functools.cache
def _type_of(path: tuple[str, ...]) -> Any:
    """The type of a field with all that is said of it; None if there is no such field."""
    if path in DECLARED:
        return annotated(DECLARED[path])
    if len(path) == 2 and path[0] == "trainer" and trainer_field_refusal(path[1]) is None:
        kind = installed_fields().get(path[1])
        return kind and kind | None
    return None


@functools.cache
def _adapter(path: tuple[str, ...]) -> TypeAdapter:
    # The limits of the engine's own fields say by themselves how strict they are.
    strict = path[0] not in ("engine", "lora")
    return TypeAdapter(_type_of(path), config=ConfigDict(strict=strict))


def _fields_of(section: Any) -> dict[str, FieldInfo]:
    """Of a section; none of what is no section."""
    if not is_dataclass(section):
        return getattr(section, "model_fields", {})
    found = {}
    for each in dataclass_fields(section):
        kind: Any = each.type
        info = FieldInfo.from_annotated_attribute(kind, each)
        if words := each.metadata.get("expected"):
            info.metadata.append(Expected(words))
        found[each.name] = info
    return found


SECTIONS: dict[str, dict[str, FieldInfo]] = {
    name: inner
    for name, field in Recipe.model_fields.items()
    if (inner := _fields_of(field.annotation))
}
"""The fields of each section."""


def fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every field that is declared, by its dotted name."""
    for name, field in Recipe.model_fields.items():
        if name in SECTIONS:
            yield from ((f"{name}.{part}", found) for part, found in SECTIONS[name].items())
        else:
            yield name, field


DECLARED = {tuple(name.split(".")): field for name, field in fields()}


def may_change() -> frozenset[str]:
    """Fields, by their dotted names, that the continuation of a run may have other values of."""
    declared = {name for name, field in fields() if MAY_CHANGE in field.metadata}
    return frozenset(declared | ENGINE_MAY_CHANGE | {f"trainer.{name}" for name in UNDECLARED_MAY_CHANGE})


def describe_fields() -> str:
    """A paragraph for each field that is declared: its name, what it may be, its default, what it
    does."""
    lines = []
    for name, field in fields():
        word = field.default if isinstance(field.default, str) else shown(field.default)
        default = "required" if field.is_required() else f"default {word}"
        lines.append(f"{name}: {expected(annotated(field))} ({default})")
        told = " ".join((field.description or "").split())
        lines += textwrap.wrap(told, 96, initial_indent="    ", subsequent_indent="    ")
    # Only the import of transformers tells which; it takes seconds.
    lines.append("trainer: any other field of transformers' TrainingArguments, too; see there")
    return "\n".join(lines)


def _describe_misfit(name: str, value: Any, kind: Any, error: ValidationError) -> str:
    causes = [detail.get("ctx", {}).get("error") for detail in error.errors(include_url=False)]
    if paths := [cause for cause in causes if isinstance(cause, PathError)]:
        return f"{name}: {paths[0]}"
    meant = OTHER_VALUES.get(name, {}).get(value) if isinstance(value, str) else None
    hint = f"; did you mean {meant}?" if meant else ""
    return f"{name} is {shown(value)}; expected {expected(kind)}{hint}"


def _describe_key(path: tuple[str, ...], value: Any, before: int) -> str:
    """What is wrong with a key that is no field; ``before`` is the number of other faults."""
    if path[0] in SECTIONS and len(path) == 1:
        text = f"expected a section with {', '.join(SECTIONS[path[0]])}"
        return f"{path[0]} is {shown(value)}; {text}"
    if path[0] == "trainer" and (reason := trainer_field_refusal(path[-1])):
        return reason
    name = short_name(".".join(path))
    told = f"{name} is not a field of a recipe"
    if before >= MAX_PROBLEMS:  # a similar name is looked for among all, for a millisecond
        return told
    names = [name for name, _ in fields()]
    if path[0] in names:
        section, _, field = path[0].partition(".")
        return f"{name} is one key; expected {field} under {section}"
    section = path[0] if len(path) > 1 else ""
    around = SECTIONS.get(section, Recipe.model_fields)
    near = {known.rpartition(".")[2]: known for known in names}
    if section == "trainer":
        near |= {known: f"trainer.{known}" for known in installed_fields()}
    near |= {inner: f"{section}.{inner}".strip(".") for inner in around}
    if path[-1] not in near and (instead := field_suggestion(path[-1])):
        return f"{told}; {instead}"
    if close := difflib.get_close_matches(path[-1], near, 1):
        return f"{told}; did you mean {near[close[0]]}?"
    if section == "trainer":
        return f"{told}, nor of the installed TrainingArguments: glm4v-patched train --help"
    return f"{told}; expected one of {', '.join(around)}"
