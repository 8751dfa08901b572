"""Types of the values of recipe fields, and how messages describe them."""

from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from ...paths import expand_path
from .file import short_json


class Section(BaseModel):
    """A section of a recipe: frozen, strict in types, and without unknown fields."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Expected:
    """Annotation with the words that describe a type's values in messages."""

    words: str


MAY_CHANGE = "may change"
"""Annotation of a field that may differ when a run is resumed, because the field says where files
are, what is logged, or how the same result is computed."""


# Larger numbers would overflow in other libraries, whose errors would not name the field.
MAX_INT, MAX_FLOAT = 2**31 - 1, 1e30
AtLeastZero = Annotated[int, Field(ge=0, le=MAX_INT)]
AtLeastOne = Annotated[int, Field(ge=1, le=MAX_INT)]
Positive = Annotated[float, Field(gt=0, le=MAX_FLOAT)]
NotNegative = Annotated[float, Field(ge=0, le=MAX_FLOAT)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # numpy's limit
Text = Annotated[
    str,
    Field(pattern=r"^([^\p{C}\p{Z}]| )+$"),  # the same characters as str.isprintable
    Expected("text without control characters"),
]
PathText = Annotated[Text, AfterValidator(expand_path)]
Folder = Annotated[PathText, Expected("a folder")]


_TYPE_WORDS: dict[Any, str] = {
    bool: "true, false",
    NoneType: "null",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a section",
    list: "a list",
    Any: "what TrainingArguments takes",
}
_LIMIT_WORDS = {"gt": " above ", "ge": " from ", "lt": " to below ", "le": " to "}


def annotated_type(field: FieldInfo) -> Any:
    """Return the type of a field with its metadata, as ``Annotated``."""
    # Annotated needs at least one item of metadata, so None is added, which has no meaning.
    return Annotated[(field.annotation, *field.metadata, None)]


def expected_in_words(annotation: Any) -> str:
    """Describe in words the values that a type allows, such as "a number above 0 or null"."""
    *first, last = _choices_in_words(annotation)
    return f"{', '.join(first)} or {last}" if first else last


def _choices_in_words(annotation: Any) -> list[str]:
    """Return the alternatives of a type in words."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        descriptions = [item.words for item in metadata if isinstance(item, Expected)]
        if descriptions:
            return [descriptions[-1]]  # the outermost one
        first, *rest = _choices_in_words(inner)
        if first in (_TYPE_WORDS[int], _TYPE_WORDS[float]):
            first += _range_in_words(metadata)
        return [first, *rest]
    if origin in (Union, UnionType):
        return [words for member in get_args(annotation) for words in _choices_in_words(member)]
    if origin is Literal:
        values = get_args(annotation)
        return [value if isinstance(value, str) else short_json(value) for value in values]
    return _TYPE_WORDS[origin or annotation].split(", ")


def _range_in_words(metadata: Iterable[Any]) -> str:
    """Return the limits of a number in words, such as " from 0 to below 1"."""
    words = {}
    for item in metadata:
        for constraint in item.metadata if isinstance(item, FieldInfo) else [item]:
            for name, text in _LIMIT_WORDS.items():
                limit = getattr(constraint, name, None)
                if limit is not None:
                    words[name] = text + (f"{limit:g}" if isinstance(limit, float) else str(limit))
    return "".join(words[name] for name in _LIMIT_WORDS if name in words)
