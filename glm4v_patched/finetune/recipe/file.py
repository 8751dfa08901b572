"""A YAML or JSON file as values, with the line of each key; faults are reported by line.

PyYAML, and not ruamel.yaml: that reads 010 as 10 and 2024-01-01 as a date, drops tags silently and
ends at the first key that is there twice, so that all of the rules below would still be ours.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ...atomic import write_atomically
from ...terminal_text import listed, printable

# A recipe is a page of text; a larger file is a mistake, such as data or weights.
MAX_RECIPE_BYTES = 2**16
MAX_PROBLEMS = 20
NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff]")


class RecipeProblem(NamedTuple):
    """``name`` is dotted; empty where no field is to blame, and an option where that is."""

    name: str
    text: str


@contextmanager
def collect_problems(faults: list[RecipeProblem], name: str, before: str = "") -> Iterator[None]:
    """Add an error about a field to ``faults``, and go on after the block."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        faults.append(RecipeProblem(name, f"{before}{error}"))


class RecipeError(ValueError):
    """A recipe cannot be; the message has a line for each fault, ``names`` has what is to blame."""

    found: tuple[Any, Any] = None, None

    def __init__(self, lines: Sequence[str], names: Sequence[str] = ()):
        super().__init__(listed(lines, MAX_PROBLEMS, between="\n"))
        self.names = {*names}


@dataclass(frozen=True)
class Document:
    """What a file says, and then the command line.

    ``lines`` has the line of each key by its dotted name, ``overridden`` the dotted names that the
    command line gave.
    """

    path: Path
    values: Any
    lines: dict[str, int]
    overridden: frozenset[str] = frozenset()

    def error(self, faults: Sequence[RecipeProblem]) -> RecipeError:
        """The error that lists faults with file and line, in their order."""
        ordered = sorted(faults, key=lambda fault: self.lines.get(fault.name, 0))
        lines = [self._where(fault.name) + fault.text for fault in ordered]
        return RecipeError(lines, [fault.name for fault in faults])

    def _where(self, name: str) -> str:
        """``FILE:LINE: `` of a dotted name, or of the section around it."""
        around = [name, *(name[: dot.start()] for dot in re.finditer(r"\.", name))]
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
        for text in assignments:
            name, equals, value = text.partition("=")
            told = f"command line: {short_name(name)}"
            if not equals or not all(name.split(".")):
                told = f"command line: {shown(text)} is no assignment; expected field=value, as in "
                raise RecipeError([told + "engine.compile=true"])
            if name in given:
                raise RecipeError([f"{told} is given twice"])
            given[name], _ = _read_yaml(value, f"{told}:")
        if not isinstance(self.values, dict):
            return self  # which is reported instead
        values = set_nested(self.values, given)
        return replace(self, values=values, overridden=frozenset(given))


def read_document(path: Path) -> Document:
    """Read a file as YAML (scalars as in 1.2), which JSON is, too, but for some signs.

    Raises:
        RecipeError: the file is not there, or cannot be read; with its line where one is to blame.
    """
    name = printable(str(path))
    text = _read_text(path, name)
    if path.suffix.lower() == ".json":
        text = as_yaml(text)
    return Document(path, *_read_yaml(text, f"{name}:"))


def as_yaml(text: str) -> str:
    """JSON without signs that YAML refuses or takes for ends of lines: all but tabs, which are
    never part of a text there, are in texts alone."""
    return NOT_IN_YAML.sub(lambda sign: f"\\u{ord(sign[0]):04x}", text.replace("\t", " "))


def write_values(path: Path, values: Mapping[str, Any]) -> None:
    """Write the values of a recipe as JSON, which is YAML, too."""
    text = json.dumps(values, indent=2, ensure_ascii=False)
    write_atomically(path, as_yaml(text) + "\n")


def set_nested(values: dict, given: Mapping[str, Any]) -> dict:
    """A copy of nested ``values`` with others by dotted names."""
    values = dict(values)
    for name, value in given.items():
        *sections, field = name.split(".")
        place = values
        for section in sections:
            inner = place.get(section, {})
            if not isinstance(inner, dict):
                text = f"{short_name(name)} cannot be: {short_name(section)} is {shown(inner)}"
                raise RecipeError([f"command line: {text}, and no section"])
            place[section] = place = dict(inner)
        place[field] = value
    return values


def shown(value: Any) -> str:
    """A value as JSON has it, on one line and not too long."""
    return _on_one_line(json.dumps(value, ensure_ascii=False, default=str))


def short_name(name: str) -> str:
    """A key, on one line and not too long."""
    return _on_one_line(name) or '""'


def _on_one_line(text: str) -> str:
    """Printable, and not longer than a path may well be."""
    line = printable(text[:201])
    return line if len(line) <= 200 else line[:197] + "..."


def _read_text(path: Path, name: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_RECIPE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise RecipeError([f"{name}: {getattr(error, 'strerror', None) or error}"]) from None
    if len(content) > MAX_RECIPE_BYTES:
        raise RecipeError(
            [
                f"{name}: has over {MAX_RECIPE_BYTES:,} bytes, and a recipe is a page of text: is it "
                "another file?"
            ]
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        text = f"{name}:{line}: byte 0x{byte:02x} is not UTF-8; save the file as UTF-8"
        raise RecipeError([text]) from None


def _read_yaml(text: str, place: str) -> tuple[Any, dict[str, int]]:
    lines: dict[str, int] = {}
    try:
        loader = _Yaml12Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        _add_lines(node, "", lines)
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        line = (error.problem_mark or error.context_mark).line + 1  # type: ignore[union-attr]
        told = printable(", ".join(filter(None, (error.context, error.problem))))
        raise RecipeError([f"{place}{line}: {told}"]) from None
    except RecursionError:
        raise RecipeError([f"{place} too many levels; a recipe has sections of fields"]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        told = f"the character {printable(chr(error.character))} cannot be in YAML"
        raise RecipeError([f"{place}{line}: {told}"]) from None


class _Yaml12Loader(yaml.SafeLoader):
    """Safe YAML without aliases and tags, whose scalars are those of YAML 1.2.

    In YAML 1.1 ``1e-4`` is text, ``010`` is 8, ``1:30`` is 90, ``2024-01-01`` is a date, and
    ``no``, which strategies may be, is false.
    """

    yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0].endswith(":null")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent, index):
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _marked(f"*{event.anchor} is an alias; write the value itself", event)
        if getattr(event, "tag", None) is not None:
            raise _marked(f"{event.tag} is a tag, which recipes do not have", event)
        return super().compose_node(parent, index)

    def construct_scalar(self, node):
        # JSON has signs beyond the first 65,536 as pairs of escapes.
        text = super().construct_scalar(node)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")

    def construct_object(self, node, deep=False):
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # a number of thousands of digits
            raise _marked(str(error), node) from None


_Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789")
)
_Yaml12Loader.add_implicit_resolver(
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


def _add_lines(node: yaml.Node, outer: str, lines: dict[str, int]) -> None:
    """Those of the keys in a node, of which none may be there twice."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _add_lines(item, f"{outer}{index}.", lines)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise _marked("a key is not text", key)
            name, line = outer + key.value, key.start_mark.line + 1
            if name in lines:
                told = f"{short_name(name)} is there twice, in lines {lines[name]} and {line}"
                raise _marked(told, key)
            lines[name] = line
            _add_lines(value, f"{name}.", lines)
