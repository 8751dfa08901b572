"""A YAML or JSON file as values, with the line of each key; faults are reported by line.

PyYAML, and not ruamel.yaml: that reads 010 as 10 and 2024-01-01 as a date, drops tags silently and
ends at the first key that is there twice, so that all of the rules below would still be ours.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..terminal_text import listed, printable

# A recipe is a page of text; a larger file is a mistake, such as data or weights.
MOST_BYTES = 2**16
DEEPEST = 20
TOO_DEEP = f"more than {DEEPEST} levels inside of each other; a recipe has sections of fields"
MOST_FAULTS = 20

# What a file says, the lines of its keys by their dotted names, and keys that are there twice.
Read = tuple[Any, dict[str, int], tuple["Fault", ...]]
# How the message about a line begins.
Where = Callable[[int | None], str]


class Fault(NamedTuple):
    """``name`` is dotted; empty where no field is to blame, and an option where that is. ``line``
    is that of a file, where it is not the one of the field's value."""

    name: str
    text: str
    line: int | None = None


class RecipeError(ValueError):
    """A recipe cannot be; the message has a line for each fault."""

    @classmethod
    def of(cls, faults: Sequence[str]) -> "RecipeError":
        return cls(listed(faults, MOST_FAULTS, between="\n"))


@dataclass(frozen=True)
class Document:
    """What a file says, and then the command line.

    ``lines`` has the line of each key by its dotted name: the last one's, whose value counts, of a
    key that is there twice; those are in ``faults``;
    ``overridden`` the dotted names that the command line gave.
    """

    path: Path
    values: Any
    lines: dict[str, int]
    faults: tuple[Fault, ...] = ()
    overridden: frozenset[str] = frozenset()

    def where(self, name: str, line: int | None = None) -> str:
        """``FILE:LINE: `` of a dotted name, or of the section around it; of a line that is known,
        with that."""
        if line is not None:
            return f"{printable(str(self.path))}:{line}: "
        around = [name[: dot.start()] for dot in re.finditer(r"\.", name)]
        around = [name, *reversed(around)]
        line = next((self.lines[outer] for outer in around if outer in self.lines), None)
        given = name.startswith("--") or any(o.startswith(f"{name}.") for o in self.overridden)
        if (line is None and given) or not self.overridden.isdisjoint(around):
            return "command line: "
        return f"{printable(str(self.path))}:{'' if line is None else f'{line}:'} "

    def override(self, assignments: Sequence[str]) -> "Document":
        """The document with ``engine.compile=true`` and the like laid over it.

        Raises:
            RecipeError: one is no assignment, its value no YAML, or a name is there twice.
        """
        given: dict[str, Any] = {}
        faults: list[str] = []
        for text in assignments:
            name, equals, value = text.partition("=")
            if not equals or not all(name.split(".")):
                faults.append(
                    f"command line: {shown(text)} is no assignment; expected field=value, as in "
                    "engine.compile=true"
                )
            elif name in given:
                faults.append(f"command line: {shown_name(name)} is given twice")
            else:
                given[name] = None
                try:
                    given[name], _, twice = _read_override(name, value)
                    faults += [f"command line: {fault.text}" for fault in twice]
                except RecipeError as error:
                    faults.append(str(error))
        if faults:
            raise RecipeError.of(faults)
        if not isinstance(self.values, dict):
            return self  # which is reported instead
        values, misplaced = place_all(self.values, given)
        return replace(
            self,
            values=values,
            faults=(*self.faults, *misplaced),
            overridden=frozenset(given),
        )


def _read_override(name: str, value: str) -> Read:
    return _read_yaml(value, lambda line: f"command line: {shown_name(name)}")


def read_document(path: Path) -> Document:
    """Read a file as JSON if it is named ``.json``, otherwise as YAML (scalars as in 1.2).

    Raises:
        RecipeError: the file is not there, or cannot be read; with its line where one is to blame.
    """
    name = printable(str(path))
    read = _read_json if path.suffix.lower() == ".json" else _read_yaml
    text = _read_text(path, name)
    return Document(path, *read(text, lambda line: name if line is None else f"{name}:{line}"))


def place_all(values: dict, given: Mapping[str, Any]) -> tuple[dict, list[Fault]]:
    """A copy of nested ``values`` with others by dotted names, and which of them had no place."""
    values, misplaced = dict(values), []
    for name, value in given.items():
        *sections, field = name.split(".")
        place = values
        for section in sections:
            inner = place.get(section, {})
            if not isinstance(inner, dict):
                text = f"{shown_name(name)} cannot be: {shown_name(section)} is {shown(inner)}"
                misplaced.append(Fault(name, f"{text}, and no section"))
                break
            place[section] = place = dict(inner)
        else:
            place[field] = value
    return values, misplaced


def read_scalar(text: str) -> Any:
    """What YAML makes of a text without quotes: a number, true, false or the text itself."""
    tag = _Loader("").resolve(yaml.ScalarNode, text, (True, False))
    if not tag.endswith((":int", ":float", ":bool")):
        return text
    return _Loader("").construct_object(yaml.ScalarNode(tag, text))


def shown(value: Any) -> str:
    """A value as JSON has it, on one line and not too long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return _on_one_line(text)


def shown_name(name: str) -> str:
    """A key, on one line and not too long."""
    return _on_one_line(name) or '""'


def _on_one_line(text: str) -> str:
    """Printable, and not longer than a path may well be."""
    line = printable(text[:201])
    return line if len(line) <= 200 else line[:197] + "..."


def _read_text(path: Path, name: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise RecipeError(f"{name}: {getattr(error, 'strerror', None) or error}") from None
    if content.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in content[:4]:
        raise RecipeError(f"{name}:1: is UTF-16 or UTF-32; save it as UTF-8")
    if len(content) > MOST_BYTES:
        raise RecipeError(
            f"{name}: has over {MOST_BYTES:,} bytes, and a recipe is a page of text: is it another "
            "file?"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RecipeError(
            f"{name}:{line}: byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from None


def _read_json(text: str, where: Where) -> Read:
    """Values are JSON's, lines and the limit of depth YAML's: JSON is YAML, but for tabs and what
    else cannot be printed."""
    try:
        values = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise RecipeError(f"{where(error.lineno)}: is not JSON: {error.msg}") from None
    except RecursionError:
        values = None
    except ValueError as error:  # NaN, or a number of thousands of digits
        raise RecipeError(f"{where(None)}: is not JSON: {error}") from None
    as_yaml = "".join(sign if sign.isprintable() or sign == "\n" else " " for sign in text)
    _, lines, twice = _read_yaml(as_yaml, where)
    return values, lines, twice


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _read_yaml(text: str, where: Where) -> Read:
    lines: dict[str, int] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}, ()
        twice = tuple(_add_lines(node, "", lines))
        return loader.construct_document(node), lines, twice
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        told = ", ".join(filter(None, (error.context, error.problem)))
        raise RecipeError(f"{where(mark.line + 1 if mark else None)}: {printable(told)}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(
            f"{where(line)}: the character {printable(chr(error.character))} cannot be in YAML"
        ) from None


class _Loader(yaml.SafeLoader):
    """Safe YAML without aliases and tags, whose scalars are those of YAML 1.2.

    In YAML 1.1 ``1e-4`` is text, ``010`` is 8, ``1:30`` is 90, ``2024-01-01`` is a date, and
    ``no``, which strategies may be, is false.
    """

    yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0].endswith(":null")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str):
        super().__init__(text)
        self.depth = 0

    def compose_node(self, parent, index):
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _marked(f"*{event.anchor} is an alias; write the value itself", event)
        if getattr(event, "tag", None) is not None:
            raise _marked(f"{event.tag} is a tag, which recipes do not have", event)
        self.depth += 1
        if self.depth > DEEPEST:
            raise _marked(TOO_DEEP, event)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node, deep=False):
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # a number of thousands of digits
            raise _marked(str(error), node) from None


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+"
        r"|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


def _marked(problem: str, place: yaml.Event | yaml.Node) -> yaml.MarkedYAMLError:
    mark: Any = place.start_mark  # of yaml or of its C twin, which its types keep apart
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _add_lines(node: yaml.Node, outer: str, lines: dict[str, int]) -> Iterator[Fault]:
    """Those of the keys in a node; keys that are there twice are faults."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _add_lines(item, f"{outer}{index}.", lines)
    elif isinstance(node, yaml.MappingNode):
        here: dict[str, int] = {}
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise _marked("a key is not text", key)
            name, line = outer + key.value, key.start_mark.line + 1
            if (before := here.get(name)) is not None:
                text = f"{shown_name(name)} is there twice, in lines {before} and {line}"
                yield Fault(name, text, before)
            here[name] = lines[name] = line
            yield from _add_lines(value, f"{name}.", lines)
