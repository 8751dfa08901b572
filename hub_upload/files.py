"""What a folder holds, read once; and what is said of the weights in it."""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from glm4v_patched.atomic import find_file_problem, require_inside
from glm4v_patched.models.weight_files import check_index
from glm4v_patched.patch.config_json import parse_json_object
from glm4v_patched.terminal_text import listed

from .layout import ADAPTER_WEIGHTS, INDEX, MANIFEST, SHARD, SINGLE_FILE
from .manifest import FineTune, Listed, Manifest, Origin, read_manifest

# A tokenizer.json takes 20 MB; what is larger is no small file of a model.
LARGEST_TO_READ = 100_000_000
# Only text is read: no weights, and nothing that Python or torch would unpickle.
TEXT = {"", ".jinja", ".json", ".md", ".model", ".py", ".txt"}


@dataclass(frozen=True)
class File:
    """A file of a folder or of a repository."""

    size: int
    sha256: str | None = None  # also where the Hub or a manifest says so; None if nobody has
    content: bytes | None = None  # as it was hashed; None for weights and whatever is not read
    path: Path | None = None  # None if it is only on the Hub

    @classmethod
    def of(cls, content: bytes, path: Path | None = None) -> "File":
        return cls(len(content), hashlib.sha256(content).hexdigest(), content, path)


class Source:
    """All that a folder or a repository holds, by path; ``name`` is as it was given.

    ``weights`` are the files that the loader will look for; ``origin`` is that of weights on the
    Hub, and ``fine_tune`` what somebody says of them.
    """

    def __init__(self, name: str, files: dict[str, File], origin: Origin | None = None) -> None:
        self.name, self.files, self.origin = name, files, origin
        self.fine_tune: FineTune | None = None
        self.weights: dict[str, Listed] = {}

    def content(self, path: str) -> bytes | None:
        return self.files[path].content if path in self.files else None

    def read(self, path: str) -> bytes:
        if (content := self.content(path)) is None:
            raise ValueError(f"{self.name} has no {path}")
        return content

    def read_json(self, path: str) -> dict[str, Any]:
        return parse_json_object(self.read(path), f"{self.name}: {path}")

    def read_manifest(self) -> Manifest:
        return read_manifest(self.read(MANIFEST), f"{self.name}: {MANIFEST}")

    def weight_names(self) -> list[str]:
        """The files of weights that the loader will look for."""
        if INDEX not in self.files:
            return [SINGLE_FILE]
        names = {*check_index(self.read_json(INDEX)).values()}
        if odd := sorted(name for name in names if not re.fullmatch(SHARD, name)):
            told = f"{self.name}: {INDEX} names {listed(odd)} in its weight_map"
            raise ValueError(f"{told}, expected *.safetensors in one folder")
        return sorted(names)


class Build(Source):
    """What was built, with its manifest; ``ValueError`` if no build of ours wrote that."""

    def __init__(self, name: str, files: dict[str, File], revision: str | None = None) -> None:
        super().__init__(name, files)
        self.revision = revision  # commit on the Hub; None for a folder
        self.manifest = self.read_manifest()
        self.origin, self.fine_tune = self.manifest.weights_from, self.manifest.fine_tune
        self.weights = self.manifest.weights

    def weight_names(self) -> list[str]:
        return [ADAPTER_WEIGHTS] if self.manifest.is_of_adapters else super().weight_names()

    @property
    def copied(self) -> bool:
        """Whether weights are left for the Hub to copy them."""
        here = self.revision or any(name.endswith(".safetensors") for name in self.files)
        return self.origin is not None and not here


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_small(name: str, size: int) -> bool:
    """Whether it is read: text that is not too large."""
    return size <= LARGEST_TO_READ and PurePosixPath(name).suffix in TEXT


def read_folder(folder: Path, hidden: bool = False) -> dict[str, File]:
    """Every file by its path in the folder; in folders whose names begin with a dot only if
    ``hidden``, and never what git and the Hub's client keep.

    ``ValueError`` for a device, a pipe, text with another name (a hard link), and a link that leads
    out of it, or to a folder; but links of the Hub's cache, from a snapshot to the blobs beside it,
    are followed.
    """
    found = {}
    for where, folders, names in os.walk(folder):
        left = [name for name in folders if name.startswith(".")]
        left = [name for name in left if not hidden or name in (".git", ".cache")]
        folders[:] = [name for name in folders if name not in left]
        links = [name for name in folders if Path(where, name).is_symlink()]
        for path in (Path(where, name) for name in [*links, *names]):
            name = path.relative_to(folder).as_posix()
            # Weights have another name where they came from; text is always written.
            if path.is_symlink() or find_file_problem(path, alone=is_small(name, path.stat().st_size)):
                require_inside(path, folder)
            size = path.stat().st_size
            # What was read counts, whatever has become of the file since.
            small = is_small(name, size)
            found[name] = File.of(path.read_bytes(), path) if small else File(size, path=path)
    return found
