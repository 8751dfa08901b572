"""What the sections of a recipe are made of: types of values, and what they are in words."""

from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from ..engine.activation_policies import POLICIES, check_policy
from .recipe_file import shown


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


IS_PATH = "path"
"""Marks a type whose text is a path of this machine, or may be one: it is expanded first."""


def is_path(annotation: Any) -> bool:
    """Return whether a type, or a part of a union, is marked by :data:`IS_PATH`."""
    return IS_PATH in getattr(annotation, "__metadata__", ()) or any(
        map(is_path, get_args(annotation))
    )


def _check_policy(policy: str) -> str:
    check_policy("layers", policy, or_auto=True)
    return policy


def check_whole(value: Any) -> Any:
    # To pydantic, True and 1.0 are among the choices of Literal[1].
    if type(value) is not int:
        raise ValueError("not a whole number")
    return value


Policy = Annotated[
    str, AfterValidator(_check_policy), Expected(f"auto, {', '.join(POLICIES)} or every N, N > 0")
]
# Larger ones overflow in what they are handed to, with errors that name no field.
MOST, LARGEST = 2**31 - 1, 1e30
AtLeastZero = Annotated[int, Field(ge=0, le=MOST), Expected(f"a whole number from 0 to {MOST}")]
AtLeastOne = Annotated[int, Field(ge=1, le=MOST), Expected(f"a whole number from 1 to {MOST}")]
Positive = Annotated[
    float, Field(gt=0, le=LARGEST), Expected(f"a number above 0, of {LARGEST:g} at most")
]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST), Expected(f"a number from 0 to {LARGEST:g}")]
BelowOne = Annotated[float, Field(ge=0, lt=1), Expected("a number from 0 to below 1")]
# numpy takes no larger one.
Seed = Annotated[int, Field(ge=0, lt=2**32), Expected("a whole number from 0 to 4294967295")]
Text = Annotated[
    str,
    Field(pattern=r"^([^\p{C}\p{Z}]| )+$"),  # as str.isprintable has it
    Expected("text without control characters"),
]
Place = Annotated[Text, IS_PATH]
Folder = Annotated[Place, Expected("a folder")]


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


def annotated(field: FieldInfo) -> Any:
    """The type of a field with all that is said of it."""
    return Annotated[(field.annotation, *field.metadata, None)]


def expected(annotation: Any) -> str:
    """What a value may be, in words."""
    *first, last = _choices(annotation)
    return f"{', '.join(first)} or {last}" if first else last


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        words = [item.words for item in metadata if isinstance(item, Expected)]
        return words[-1:] or _choices(inner)
    if get_origin(annotation) in (Union, UnionType):
        return [words for part in get_args(annotation) for words in _choices(part)]
    if get_origin(annotation) is Literal:
        return [value if isinstance(value, str) else shown(value) for value in get_args(annotation)]
    return _PLAIN_WORDS[get_origin(annotation) or annotation].split(", ")
