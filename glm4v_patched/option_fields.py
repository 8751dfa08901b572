"""Dataclass fields that are options of a command, fields of a recipe's section, or both.

A field's metadata holds its help and its limits. The limits have pydantic's names (``ge``, ``gt``,
``le``, ``lt``, ``pattern``), because pydantic reads the same metadata. This module imports neither
torch nor pydantic, so that ``--help`` is answered at once.
"""

import argparse
import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import Field, field, fields
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

T = TypeVar("T")


class _Exact:
    """Marks a Literal that rejects values of another type, although ``True == 1`` in Python."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core.core_schema import no_info_before_validator_function

        types = {type(value) for value in get_args(source)}

        def require_type(value: Any) -> Any:
            if type(value) not in types:
                raise ValueError("of another type")
            return value

        return no_info_before_validator_function(require_type, handler(source))


EXACT = _Exact()
REFUSE_OTHERS = {"extra": "forbid"}
"""``__pydantic_config__`` of a dataclass that is a section of a recipe: unknown keys are errors."""


def option(default: Any, help: str, **more: Any) -> Any:
    """Declare a dataclass field that is an option.

    Args:
        more: argparse reads ``choices``, ``metavar``, ``type`` and ``flag`` (if the flag differs
            from the field's name). :func:`find_field_problems` reads ``at_least``, the smallest
            number, and ``check``, a function that returns None for a valid value, or else what is
            expected. pydantic reads ``ge``, ``gt``, ``le``, ``lt``, ``pattern`` and ``strict``.
            ``expected`` says in words what ``pattern`` matches.
    """
    return field(default=default, metadata={"help": help, "description": help, **more})


def flag(option_field: Field) -> str:
    """Return the command-line option of a field, such as ``--zero-stage``."""
    return option_field.metadata.get("flag") or f"--{option_field.name}".replace("_", "-")


def add_option(parser: Any, option_field: Field, several: bool = False) -> None:
    """Add a field to a parser or to a group of a parser.

    Args:
        several: Whether the command takes several values for this field.
    """
    metadata, default = option_field.metadata, option_field.default
    help = metadata["help"]
    if option_field.type is bool:
        action = "store_false" if default else "store_true"
        parser.add_argument(flag(option_field), dest=option_field.name, action=action, help=help)
        return
    keywords: dict[str, Any] = {"dest": option_field.name} | _argparse_type(option_field)
    keywords |= {
        name: metadata[name] for name in ("choices", "metavar", "type") if name in metadata
    }
    if several and not isinstance(default, tuple):
        default = [default]  # argparse also returns several values as a list
    if isinstance(default, tuple | list):
        keywords["nargs"] = "+"
        default_text = " ".join(map(_to_yaml, default))
    else:
        default_text = _to_yaml(default)
    help += "" if option_field.default is None else f" (default: {default_text})"
    parser.add_argument(flag(option_field), help=help, default=default, **keywords)


def add_options(parser: Any, dataclass: type, names: Collection[str] | None = None) -> None:
    """Add the fields of a dataclass that are options; if ``names`` is given, only these fields."""
    for option_field in fields(dataclass):
        if option_field.metadata and (names is None or option_field.name in names):
            add_option(parser, option_field)


def from_namespace(dataclass: Callable[..., T], options: argparse.Namespace, **more: Any) -> T:
    """Build a dataclass from parsed options; fields that the command lacks keep their defaults."""
    values = vars(options)
    names = [f.name for f in fields(dataclass) if f.name in values]  # type: ignore[arg-type]
    return dataclass(**{name: values[name] for name in names} | more)


def _argparse_type(option_field: Field) -> dict[str, Any]:
    """Return the ``type`` and ``metavar`` by which argparse reads a field's values."""
    limits = option_field.metadata
    annotation = option_field.type
    number_type = (*get_args(annotation), annotation)[0]
    if get_origin(annotation) in (Annotated, Literal):
        choices = get_args(number_type) or get_args(annotation)
        by_text = {_to_yaml(value): value for value in choices}
        return {
            "type": _read_or_explain(by_text.__getitem__, ", ".join(by_text)),
            "metavar": "|".join(by_text),
        }
    if pattern := limits.get("pattern"):

        def read_matching(text: str) -> str:
            if not re.fullmatch(pattern, text):
                raise ValueError
            return text

        return {"type": _read_or_explain(read_matching, limits["expected"])}
    if "ge" in limits:
        low, high = limits["ge"], limits.get("le", math.inf)

        def read_number(text: str) -> float:
            if not low <= (value := number_type(text)) <= high:
                raise ValueError
            return value

        expected = f"a number from {low}" + (f" to {high:g}" if "le" in limits else "")
        return {"type": _read_or_explain(read_number, expected)}
    return {"type": number_type}


def _read_or_explain(read: Callable[[str], Any], expected: str) -> Callable[[str], Any]:
    """Wrap ``read`` so that argparse prints the expected values after an error."""

    def read_option(text: str) -> Any:
        try:
            return read(text)
        except (LookupError, ValueError):
            raise argparse.ArgumentTypeError(f"{text!r}; expected {expected}") from None

    return read_option


def _to_yaml(value: Any) -> str:
    """Return a value as YAML and the command line spell it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def to_cli_arguments(settings: Any, exclude: Collection[str] = ()) -> list[str]:
    """Return the command-line arguments for all fields that differ from their defaults.

    Args:
        exclude: Names of fields to leave out.
    """
    arguments = []
    for option_field in fields(settings):
        value = getattr(settings, option_field.name)
        if value != option_field.default and option_field.name not in exclude:
            values = value if isinstance(value, tuple) else [value]
            texts = [] if option_field.type is bool else map(_to_yaml, values)
            arguments += [flag(option_field), *texts]
    return arguments


def find_field_problems(settings: Any) -> Iterator[str]:
    """Yield a line per field whose ``choices``, ``at_least`` or ``check`` refuses its value."""
    for option_field in fields(settings):
        value, limits = getattr(settings, option_field.name), option_field.metadata
        if value is None:
            continue
        name = flag(option_field)
        if (choices := limits.get("choices")) and value not in choices:
            yield f"{name} is {value!r}; expected one of {', '.join(map(str, choices))}"
        if (minimum := limits.get("at_least")) is not None:
            numbers = value if isinstance(value, tuple) else (value,)
            if not numbers or not all(minimum <= number < math.inf for number in numbers):
                yield f"{name} is {value}; expected at least {minimum}"
        if "check" in limits and (expected := limits["check"](value)):
            yield f"{name} is {value}; expected {expected}"
