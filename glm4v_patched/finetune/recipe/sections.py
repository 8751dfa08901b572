"""The class :class:`Recipe`, and the check of a recipe's values with all problems at once.

A recipe is a YAML or JSON file. Fields of ``trainer`` are those of transformers'
``TrainingArguments``. The check is fast: torch is imported only for a recipe with a field of
``TrainingArguments`` that is not declared here.
"""

import difflib
import functools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ...engine.options import (
    MODEL_PARTS,
    TRAINED_CHOICES,
    EngineOptions,
    EngineSection,
    LoraOptions,
    check_trained,
)
from ...paths import PathError
from .data import Data
from .file import (
    MAX_PROBLEMS,
    RecipeError,
    RecipeProblem,
    read_document,
    set_nested,
    short_json,
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
    annotated_type,
    expected_in_words,
)

# Minimum similarity (difflib's ratio) of a word and the choice that is suggested for it.
MIN_SIMILARITY = 0.7


def _join_parts(value: Any) -> Any:
    """Normalize ``trained``: [projector, tower] becomes "tower+projector", a full list "full"."""
    if isinstance(value, list):
        if not value or not all(isinstance(part, str) for part in value):
            raise ValueError("not a list of parts")
        value = "+".join(value)
    if not isinstance(value, str):
        return value
    check_trained(value)
    if value in TRAINED_CHOICES:
        return value
    joined = "+".join(part for part in MODEL_PARTS if part in value.split("+"))
    return {"+".join(MODEL_PARTS): "full", "language_model": "lm"}.get(joined, joined)


class Recipe(Section):
    """A recipe: what to train, on which data, and how."""

    # A resumed run may have other paths in model and data.train: their contents are compared.
    model: Annotated[PathText, Expected("a folder or an id of the Hub"), MAY_CHANGE]
    """The model to start from, or a folder of LoRA adapters to train on."""
    out: Annotated[Folder, MAY_CHANGE]
    """Folder for checkpoints and for the trained model; LoRA saves the adapters alone."""
    data: Data
    trainer: TrainerFields
    trained: Annotated[
        str,
        BeforeValidator(_join_parts),
        Expected(f"{', '.join(TRAINED_CHOICES)}, or a list of {', '.join(MODEL_PARTS)}"),
    ] = "full"
    """full: all weights; lm: all but the vision tower and its projector; lora_lm: LoRA on the
    language model; lora_all: on the vision tower, too; qlora: as lora_lm, on weights of 4 bits. Or
    parts of the model, such as [projector, language_model]."""
    lora: LoraOptions = LoraOptions()
    engine: EngineSection = EngineSection()
    revision: Annotated[Text | None, Expected("a branch, tag or commit or null"), MAY_CHANGE] = None
    """Revision of a model on the Hub; for a folder of adapters, the revision of their base."""
    from_scratch: list[Text] = []
    """Prefixes of the names of weights that the model's folder lacks on purpose: these weights are
    randomly initialized. Every other weight must be there."""
    max_nonfinite_steps: Annotated[AtLeastOne, MAY_CHANGE] = 3
    """End the run after this many steps in a row whose loss or gradient norm is NaN or infinite. A
    single such step may be caused by its batch, and newer DeepSpeed skips its update. Once weights
    are NaN, so is the loss of every later step."""

    @classmethod
    def from_values(cls, values: Any) -> "Recipe":
        """Check nested values, and return the recipe.

        Raises:
            RecipeError: Lists all problems.
        """
        checked = check_values(values)
        if checked.recipe is None:
            raise RecipeError([problem.text for problem in checked.problems])
        return checked.recipe

    def override(self, values: Mapping[str, Any]) -> "Recipe":
        """Return a copy of this recipe in which values, given by dotted names, are replaced.

        Raises:
            RecipeError: A field is unknown, or a value is invalid.
        """
        return self.from_values(set_nested(self.model_dump(), values))

    def engine_options(self) -> EngineOptions:
        """Return the options of the engine, "auto" where the recipe leaves them open."""
        return EngineOptions(trained=self.trained, lora=self.lora, **vars(self.engine))

    def flat(self) -> dict[str, Any]:
        """Return the values by dotted names."""
        return {".".join(path): value for path, value in _by_path(self.model_dump())}

    @classmethod
    def read(cls, path: Path, overrides: Sequence[str] = ()) -> "Recipe":
        """Read a recipe from a file.

        Args:
            overrides: Assignments such as ``engine.compile=true`` that override the file.

        Raises:
            RecipeError: Has a line for each problem, which begins with file and line, or with
                "command line".
        """
        document = read_document(path).override(overrides)
        checked = check_values(document.values)
        if checked.recipe is None:
            raise document.error(checked.problems)
        return checked.recipe


# Fields of the engine that may differ when a run is resumed. One change is not exact: under ZeRO-3
# without compiled or fp8 layers, the policies (tower, language) "linear", "selective" and
# "attention" round otherwise than the other policies.
ENGINE_MAY_CHANGE = {"engine.tower", "engine.language", "engine.memory_limit"}


class CheckedValues(NamedTuple):
    """Result of :func:`check_values`.

    Args:
        recipe: None if there are problems.
        valid: The valid values by dotted names, defaults included.
    """

    recipe: Recipe | None
    problems: list[RecipeProblem]
    valid: dict[str, Any]


def check_values(values: Any) -> CheckedValues:
    """Check nested values, and return the recipe or all problems.

    Each field is checked by itself, so that one problem does not hide another.
    """
    if not isinstance(values, Mapping):
        content = "is empty" if values is None else f"is {short_json(values)}"
        text = f"the recipe {content}; expected sections and fields, as in model: FOLDER"
        return CheckedValues(None, [RecipeProblem("", text)], {})
    by_path = dict(_by_path(values))
    problems: list[RecipeProblem] = []
    valid = {}
    for name, field in declared_fields():
        path = tuple(name.split("."))
        if path in by_path or path[:1] in by_path:
            continue  # the field, or a value in place of its section, is checked below
        if field.is_required():
            text = f"{name} is missing; expected {expected_in_words(annotated_type(field))}"
            problems.append(RecipeProblem(name, text))
        else:
            valid[name] = field.default
    for path, value in by_path.items():
        name = ".".join(path)
        if (annotation := _type_of(path)) is None:
            problems.append(RecipeProblem(name, _describe_key(path, value, len(problems))))
        elif value is not None or path in DECLARED_FIELDS:
            # A null for an undeclared field is left out: TrainingArguments has its own default.
            try:
                valid[name] = _type_adapter(path).validate_python(value)
            except ValidationError as error:
                text = _describe_invalid(name, value, annotation, error)
                problems.append(RecipeProblem(name, text))
    problems += conflicts(valid)
    if problems:
        return CheckedValues(None, problems, valid)
    return CheckedValues(Recipe.model_validate(set_nested({}, valid)), [], valid)


def _by_path(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of each field; a section that is not a mapping is one value."""
    for name, value in values.items():
        if name in SECTIONS and isinstance(value, Mapping):
            yield from (((name, str(field)), inner) for field, inner in value.items())
        else:
            yield (str(name),), value


@functools.cache
def _type_of(path: tuple[str, ...]) -> Any:
    """Return the type of a field with its metadata, or None if there is no such field."""
    if path in DECLARED_FIELDS:
        return annotated_type(DECLARED_FIELDS[path])
    if len(path) == 2 and path[0] == "trainer" and trainer_field_refusal(path[1]) is None:
        annotation = installed_fields().get(path[1])
        return None if annotation is None else annotation | None
    return None


@functools.cache
def _type_adapter(path: tuple[str, ...]) -> TypeAdapter:
    # Each field of the sections engine and lora has its own ``strict``.
    strict = path[0] not in ("engine", "lora")
    return TypeAdapter(_type_of(path), config=ConfigDict(strict=strict))


def _fields_of(section: Any) -> dict[str, FieldInfo]:
    """Return the fields of a section (a pydantic model or a dataclass); {} for other types."""
    if not is_dataclass(section):
        return getattr(section, "model_fields", {})
    infos = {}
    for field in dataclass_fields(section):
        annotation: Any = field.type
        info = FieldInfo.from_annotated_attribute(annotation, field)
        if words := field.metadata.get("expected"):
            info.metadata.append(Expected(words))
        infos[field.name] = info
    return infos


SECTIONS: dict[str, dict[str, FieldInfo]] = {
    name: section_fields
    for name, field in Recipe.model_fields.items()
    if (section_fields := _fields_of(field.annotation))
}
"""The fields of each section, by name."""


def declared_fields() -> Iterator[tuple[str, FieldInfo]]:
    """Yield every declared field with its dotted name."""
    for name, field in Recipe.model_fields.items():
        if name in SECTIONS:
            yield from ((f"{name}.{inner}", info) for inner, info in SECTIONS[name].items())
        else:
            yield name, field


DECLARED_FIELDS = {tuple(name.split(".")): field for name, field in declared_fields()}
"""The declared fields by path, such as ``("engine", "compile")``."""


def changeable_fields() -> frozenset[str]:
    """Return the dotted names of the fields that may differ when a run is resumed."""
    declared = {name for name, field in declared_fields() if MAY_CHANGE in field.metadata}
    return frozenset(
        declared | ENGINE_MAY_CHANGE | {f"trainer.{name}" for name in UNDECLARED_MAY_CHANGE}
    )


def describe_fields() -> str:
    """Return a paragraph for each declared field: its values, its default, and its meaning."""
    lines = []
    for name, field in declared_fields():
        default = field.default if isinstance(field.default, str) else short_json(field.default)
        note = "required" if field.is_required() else f"default {default}"
        lines.append(f"{name}: {expected_in_words(annotated_type(field))} ({note})")
        text = " ".join((field.description or "").split())
        lines += textwrap.wrap(text, 96, initial_indent="    ", subsequent_indent="    ")
    # The other fields are not listed, because importing transformers takes seconds.
    lines.append("trainer: any other field of transformers' TrainingArguments, too; see there")
    return "\n".join(lines)


def _describe_invalid(name: str, value: Any, annotation: Any, error: ValidationError) -> str:
    """Return the message for an invalid value, with similar valid values."""
    causes = [detail.get("ctx", {}).get("error") for detail in error.errors(include_url=False)]
    if paths := [cause for cause in causes if isinstance(cause, PathError)]:
        return f"{name}: {paths[0]}"
    words = expected_in_words(annotation)
    return f"{name} is {short_json(value)}; expected {words}{_suggest(name, value, annotation)}"


def _suggest(name: str, value: Any, annotation: Any) -> str:
    """Return "; did you mean ...?" for words that are not choices of a field, else ""."""
    if isinstance(value, dict) and any(":" in str(key) for key in value):
        return "; a space is missing after a colon"
    texts = value if isinstance(value, list | dict) else [value]
    words = [word for text in texts if isinstance(text, str) for word in text.split("+")]
    # The description of a type in words contains its choices, too.
    choices = [
        *_literals(annotation),
        *re.split(", | or |: |a list of ", expected_in_words(annotation)),
    ]
    suggestions: dict[str, None] = {}
    for word in words[:MAX_PROBLEMS]:
        if word not in choices:
            equivalent = OTHER_VALUES.get(name, {}).get(word)
            close = difflib.get_close_matches(word, choices, 1, MIN_SIMILARITY)
            suggestions |= dict.fromkeys([equivalent] if equivalent else close)
    return f"; did you mean {', '.join(suggestions)}?" if suggestions else ""


def _literals(annotation: Any) -> list[str]:
    """Return the texts of all Literals inside a type."""
    if get_origin(annotation) is Literal:
        return [value for value in get_args(annotation) if isinstance(value, str)]
    return [text for inner in get_args(annotation) for text in _literals(inner)]


def _describe_key(path: tuple[str, ...], value: Any, num_before: int) -> str:
    """Return the message for a key that is not a field.

    Args:
        num_before: Number of earlier problems. After :data:`MAX_PROBLEMS`, which is how many are
            printed, no similar name is searched, because a search takes a millisecond.
    """
    if path[0] in SECTIONS and len(path) == 1:
        text = f"expected a section with {', '.join(SECTIONS[path[0]])}"
        return f"{path[0]} is {short_json(value)}; {text}"
    if path[0] == "trainer" and (reason := trainer_field_refusal(path[-1])):
        return reason
    name = short_name(".".join(path))
    message = f"{name} is not a field of a recipe"
    if num_before >= MAX_PROBLEMS:
        return message
    names = [declared for declared, _ in declared_fields()]
    if path[0] in names:
        section, _, field = path[0].partition(".")
        return f"{name} is one key with a dot; expected the key {field} under {section}:"
    section = path[0] if len(path) > 1 else ""
    siblings = SECTIONS.get(section, Recipe.model_fields)
    full_names = {full_name.rpartition(".")[2]: full_name for full_name in names}
    if section == "trainer":
        full_names |= {field: f"trainer.{field}" for field in installed_fields()}
    # Of several fields with the same last name, the one in the key's own section is suggested.
    full_names |= {field: f"{section}.{field}".strip(".") for field in siblings}
    if path[-1] not in full_names and (suggestion := field_suggestion(path[-1])):
        return f"{message}; {suggestion}"
    if close := difflib.get_close_matches(path[-1], full_names, 1):
        return f"{message}; did you mean {full_names[close[0]]}?"
    if section == "trainer":
        return f"{message}, nor of the installed TrainingArguments; see glm4v-patched train --help"
    return f"{message}; expected one of {', '.join(siblings)}"
