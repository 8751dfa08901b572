"""What the sections of a recipe are made of: types of values, and rules between fields."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ..engine.activation_policies import POLICIES, check_policy
from .recipe_file import Fault


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Expected:
    """What a value may be, in words, of a type that does not say it by itself."""

    words: str


class MayChange:
    """Marks a field that the continuation of a run may have another value of: it says where things
    are kept, how they are told, or how what is computed is computed."""


MAY_CHANGE = MayChange()


def _check_policy(policy: str) -> str:
    check_policy("layers", policy, or_auto=True)
    return policy


def _check_text(text: str) -> str:
    if not text.isprintable():  # nor a lone surrogate, which no file name can have
        raise ValueError("control characters")
    return text


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
# numpy takes no larger one.
Seed = Annotated[int, Field(ge=0, lt=2**32), Expected("a whole number from 0 to 4294967295")]
Text = Annotated[
    str,
    Field(min_length=1),
    AfterValidator(_check_text),
    Expected("text without control characters"),
]
Folder = Annotated[Text, Expected("a folder")]


# For each rule its fields, and what is wrong with their values, if anything is.
_RULES: list[tuple[tuple[str, ...], Callable[..., str | None]]] = []


def rule(*names: str) -> Callable[[Callable], Callable]:
    """For a function of these fields' values that says what is wrong with them together."""

    def add(found: Callable) -> Callable:
        _RULES.append((names, found))
        return found

    return add


def refuse(names: str, where: Callable[..., Any], text: str) -> None:
    """Refuse values that go together in some cases; ``text`` has them as {0}, {1}."""
    fields = tuple(names.split(", "))
    _RULES.append((fields, lambda *values: text.format(*values) if where(*values) else None))


def conflicts(known: Mapping[str, Any]) -> list[Fault]:
    """What cannot go together, of the values that are known."""
    faults = []
    for names, found in _RULES:
        if known.keys() >= {*names} and (text := found(*(known[name] for name in names))):
            faults.append(Fault(names[0], text))
    return faults
