"""Files of a folder or of a data set of the Hub, which may be made by somebody who is not trusted.

Some files of a folder name its other files: README.md, .huggingface.yaml, dataset_info.json,
state.json and metadata.csv. A path that they name is compared with the paths of the folder's files
and is not opened otherwise. So an absolute path, ``..``, a URL or a chained fsspec URL matches no
file. Needs no torch.
"""

import os
import posixpath
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NoReturn

MAX_PATTERN_PARTS = 32
"""Limit on the parts of a glob pattern, because each ``**`` can match in many ways."""


class Folder:
    """A folder on this machine.

    Attributes:
        path: The folder's path, or the id of a data set of the Hub, as shown in messages.
        files: Relative paths of all files below the folder, sorted. As in ``datasets``, names that
            begin with ``.`` or ``__`` are hidden and left out, and symbolic links to folders are
            not followed.
    """

    def __init__(self, path: str):
        self.path = path
        self.files = sorted(_files_below(path))
        self._roots = _real_roots(path)

    def has(self, file: str) -> bool:
        """Return whether the folder has a file, which may be hidden."""
        return os.path.lexists(os.path.join(self.path, file))

    def local_path(self, file: str) -> str:
        """Return the path of a file on this machine. It need not exist.

        Raises:
            ValueError: The path or the target of a link is outside of the folder.
        """
        path = os.path.normpath(os.path.join(self.path, file))
        real = os.path.realpath(path)
        if not any(Path(real).is_relative_to(root) for root in self._roots):
            verb = "is a link to" if _is_below(path, self.path) else "is"
            raise ValueError(
                f"{os.path.join(self.path, file)} {verb} {real}, outside of the folder; expected "
                "a file inside of it: name that file in the recipe itself, or copy it here"
            )
        return path

    def read_text(self, file: str, max_bytes: int) -> str:
        """Return the text of a small file.

        Raises:
            ValueError: The file is outside of the folder, not a regular file, or too large.
        """
        path = self.local_path(file)
        if not os.path.isfile(path):  # a pipe would block
            raise ValueError(f"{path} is not a regular file")
        if (size := os.path.getsize(path)) > max_bytes:
            raise ValueError(f"{path} has {size:,} bytes; expected at most {max_bytes:,}")
        return Path(path).read_text(encoding="utf-8-sig", errors="replace")


class HubFolder(Folder):
    """A data set of the Hub at one commit, whose files are downloaded on first use."""

    def __init__(self, repository: str, revision: str | None):
        from huggingface_hub import HfApi  # imported here: local files do not need it

        info = HfApi().dataset_info(repository, revision=revision)
        self.path, self.commit = repository, info.sha
        self._all_files = {sibling.rfilename for sibling in info.siblings or ()}
        self.files = sorted(file for file in self._all_files if not _is_hidden(file))

    def has(self, file: str) -> bool:
        return file in self._all_files

    def local_path(self, file: str) -> str:
        from huggingface_hub import hf_hub_download

        file = posixpath.normpath(file)
        if file not in self._all_files:
            raise ValueError(f"{self.path} has no file {file!r}")
        return hf_hub_download(self.path, file, repo_type="dataset", revision=self.commit)


def hub_cache_folder(repository: str) -> str:
    """Return the folder of the Hub's cache that contains the files of a data set."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    name = repo_folder_name(repo_id=repository, repo_type="dataset")
    return os.path.join(constants.HF_HUB_CACHE, name)


def _files_below(path: str) -> Iterator[str]:
    def raise_error(error: OSError) -> NoReturn:
        raise error

    for folder, subfolders, names in os.walk(path, onerror=raise_error):
        subfolders[:] = [name for name in subfolders if not _is_hidden(name)]  # others are skipped
        relative = os.path.relpath(folder, path)
        yield from (
            posixpath.normpath(posixpath.join(relative, name))
            for name in names
            if not _is_hidden(name)
        )


def _is_hidden(file: str) -> bool:
    return any(part.startswith((".", "__")) for part in file.split("/"))


def _is_below(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(os.path.normpath(folder))


def _real_roots(path: str) -> list[str]:
    """Return the folders in which files may lie: the folder itself and, for a snapshot in the Hub's
    cache, the folder of the blobs that its files link to."""
    real = Path(os.path.realpath(path))
    parents = (folder.parent for folder in (real, *real.parents) if folder.name == "snapshots")
    hub_folders = (
        parent for parent in parents if parent.name.startswith(("datasets--", "models--"))
    )
    return [str(real), *(str(folder / "blobs") for folder in hub_folders)]


def matches_pattern(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return whether a path matches a glob pattern, both of which are split at slashes. ``**``
    matches any number of names."""

    @cache
    def match(name_index: int, pattern_index: int) -> bool:
        if pattern_index == len(patterns):
            return name_index == len(names)
        is_wildcard = patterns[pattern_index] == "**"
        if is_wildcard and match(name_index, pattern_index + 1):
            return True
        if name_index == len(names) or not (
            is_wildcard or fnmatchcase(names[name_index], patterns[pattern_index])
        ):
            return False
        return match(name_index + 1, pattern_index if is_wildcard else pattern_index + 1)

    return match(0, 0)


def find_matching_files(files: Sequence[str], pattern: str) -> list[str]:
    """Return the files that match a glob pattern with ``*``, ``?``, ``[...]`` and ``**``; none if
    the pattern has more than :data:`MAX_PATTERN_PARTS` parts."""
    parts = [part for part in pattern.split("/") if part != "."]
    if len(parts) > MAX_PATTERN_PARTS:
        return []
    return [file for file in files if matches_pattern(file.split("/"), parts)]
