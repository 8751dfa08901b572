"""Paths from users: expand them, and refuse outputs inside or around inputs. Imports no torch."""

import argparse
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

URL = re.compile(r"[A-Za-z][\w+.-]*://")


class PathError(ValueError, argparse.ArgumentTypeError):
    """A path that is refused.

    argparse prints the message of an ``ArgumentTypeError`` unchanged.
    """


def expand_path(path: str) -> str:
    """Expand a leading ``~`` or ``~user`` of a path.

    Ids of the Hub and URLs stay as they are, and so does a path that is already expanded. The
    function also serves as the ``type`` of command-line options.

    Raises:
        PathError: There is no such user; or the path contains ``$`` and no such file exists.
    """
    if not path:
        raise PathError("the path is empty; expected a file or a folder")
    if URL.match(path):
        return path
    expanded = path
    with suppress(ValueError):  # the text after ~ cannot be the name of a user
        expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = path.partition("/")[0]
        raise PathError(
            f"{path!r} begins with {user}, and there is no user of that name; expected the path "
            f"itself, or ./{path} for a name that begins with ~"
        )
    if "$" in path:
        _require_name_with_dollar(expanded)
    return expanded


def to_path(path: str) -> Path:
    """Return :func:`expand_path` as a :class:`~pathlib.Path`."""
    return Path(expand_path(path))


def _require_name_with_dollar(path: str) -> None:
    """Raise ``PathError`` unless ``$`` is part of the name of a file that exists."""
    expanded = os.path.expandvars(path)
    *_, last = re.finditer(r"[^/]*\$[^/]*", path)
    if expanded == path and "${" not in path and os.path.lexists(path[: last.end()]):
        return
    message = f"{path!r} contains $, and variables are not expanded here; expected the path itself"
    if "$" not in expanded:
        raise PathError(f"{message}: {expanded}")
    names = ", ".join(re.findall(r"\$\{?(\w+)", expanded))
    raise PathError(message + f" ({names} is not set in this environment)" * bool(names))


def is_within(path: str | Path, folder: str | Path) -> bool:
    """Return whether ``path`` is ``folder`` or lies below it; neither has to exist.

    Links, ``..`` and, on file systems that ignore case, other spellings of a name are resolved.
    """
    path, folder = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if path.is_relative_to(folder):
        return True
    existing = [ancestor for ancestor in (path, *path.parents) if os.path.exists(ancestor)]
    if not os.path.exists(folder):
        return False
    return any(os.path.samefile(ancestor, folder) for ancestor in existing)


def refuse_overlap(out: str | Path, inputs: Iterable[tuple[str, str | Path]], name: str) -> None:
    """Raise ``ValueError`` if an output lies in an input folder, or contains one.

    Args:
        out: File or folder to be written; it need not exist.
        inputs: Pairs ``(description, path)`` of inputs; paths that are not folders are skipped.
        name: The name of ``out`` for users, which messages contain.
    """
    cure = f"expected {name} in a folder of its own, beside that one"
    for description, path in inputs:
        if not os.path.isdir(path):
            continue
        inside, around = is_within(out, path), is_within(path, out)
        if not (inside or around):
            continue
        relation = f"{name}, {out}, {'lies in' if inside else 'contains'}"
        relation = f"{name} is" if inside and around else relation
        real = os.path.realpath(path)
        raise ValueError(f"{relation} {description}, {real}, which is read; {cure}")
