"""Read a recipe's values from a YAML or JSON file, and report problems with file and line.

The parser is PyYAML with the rules of :class:`_Yaml12Loader`. ruamel.yaml would need such rules,
too: it reads 010 as 10 and 2024-01-01 as a date, drops tags silently, and stops at the first
duplicate key.
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
from .yaml_hints import explain_line_mistake, explain_syntax_error

# A recipe is a page of text; a larger file is a mistake, such as data or weights.
MAX_RECIPE_BYTES = 2**16
MAX_PROBLEMS = 20
# Characters that YAML refuses or takes for line ends.
NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff]")


class RecipeProblem(NamedTuple):
    """A problem with a recipe.

    Args:
        name: Dotted name of the field, or the option (such as ``--device``), that has the problem;
            empty for a problem of the whole file.
        text: The message, without file and line.
    """

    name: str
    text: str


@contextmanager
def collect_problems(problems: list[RecipeProblem], name: str, prefix: str = "") -> Iterator[None]:
    """Append an error of the block (``ValueError``, ``RuntimeError``) to ``problems``, and go on.

    Args:
        name: Dotted name of the field that is checked.
        prefix: Text before the error's message.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        problems.append(RecipeProblem(name, f"{prefix}{error}"))


class RecipeError(ValueError):
    """A recipe cannot be used; the message has a line for each problem.

    Attributes:
        names: Names of the fields and options that have the problems.
        recipe_and_placement: For ``doctor``, which goes on: the recipe, or None if it is invalid;
            and the placement of its processes, or None if they cannot be placed.
    """

    recipe_and_placement: tuple[Any, Any] = None, None

    def __init__(self, lines: Sequence[str], names: Sequence[str] = ()):
        super().__init__(listed(lines, MAX_PROBLEMS, separator="\n"))
        self.names = {*names}


@dataclass(frozen=True)
class Document:
    """The values of a recipe's file, some of which the command line may have replaced.

    Args:
        lines: Line number of each key in the file, by dotted name.
        overridden: Dotted names of the values from the command line.
    """

    path: Path
    values: Any
    lines: dict[str, int]
    overridden: frozenset[str] = frozenset()

    def error(self, problems: Sequence[RecipeProblem]) -> RecipeError:
        """Return the error that lists problems with file and line, in the order of the lines."""
        ordered = sorted(problems, key=lambda problem: self.lines.get(problem.name, 0))
        messages = [self._location(problem.name) + problem.text for problem in ordered]
        return RecipeError(messages, [problem.name for problem in problems])

    def _location(self, name: str) -> str:
        """Return where a value is, as the beginning of a message.

        This is ``command line: ``, ``FILE:LINE: `` of the field or else of its innermost section
        that the file has, or ``FILE: `` if it has neither.
        """
        file = printable(str(self.path))
        sections = [name[: dot.start()] for dot in re.finditer(r"\.", name)]
        name_and_sections = [name, *reversed(sections)]  # the innermost section first
        if not self.overridden.isdisjoint(name_and_sections):
            return "command line: "
        for key in name_and_sections:
            if key in self.lines:
                return f"{file}:{self.lines[key]}: "
        # An option, or a section that only the command line has.
        if name.startswith("--") or any(field.startswith(f"{name}.") for field in self.overridden):
            return "command line: "
        return f"{file}: "

    def override(self, assignments: Sequence[str]) -> "Document":
        """Return the document in which assignments such as ``engine.compile=true`` replace values.

        Raises:
            RecipeError: An assignment has no ``=``, its value is not YAML, or a name is assigned
                twice.
        """
        values: dict[str, Any] = {}
        for text in assignments:
            name, equals, value = text.partition("=")
            location = f"command line: {short_name(name)}"
            if not equals or not all(name.split(".")):
                raise RecipeError(
                    [
                        f"command line: {short_json(text)} is not an assignment; expected "
                        "field=value, as in engine.compile=true"
                    ]
                )
            if name in values:
                raise RecipeError([f"{location} is given twice"])
            values[name], _ = _read_yaml(value, f"{location}:")
        if not isinstance(self.values, dict):
            return self  # check_values reports this problem
        nested = set_nested(self.values, values)
        return replace(self, values=nested, overridden=frozenset(values))


def read_document(path: Path) -> Document:
    """Read a file as YAML 1.2, of which JSON is a subset.

    Raises:
        RecipeError: The file is missing or cannot be read; the message has the line.
    """
    name = printable(str(path))
    text = _read_text(path, name)
    if path.suffix.lower() == ".json":
        text = as_yaml(text)
    values, lines = _read_yaml(text, f"{name}:")
    if isinstance(values, str):  # YAML reads lines without any colon as one text
        for number, line in enumerate(text.split("\n"), 1):
            if mistake := explain_line_mistake(line):
                raise RecipeError([f"{name}:{number}: {printable(mistake)}"])
    return Document(path, values, lines)


def as_yaml(text: str) -> str:
    """Convert JSON to YAML: escape the characters that YAML refuses or takes for line ends.

    Tabs become spaces: JSON has them only between values, never inside of a string.
    """
    return NOT_IN_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text.replace("\t", " "))


def write_values(path: Path, values: Mapping[str, Any]) -> None:
    """Write the values of a recipe as JSON that is valid YAML, too."""
    text = json.dumps(values, indent=2, ensure_ascii=False)
    write_atomically(path, as_yaml(text) + "\n")


def set_nested(values: dict, changes: Mapping[str, Any]) -> dict:
    """Return a copy of nested ``values`` with ``changes``, whose keys are dotted names."""
    values = dict(values)
    for name, value in changes.items():
        *sections, field = name.split(".")
        target = values
        for section in sections:
            inner = target.get(section, {})
            if not isinstance(inner, dict):
                raise RecipeError(
                    [
                        f"command line: {short_name(name)} cannot be set: {short_name(section)} is "
                        f"{short_json(inner)}, not a section"
                    ]
                )
            target[section] = target = dict(inner)
        target[field] = value
    return values


def short_json(value: Any) -> str:
    """Return a value as JSON on one printable line of at most 200 characters."""
    return _fit_line(json.dumps(value, ensure_ascii=False, default=str))


def short_name(name: str) -> str:
    """Return a key on one printable line of at most 200 characters."""
    return _fit_line(name) or '""'


def _fit_line(text: str) -> str:
    """Return text as one printable line of at most 200 characters, enough for most paths."""
    line = printable(text[:201])
    return line if len(line) <= 200 else line[:197] + "..."


def _read_text(path: Path, name: str) -> str:
    """Return the text of a file; raise ``RecipeError`` if it is too large or not UTF-8."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_RECIPE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise RecipeError([f"{name}: {getattr(error, 'strerror', None) or error}"]) from None
    if len(content) > MAX_RECIPE_BYTES:
        raise RecipeError(
            [
                f"{name}: has over {MAX_RECIPE_BYTES:,} bytes, and a recipe is a page of text: is "
                "it another file?"
            ]
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        text = f"{name}:{line}: byte 0x{byte:02x} is not UTF-8; save the file as UTF-8"
        raise RecipeError([text]) from None


def _read_yaml(text: str, location: str) -> tuple[Any, dict[str, int]]:
    """Return values, and the line of each key by its dotted name.

    Args:
        location: Beginning of each message, such as ``FILE:``.
    """
    lines: dict[str, int] = {}
    try:
        loader = _Yaml12Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        _add_lines(node, "", lines)
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        line, message = explain_syntax_error(text, error)
        raise RecipeError([f"{location}{line}: {printable(message)}"]) from None
    except RecursionError:
        raise RecipeError(
            [f"{location} too many levels; a recipe has sections of fields"]
        ) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"the character {printable(chr(error.character))} cannot be in YAML"
        raise RecipeError([f"{location}{line}: {message}"]) from None


class _Yaml12Loader(yaml.SafeLoader):
    """Loader of safe YAML without aliases and tags, with the scalars of YAML 1.2.

    YAML 1.1, which PyYAML reads by default, takes ``1e-4`` for text, ``010`` for 8, ``1:30`` for
    90, ``2024-01-01`` for a date, and ``no``, a valid strategy, for false.
    """

    # Only null is read as in YAML 1.1. The resolvers of bool, int and float are added below.
    yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0].endswith(":null")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent, index):
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _error_at(f"*{event.anchor} is an alias; write the value itself", event)
        if getattr(event, "tag", None) is not None:
            raise _error_at(f"{event.tag} is a tag, which recipes do not have", event)
        return super().compose_node(parent, index)

    def construct_scalar(self, node):
        # JSON escapes characters beyond U+FFFF as pairs of surrogates.
        text = super().construct_scalar(node)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")

    def construct_object(self, node, deep=False):
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # a number of thousands of digits
            raise _error_at(str(error), node) from None


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


def _error_at(problem: str, source: yaml.Event | yaml.Node) -> yaml.MarkedYAMLError:
    """Return a YAML error whose mark is the start of an event or a node."""
    mark: Any = source.start_mark  # the type stubs separate yaml's marks from those of its C parser
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _add_lines(node: yaml.Node, prefix: str, lines: dict[str, int]) -> None:
    """Add the line of each key in a node by its dotted name; raise for a key that is repeated."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _add_lines(item, f"{prefix}{index}.", lines)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise _error_at("a key is not text", key)
            name, line = prefix + key.value, key.start_mark.line + 1
            if name in lines:
                first = lines[name]
                message = f"{short_name(name)} is there twice, in lines {first} and {line}"
                raise _error_at(message, key)
            lines[name] = line
            _add_lines(value, f"{name}.", lines)
