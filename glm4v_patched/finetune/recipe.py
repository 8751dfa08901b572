"""The fields of a recipe, typed and checked.

A recipe is a YAML or JSON file. Fields of ``trainer`` are those of transformers'
``TrainingArguments``. Mistakes are reported at once, for torch is imported only where a recipe has
such a field that is not declared here.
"""

import difflib
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ..atomic import write_atomically
from ..engine.options import (
    PARTS,
    TRAINED,
    EngineOptions,
    EngineSection,
    LoraOptions,
    check_trained,
)
from ..paths import PathError, expand
from .other_names import OTHER_VALUES, cure, refusal
from .recipe_data import Data
from .recipe_file import (
    MOST_FAULTS,
    Fault,
    RecipeError,
    as_yaml,
    place_all,
    read_document,
    shown,
    shown_name,
)
from .recipe_rules import conflicts
from .recipe_trainer import MAY_CHANGE_TOO, TrainerFields, installed_fields
from .recipe_types import (
    MAY_CHANGE,
    AtLeastOne,
    Expected,
    Folder,
    Place,
    Section,
    Text,
    annotated,
    expected,
    is_path,
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
    ordered = "+".join(part for part in PARTS if part in value.split("+"))
    return {"+".join(PARTS): "full", "language_model": "lm"}.get(ordered, ordered)


class Recipe(Section):
    """What to train and how."""

    # What is behind model and data.train is compared by its contents.
    model: Annotated[Place, Expected("a folder or an id of the Hub"), MAY_CHANGE]
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
        return self.of(place_all(self.model_dump(), values))

    def engine_options(self) -> EngineOptions:
        """What is asked of the engine, "auto" where that is left open."""
        return EngineOptions(trained=self.trained, lora=self.lora, **vars(self.engine))

    def flat(self) -> dict[str, Any]:
        """Values by dotted names."""
        return _flatten(self.model_dump())

    def write(self, path: Path) -> None:
        """As JSON, which is YAML, too."""
        text = json.dumps(self.model_dump(), indent=2, ensure_ascii=False)
        write_atomically(path, as_yaml(text) + "\n")

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
OF_ENGINE = {"engine.tower", "engine.language", "engine.memory_limit"}


class Checked(NamedTuple):
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
    values, faults = _expand_paths(values)
    others, of_others = _others(values.get("trainer"))
    faults += of_others
    recipe = None
    try:
        recipe = Recipe.model_validate({**values, **others})
    except ValidationError as error:
        faults += _faults_of(error)
    wrong = {fault.name for fault in faults}
    defaults = {name: field.default for name, field in fields() if not field.is_required()}
    known = {
        name: value
        for name, value in (defaults | _flatten(values)).items()
        if not any(str(name) == fault or str(name).startswith(f"{fault}.") for fault in wrong)
    }
    if "trained" in known:
        known["trained"] = _join_parts(known["trained"])
    faults += conflicts(known)
    return Checked(None if faults else recipe, faults, known)


def _expand_paths(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """Values with every path expanded (:func:`paths.expand`), and the paths that are refused. Those
    of a list of sets are expanded where the sets are made (:func:`data.source.make_sources`)."""
    given, faults, flat = {}, [], _flatten(values)
    for name, field in fields():
        if isinstance(value := flat.get(name), str) and value and is_path(annotated(field)):
            try:
                given[name] = expand(value)
            except PathError as error:
                faults.append(Fault(name, f"{name}: {error}"))
    return place_all(dict(values), given), faults


def _flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if name in SECTIONS and isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": part for inner, part in value.items()}
        else:
            flat[name] = value
    return flat


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


def may_change() -> frozenset[str]:
    """Fields, by their dotted names, that the continuation of a run may have other values of."""
    declared = {name for name, field in fields() if MAY_CHANGE in field.metadata}
    return frozenset(declared | OF_ENGINE | {f"trainer.{name}" for name in MAY_CHANGE_TOO})


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


def _others(trainer: Any) -> tuple[dict[str, Any], list[Fault]]:
    """The section ``trainer`` with the fields that are declared nowhere here as the installed
    TrainingArguments have them, a whole number as a float, say; and what is wrong with them. Null
    is left out: it is their default, whatever that is in another release."""
    if not isinstance(trainer, Mapping):
        return {}, []
    values, faults = dict(trainer), []
    for name, value in trainer.items():
        if name in TrainerFields.model_fields:
            continue
        if text := refusal(str(name)):
            faults.append(Fault(f"trainer.{name}", text))
        elif (kind := installed_fields().get(name)) is None:
            faults.append(Fault(f"trainer.{name}", _unknown(["trainer", str(name)], len(faults))))
        elif value is None:
            del values[name]
        else:
            try:
                if is_path(kind) and isinstance(value, str):
                    value = expand(value)
                values[name] = TypeAdapter(kind | None).validate_python(value, strict=True)
            except PathError as error:
                faults.append(Fault(f"trainer.{name}", f"trainer.{name}: {error}"))
            except ValidationError:
                faults.append(_misfit(f"trainer.{name}", value, kind | None))
    return {"trainer": values}, faults


def _misfit(name: str, value: Any, kind: Any) -> Fault:
    meant = OTHER_VALUES.get(name, {}).get(value) if isinstance(value, str) else None
    hint = f"; did you mean {meant}?" if meant else ""
    return Fault(name, f"{name} is {shown(value)}; expected {expected(kind)}{hint}")


def _faults_of(error: ValidationError) -> Iterator[Fault]:
    told, known = set(), dict(fields())
    for number, detail in enumerate(error.errors(include_url=False, include_context=False)):
        path = [str(part) for part in detail["loc"]]
        if detail["type"] in ("extra_forbidden", "invalid_key", "unexpected_keyword_argument"):
            yield Fault(".".join(path), _unknown(path, number))
            continue
        name = ".".join(path[:2]) if path[0] in SECTIONS else path[0]
        if name in told:
            continue  # each choice of a union is an error
        told.add(name)
        if detail["type"] == "missing":
            for missing, field in known.items():
                if field.is_required() and f"{missing}.".startswith(f"{name}."):
                    text = f"{missing} is missing; expected {expected(annotated(field))}"
                    yield Fault(missing, text)
        elif name in known:
            yield _misfit(name, detail["input"], annotated(known[name]))
        else:
            text = f"expected a section with {', '.join(SECTIONS[name])}"
            yield Fault(name, f"{name} is {shown(detail['input'])}; {text}")


def _unknown(path: Sequence[str], before: int) -> str:
    """Describe a key that is no field; ``before`` is the number of other faults."""
    name = shown_name(".".join(path))
    told = f"{name} is not a field of a recipe"
    if before >= MOST_FAULTS:  # a similar name is looked for among all, for a millisecond
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
    if path[-1] not in near and (text := cure(path[-1])):
        return f"{told}; {text}"
    if close := difflib.get_close_matches(path[-1], near, 1):
        return f"{told}; did you mean {near[close[0]]}?"
    if section == "trainer":
        return f"{told}, nor of the installed TrainingArguments: glm4v-patched train --help"
    return f"{told}; expected one of {', '.join(around)}"
