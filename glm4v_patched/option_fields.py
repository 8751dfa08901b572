"""Options of a command that are fields of a dataclass: each has its default, help and limits there.

Needs neither torch nor pydantic, so that ``--help`` is answered at once.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import Field, field, fields
from typing import Any, get_args


def option(default: Any, help: str, **more: Any) -> Any:
    """A field that is an option.

    Args:
        more: ``choices``, ``metavar`` and ``type`` of argparse; its ``flag``, where that is not the
            field's name; ``at_least``, the smallest number; ``check``, which is given the option
            and its value and raises ``ValueError``.
    """
    return field(default=default, metadata={"help": help, **more})


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
    typed: dict[str, Any] = {"dest": each.name, "type": (*get_args(each.type), each.type)[0]}
    kept = ("choices", "metavar", "type")
    typed |= {name: each.metadata[name] for name in kept if name in each.metadata}
    many = default if isinstance(default, tuple) else [default] * several
    if many:
        typed["nargs"], default = "+", many
    told += "" if each.default is None else f" (default: {' '.join(map(str, many or [default]))})"
    parser.add_argument(flag(each), help=told, default=default, **typed)


def given(settings: Any, but: Collection[str] = ()) -> list[str]:
    """The options that ask for these settings, without those that have their defaults."""
    arguments = []
    for each in fields(settings):
        value = getattr(settings, each.name)
        if value != each.default and each.name not in but:
            values = [value] * (not isinstance(value, bool))
            arguments += [flag(each), *map(str, value if isinstance(value, tuple) else values)]
    return arguments


def faults_of_fields(settings: Any) -> Iterator[str]:
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
        try:
            limits.get("check", lambda *_: None)(flag(each), value)
        except ValueError as error:
            yield str(error)
