"""Files of a folder, or of a data set of the Hub, that somebody else may have made.

What such a folder says of its files (README.md, .huggingface.yaml, dataset_info.json, state.json,
metadata.csv) is compared with the files that are inside of it, and is never resolved: an absolute
path, ``..``, an address or a chain of fsspec is the name of none of them. Needs no torch.
"""

import os
import posixpath
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NoReturn

MOST_PARTS = 32
"""Folders of a pattern, for each ``**`` may match in many ways."""


class Folder:
    """A folder on this machine.

    Attributes:
        path: As messages show it.
        files: All files below it, relative to it and sorted. As for ``datasets``, names that begin
            with ``.`` or ``__`` are hidden, and linked folders are not entered.
    """

    def __init__(self, path: str):
        self.path = path
        self.files = sorted(_files_below(path))
        self._roots = _real_roots(path)

    def has(self, file: str) -> bool:
        """Return whether there is such a file, which may be hidden."""
        return os.path.lexists(os.path.join(self.path, file))

    def local_path(self, file: str) -> str:
        """Return the path of a file on this machine. It need not exist.

        Raises:
            ValueError: It is outside of the folder, by its name or by a link.
        """
        path = os.path.normpath(os.path.join(self.path, file))
        real = os.path.realpath(path)
        if not any(Path(real).is_relative_to(root) for root in self._roots):
            link = "is a link to" if _is_below(path, self.path) else "is"
            raise ValueError(
                f"{os.path.join(self.path, file)} {link} {real}, outside of the folder; expected "
                "a file inside of it: name that file in the recipe itself, or copy it"
            )
        return path

    def read_text(self, file: str, most: int) -> str:
        """Return the text of a small file.

        Raises:
            ValueError: It is outside of the folder, is no regular file, or is larger.
        """
        path = self.local_path(file)
        if not os.path.isfile(path):  # a pipe would block
            raise ValueError(f"{path} is no regular file")
        if (size := os.path.getsize(path)) > most:
            raise ValueError(f"{path} has {size:,} bytes; expected {most:,} at most")
        return Path(path).read_text(encoding="utf-8-sig", errors="replace")


class HubFolder(Folder):
    """A data set of the Hub at one commit, of which a file is downloaded when it is asked for."""

    def __init__(self, repository: str, revision: str | None):
        from huggingface_hub import HfApi  # late: local files do not need it

        info = HfApi().dataset_info(repository, revision=revision)
        self.path, self.commit = repository, info.sha
        self._all = {of.rfilename for of in info.siblings or ()}
        self.files = sorted(file for file in self._all if not _is_hidden(file))

    def has(self, file: str) -> bool:
        return file in self._all

    def local_path(self, file: str) -> str:
        from huggingface_hub import hf_hub_download

        file = posixpath.normpath(file)
        if file not in self._all:
            raise ValueError(f"{self.path} has no file {file!r}")
        return hf_hub_download(self.path, file, repo_type="dataset", revision=self.commit)


def hub_cache_of(repository: str) -> str:
    """Return the folder in the Hub's cache that has the files of a data set."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    name = repo_folder_name(repo_id=repository, repo_type="dataset")
    return os.path.join(constants.HF_HUB_CACHE, name)


def _files_below(path: str) -> Iterator[str]:
    def refuse(error: OSError) -> NoReturn:
        raise error

    for folder, folders, names in os.walk(path, onerror=refuse):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        below = os.path.relpath(folder, path)
        yield from (
            posixpath.normpath(posixpath.join(below, name))
            for name in names
            if not _is_hidden(name)
        )


def _is_hidden(file: str) -> bool:
    return any(part.startswith((".", "__")) for part in file.split("/"))


def _is_below(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(os.path.normpath(folder))


def _real_roots(path: str) -> list[str]:
    """Return the folder, and if it is a snapshot in the Hub's cache, the blobs beside the
    snapshots, to which its files are links."""
    real = Path(os.path.realpath(path))
    around = (of.parent for of in (real, *real.parents) if of.name == "snapshots")
    of_hub = (of for of in around if of.name.startswith(("datasets--", "models--")))
    return [str(real), *(str(of / "blobs") for of in of_hub)]


def matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return whether each name of a path matches its pattern; ``**`` is any number of names."""

    @cache
    def match(name: int, pattern: int) -> bool:
        if pattern == len(patterns):
            return name == len(names)
        is_any = patterns[pattern] == "**"
        if is_any and match(name, pattern + 1):
            return True
        if name == len(names) or not (is_any or fnmatchcase(names[name], patterns[pattern])):
            return False
        return match(name + 1, pattern if is_any else pattern + 1)

    return match(0, 0)


def find_matching(files: Sequence[str], pattern: str) -> list[str]:
    """Return the files that match a pattern with ``*``, ``?``, ``[...]`` and ``**``."""
    parts = [part for part in pattern.split("/") if part != "."]
    if len(parts) > MOST_PARTS:
        return []
    return [file for file in files if matches(file.split("/"), parts)]
