"""What the sections of a recipe are made of: types of values, and what they are in words."""

from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from ...paths import expand_path
from .file import shown


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Expected:
    """What a value may be, in words, of a type that does not say it by itself."""

    words: str


MAY_CHANGE = "may change"
"""Marks a field that the continuation of a run may have another value of: it says where things are
kept, how they are told, or how what is computed is computed."""


# Larger ones overflow in what they are handed to, with errors that name no field.
MAX_INT, MAX_FLOAT = 2**31 - 1, 1e30
AtLeastZero = Annotated[int, Field(ge=0, le=MAX_INT)]
AtLeastOne = Annotated[int, Field(ge=1, le=MAX_INT)]
Positive = Annotated[float, Field(gt=0, le=MAX_FLOAT)]
NotNegative = Annotated[float, Field(ge=0, le=MAX_FLOAT)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # numpy takes no larger one
Text = Annotated[
    str,
    Field(pattern=r"^([^\p{C}\p{Z}]| )+$"),  # as str.isprintable has it
    Expected("text without control characters"),
]
PathText = Annotated[Text, AfterValidator(expand_path)]
Folder = Annotated[PathText, Expected("a folder")]


_PLAIN_WORDS: dict[Any, str] = {
    bool: "true, false",
    NoneType: "null",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a section",
    list: "a list",
    Any: "what TrainingArguments takes",
}
_LIMITS = {"gt": " above ", "ge": " from ", "lt": " to below ", "le": " to "}


def annotated(field: FieldInfo) -> Any:
    """The type of a field with all that is said of it."""
    return Annotated[(field.annotation, *field.metadata, None)]


def expected(annotation: Any) -> str:
    """What a value may be, in words."""
    *first, last = _choices_in_words(annotation)
    return f"{', '.join(first)} or {last}" if first else last


def _choices_in_words(annotation: Any) -> list[str]:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        said = [item.words for item in metadata if isinstance(item, Expected)]
        [first, *rest] = said[-1:] or _choices_in_words(inner)
        return [
            first + _range(metadata) * (first in (_PLAIN_WORDS[int], _PLAIN_WORDS[float])),
            *rest,
        ]
    if origin in (Union, UnionType):
        return [words for part in get_args(annotation) for words in _choices_in_words(part)]
    if origin is Literal:
        return [value if isinstance(value, str) else shown(value) for value in get_args(annotation)]
    return _PLAIN_WORDS[origin or annotation].split(", ")


def _range(metadata: Iterable[Any]) -> str:
    """The limits of a number in words."""
    limits: dict[str, float] = {}
    for item in metadata:
        constraints = item.metadata if isinstance(item, FieldInfo) else [item]
        limits |= {n: getattr(c, n) for c in constraints for n in _LIMITS if hasattr(c, n)}
    return "".join(
        text + (f"{limits[name]:g}" if isinstance(limits[name], float) else str(limits[name]))
        for name, text in _LIMITS.items()
        if name in limits
    )
