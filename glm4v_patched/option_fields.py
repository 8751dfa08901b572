"""Fields of a dataclass that are options of a command, a section of a recipe, or both.

Each has its default, help and limits there. Needs neither torch nor pydantic, so that ``--help`` is
answered at once; pydantic takes the limits from a field's metadata, where they have its names.
"""

import argparse
import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import Field, field, fields
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

T = TypeVar("T")


class _Exact:
    """Marks a Literal that takes no equal value of another type, as Python has ``True == 1``."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core.core_schema import no_info_before_validator_function

        kinds = {type(value) for value in get_args(source)}

        def require_kind(value: Any) -> Any:
            if type(value) not in kinds:
                raise ValueError("of another type")
            return value

        return no_info_before_validator_function(require_kind, handler(source))


EXACT = _Exact()
REFUSE_OTHERS = {"extra": "forbid"}
"""``__pydantic_config__`` of a dataclass that is a section: keys that are no fields are refused."""


def option(default: Any, help: str, **more: Any) -> Any:
    """A field that is an option.

    Args:
        more: ``choices``, ``metavar`` and ``type`` of argparse; its ``flag``, where that is not the
            field's name; ``at_least``, the smallest number; ``check``, which is given the value and
            says what is expected of a wrong one. As pydantic has them, ``ge``, ``gt``, ``le``,
            ``lt``, ``pattern`` and ``strict``; ``expected`` says in words what a pattern does.
    """
    return field(default=default, metadata={"help": help, "description": help, **more})


def flag(each: Field) -> str:
    return each.metadata.get("flag") or f"--{each.name}".replace("_", "-")


def add_option(parser: Any, each: Field, several: bool = False) -> None:
    """To a parser, or a group of one.

    Args:
        several: Whether the command takes several values of a field that is one.
    """
    told, default = each.metadata["help"], each.default
    if each.type is bool:
        action = "store_false" if default else "store_true"
        parser.add_argument(flag(each), dest=each.name, action=action, help=told)
        return
    typed: dict[str, Any] = {"dest": each.name} | _argparse_type(each)
    kept = ("choices", "metavar", "type")
    typed |= {name: each.metadata[name] for name in kept if name in each.metadata}
    many = default if isinstance(default, tuple) else [default] * several
    if many:
        typed["nargs"], default = "+", many
    shown = " ".join(map(_word, many or [default]))
    told += "" if each.default is None else f" (default: {shown})"
    parser.add_argument(flag(each), help=told, default=default, **typed)


def add_options(parser: Any, of: type, names: Collection[str] | None = None) -> None:
    """Add the fields of a dataclass that are options; of ``names``, those alone."""
    for each in fields(of):
        if each.metadata and (names is None or each.name in names):
            add_option(parser, each)


def from_namespace(of: Callable[..., T], options: argparse.Namespace, **more: Any) -> T:
    """Return the dataclass that a command asks for, which may not have all of its options."""
    given = vars(options)
    return of(**{f.name: given[f.name] for f in fields(of) if f.name in given} | more)  # type: ignore


def _argparse_type(each: Field) -> dict[str, Any]:
    """How argparse reads a value, and for one of a few how they are shown."""
    limits = each.metadata
    kind = (*get_args(each.type), each.type)[0]
    if get_origin(each.type) in (Annotated, Literal):
        choices = get_args(kind) or get_args(each.type)
        by_word = {_word(value): value for value in choices}
        return {
            "type": _reader(by_word.__getitem__, ", ".join(by_word)),
            "metavar": "|".join(by_word),
        }
    if pattern := limits.get("pattern"):

        def matching(text: str) -> str:
            if not re.fullmatch(pattern, text):
                raise ValueError
            return text

        return {"type": _reader(matching, limits["expected"])}
    if "ge" in limits:
        low, high = limits["ge"], limits.get("le", math.inf)

        def within(text: str) -> float:
            if not low <= (value := kind(text)) <= high:
                raise ValueError
            return value

        expected = f"a number from {low}" + (f" to {high:g}" if "le" in limits else "")
        return {"type": _reader(within, expected)}
    return {"type": kind}


def _reader(read: Callable[[str], Any], expected: str) -> Callable[[str], Any]:
    def value_of(text: str) -> Any:
        try:
            return read(text)
        except (LookupError, ValueError):
            raise argparse.ArgumentTypeError(f"{text!r}; expected {expected}") from None

    return value_of


def _word(value: Any) -> str:
    """A value as YAML and the command line have it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def given(settings: Any, but: Collection[str] = ()) -> list[str]:
    """The options that ask for these settings, without those that have their defaults."""
    arguments = []
    for each in fields(settings):
        value = getattr(settings, each.name)
        if value != each.default and each.name not in but:
            values = [value] * (each.type is not bool)
            arguments += [flag(each), *map(_word, value if isinstance(value, tuple) else values)]
    return arguments


def find_field_problems(settings: Any) -> Iterator[str]:
    """What is wrong with each field by itself."""
    for each in fields(settings):
        value, limits = getattr(settings, each.name), each.metadata
        if value is None:
            continue
        if (choices := limits.get("choices")) and value not in choices:
            yield f"{flag(each)} is {value!r}; expected one of {', '.join(map(str, choices))}"
        if (least := limits.get("at_least")) is not None:
            numbers = value if isinstance(value, tuple) else (value,)
            if not numbers or not all(least <= number < math.inf for number in numbers):
                yield f"{flag(each)} is {value}; expected at least {least}"
        if "check" in limits and (expected := limits["check"](value)):
            yield f"{flag(each)} is {value}; expected {expected}"
