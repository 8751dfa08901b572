"""What a folder or a repository of the Hub holds, read once and compared with its hashes."""

import glob
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi, ModelInfo, snapshot_download
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils.sha import git_hash

from glm4v_patched.atomic import fault_of_file, require_inside
from glm4v_patched.patch.config_json import parse_object
from glm4v_patched.terminal_text import listed

from .errors import AGAIN, NO_HUB
from .layout import INDEX, MANIFEST, SHARD, SINGLE_FILE
from .manifest import Manifest, read_manifest

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

    def is_at(self, there: RepoSibling | None) -> bool:
        """Whether the Hub has this content."""
        if there is None or there.size != self.size:
            return False
        if there.lfs:
            return there.lfs.sha256 == self.sha256
        return self.content is not None and there.blob_id == git_hash(self.content)


@dataclass
class Contents:
    """All that a folder or a repository holds, by path; ``name`` is as it was given."""

    name: str
    files: dict[str, File]

    def content(self, path: str) -> bytes | None:
        return self.files[path].content if path in self.files else None

    def read(self, path: str) -> bytes:
        if (content := self.content(path)) is None:
            raise ValueError(f"{self.name} has no {path}")
        return content

    def read_json(self, path: str) -> dict[str, Any]:
        return parse_object(self.read(path), f"{self.name}: {path}")

    def read_manifest(self) -> Manifest:
        return read_manifest(self.read(MANIFEST), f"{self.name}: {MANIFEST}")

    def weight_names(self) -> list[str]:
        """The files of weights that the loader will look for."""
        if INDEX not in self.files:
            return [SINGLE_FILE]
        where = self.read_json(INDEX).get("weight_map")
        names = [*where.values()] if isinstance(where, dict) else []
        odd = [name for name in names if not re.fullmatch(SHARD, str(name))]
        if odd or not names:
            told = f"{self.name}: {INDEX} names {listed(odd) or 'no files'} in its weight_map"
            raise ValueError(f"{told}, expected *.safetensors in one folder")
        return sorted({*names})


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
            if path.is_symlink() or fault_of_file(path, alone=is_small(name, path.stat().st_size)):
                require_inside(path, folder)
            size = path.stat().st_size
            # What was read counts, whatever has become of the file since.
            small = is_small(name, size)
            found[name] = File.of(path.read_bytes(), path) if small else File(size, path=path)
    return found


def look_at(api: HfApi, name: str, at: str | None) -> tuple[ModelInfo, dict[str, RepoSibling]]:
    """What the Hub says of a repository, and of the files of the commit that ``at`` names."""
    info = api.model_info(name, revision=at, files_metadata=True)
    if not info.sha or info.siblings is None or any(file.size is None for file in info.siblings):
        raise ValueError(f"{NO_HUB} (it lacks a commit, or its files): check HF_ENDPOINT; {AGAIN}")
    return info, {file.rfilename: file for file in info.siblings}


def read_repository(name: str, revision: str | None, into: Path) -> tuple[str, dict[str, File]]:
    """The commit that ``revision`` (main if ``None``) is at, and its files.

    The small ones are downloaded to a new folder of ours, and compared with the hashes that the
    Hub lists.
    """
    info, there = look_at(HfApi(), name, revision)
    small = [path for path, file in there.items() if is_small(path, file.size or 0)]
    into.mkdir()
    patterns = [glob.escape(path) for path in small]
    snapshot_download(name, revision=info.sha, local_dir=into, allow_patterns=patterns)
    here = read_folder(into)
    if wrong := [path for path in small if path not in here or not here[path].is_at(there[path])]:
        told = f"{name}: {wrong[0]} has another hash than its list of files tells"
        raise ValueError(f"{told}; {AGAIN}")
    files = {n: File(f.size or 0, f.lfs.sha256 if f.lfs else None) for n, f in there.items()}
    return str(info.sha), files | here
