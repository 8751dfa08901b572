"""The files of a folder or repository, read once, and the origin of their weights."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from glm4v_patched.atomic import find_file_problem, require_copyable
from glm4v_patched.models.weight_files import SINGLE_FILE, WEIGHTS_INDEX, check_index
from glm4v_patched.patch.config_json import parse_json_object

from .manifest import (
    MANIFEST,
    Evaluation,
    FineTune,
    ListedFile,
    Manifest,
    WeightsOrigin,
    parse_manifest,
)

# A tokenizer.json has 20 MB. Files above this size are not read, only hashed when needed.
MAX_READ_BYTES = 100_000_000
# Suffixes of files that are read: only text, neither weights nor pickles.
TEXT_SUFFIXES = {"", ".jinja", ".json", ".md", ".model", ".py", ".txt"}


@dataclass(frozen=True)
class File:
    """A file of a folder or of a repository."""

    size: int
    sha256: str | None = None  # computed, or taken from the Hub or a manifest; None if unknown
    content: bytes | None = None  # the bytes that were hashed; None if the file was not read
    path: Path | None = None  # None for a file on the Hub only

    @classmethod
    def of(cls, content: bytes, path: Path | None = None) -> "File":
        """Return a file with this content."""
        return cls(len(content), hashlib.sha256(content).hexdigest(), content, path)


class SourceFiles:
    """All files of a folder or repository.

    Args:
        name: Folder or id as the user gave it, for messages.
        files: Files by path.
        origin: Repository and commit of the weights, if they are on the Hub.

    Attributes:
        weights: Files of weights that the loader will open.
        fine_tune: How the weights were trained; None for the original weights.
        evaluation: Scores of these weights, if they are to be published.
    """

    def __init__(
        self, name: str, files: dict[str, File], origin: WeightsOrigin | None = None
    ) -> None:
        self.name, self.files, self.origin = name, files, origin
        self.fine_tune: FineTune | None = None
        self.evaluation: Evaluation | None = None
        self.weights: dict[str, ListedFile] = {}

    def content(self, path: str) -> bytes | None:
        """Return a file's bytes, or None if it is missing or was not read."""
        return self.files[path].content if path in self.files else None

    def read(self, path: str) -> bytes:
        """Return a file's bytes, or raise ``ValueError`` if it is missing."""
        if (content := self.content(path)) is None:
            raise ValueError(f"{self.name} has no {path}")
        return content

    def read_json(self, path: str) -> dict[str, Any]:
        """Return the JSON object in a file."""
        return parse_json_object(self.read(path), f"{self.name}: {path}")

    def read_manifest(self) -> Manifest:
        """Return the manifest of an earlier build."""
        return parse_manifest(self.read(MANIFEST), f"{self.name}: {MANIFEST}")

    def weight_names(self) -> list[str]:
        """Return the names of the weight files that the loader will open."""
        if WEIGHTS_INDEX not in self.files:
            return [SINGLE_FILE]
        return sorted({*check_index(self.read_json(WEIGHTS_INDEX)).values()})


class BuiltFiles(SourceFiles):
    """The files of a build, with its manifest.

    Raises ``ValueError`` if the manifest is missing or invalid.

    Args:
        revision: Commit on the Hub; None for a folder.
    """

    def __init__(self, name: str, files: dict[str, File], revision: str | None = None) -> None:
        super().__init__(name, files)
        self.revision = revision
        self.manifest = self.read_manifest()
        self.origin, self.fine_tune = self.manifest.weights_from, self.manifest.fine_tune
        self.weights, self.evaluation = self.manifest.weights, self.manifest.evaluation

    @property
    def weights_stay_on_hub(self) -> bool:
        """Whether the folder has no weights, because publishing lets the Hub copy them."""
        has_weights = self.revision or any(name.endswith(".safetensors") for name in self.files)
        return self.origin is not None and not has_weights


def sha256_of_file(path: Path) -> str:
    """Return a file's sha256 as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_small(name: str, size: int) -> bool:
    """Return whether the file is text of up to :data:`MAX_READ_BYTES`, which is read."""
    return size <= MAX_READ_BYTES and PurePosixPath(name).suffix in TEXT_SUFFIXES


def read_folder(folder: Path, hidden: bool = False) -> dict[str, File]:
    """Return every file by its path in the folder.

    Args:
        hidden: Whether to include folders whose names begin with a dot, except .git and .cache.

    Raises:
        ValueError: The folder has devices, pipes, hard-linked text files, links to folders, or
            links that lead out of it. Links from a snapshot to its blobs, as in the Hub's cache,
            are allowed.
    """
    files = {}
    for parent, folders, names in os.walk(folder):
        skipped = [name for name in folders if name.startswith(".")]
        skipped = [name for name in skipped if not hidden or name in (".git", ".cache")]
        folders[:] = [name for name in folders if name not in skipped]
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for path in (Path(parent, name) for name in [*links, *names]):
            name = path.relative_to(folder).as_posix()
            # A build may hard-link weights to their source, but writes text files itself.
            if path.is_symlink() or find_file_problem(
                path, refuse_hard_links=is_small(name, path.stat().st_size)
            ):
                require_copyable(path, folder)
            size = path.stat().st_size
            # Later steps use these bytes, even if the file changes meanwhile.
            is_text = is_small(name, size)
            files[name] = File.of(path.read_bytes(), path) if is_text else File(size, path=path)
    return files
