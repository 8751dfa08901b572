"""Paths that users give: how they are expanded, and which folders must not contain each other.

Needs no torch.
"""

import argparse
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://")


class PathError(ValueError, argparse.ArgumentTypeError):
    """A path that is refused. argparse shows the message of its own class alone."""


def expand_path(path: str) -> str:
    """Return a path with the home folder in place of a leading ``~`` or ``~user``.

    Ids of the Hub and addresses pass unchanged, and so does a path that was expanded before. This
    is also the ``type`` of options of the command line.

    Raises:
        PathError: No such user; or a ``$``, which only a shell expands. A name that contains a
            ``$`` itself is accepted where it exists, unless it is also a reference to a variable.
    """
    if not path:
        raise PathError("the path is empty; expected a file or a folder")
    if ADDRESS.match(path):
        return path
    expanded = path
    with suppress(ValueError):  # what cannot be the name of a user
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
    """Return :func:`expand` of a path, as a :class:`~pathlib.Path`."""
    return Path(expand_path(path))


def _require_name_with_dollar(path: str) -> None:
    meant = os.path.expandvars(path)
    *_, last = re.finditer(r"[^/]*\$[^/]*", path)
    if meant == path and "${" not in path and os.path.lexists(path[: last.end()]):
        return
    told = f"{path!r} contains $, and variables are not expanded here; expected the path itself"
    if "$" not in meant:
        raise PathError(f"{told}: {meant}")
    names = ", ".join(re.findall(r"\$\{?(\w+)", meant))
    raise PathError(told + f" ({names} is not set in this environment)" * bool(names))


def is_within(path: str | Path, folder: str | Path) -> bool:
    """Return whether ``path`` is ``folder`` or lies below it, by any spelling of the two: links,
    ``..``, and names that the file system takes for the same. Neither has to exist."""
    path, folder = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if path.is_relative_to(folder):
        return True
    around = [each for each in (path, *path.parents) if os.path.exists(each)]
    return os.path.exists(folder) and any(os.path.samefile(each, folder) for each in around)


def require_apart(out: str | Path, read: Iterable[tuple[str, str | Path]], name: str) -> None:
    """Raise ``ValueError`` unless what is written lies outside of every folder that is read, and
    contains none of them.

    Args:
        out: A file or folder to be written, which need not exist.
        read: What is read, each as ``(what it is, path)``. Paths that are no folders are skipped.
        name: Of ``out``, as users give it.
    """
    cure = f"expected {name} in a folder of its own, beside that one"
    for what, path in read:
        if not os.path.isdir(path):
            continue
        inside, around = is_within(out, path), is_within(path, out)
        if inside or around:
            told = f"{name}, {out}, {'lies in' if inside else 'contains'}"
            told = f"{name} is" if inside and around else told
            raise ValueError(f"{told} {what}, {os.path.realpath(path)}, which is read; {cure}")
