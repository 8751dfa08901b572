"""What a folder or a repository of the Hub holds, read once and compared with its hashes."""

import glob
import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi, ModelInfo, snapshot_download
from huggingface_hub.hf_api import RepoFile

from .errors import during
from .layout import INDEX, SHARD, SINGLE_FILE
from .manifest import read_object

# A tokenizer.json takes 20 MB; what is larger is no small file of a model.
LARGEST_TO_READ = 100_000_000
# Only text is read: no weights, and nothing that Python or torch would unpickle.
TEXT = {"", ".jinja", ".json", ".md", ".model", ".py", ".txt"}


@dataclass(frozen=True)
class File:
    """A file of a folder or of a repository."""

    size: int
    content: bytes | None = None  # as it was hashed; None for weights and whatever is not read
    sha256: str | None = None  # or what the Hub or a manifest says; None if nobody has read it
    path: Path | None = None  # None if it is only on the Hub


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
        return read_object(self.read(path), f"{self.name}: {path}")

    def weight_names(self) -> list[str]:
        """The files of weights that the loader will look for."""
        if INDEX not in self.files:
            return [SINGLE_FILE]
        where = self.read_json(INDEX).get("weight_map")
        if not isinstance(where, dict) or not where:
            raise ValueError(f"{self.name}: {INDEX} has no weight_map: it is no index of weights")
        odd = [f for f in where.values() if not isinstance(f, str) or not re.fullmatch(SHARD, f)]
        if odd:
            told = f"{self.name}: {INDEX} names {odd[:3]} for {len(odd)} of {len(where)} tensors"
            raise ValueError(f"{told}, expected *.safetensors in one folder")
        return sorted(set(where.values()))


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_small(name: str, size: int) -> bool:
    """Whether it is read: text that is not too large."""
    return size <= LARGEST_TO_READ and PurePosixPath(name).suffix in TEXT


def read_folder(folder: Path, reads: Callable[[str, int], bool] = is_small) -> dict[str, File]:
    """Every file by its path in the folder, but for folders whose names begin with a dot.

    ``ValueError`` for a link that leads out of it, or to a folder; but links of the Hub's cache,
    from a snapshot to the blobs beside it, are followed.
    """
    root = Path(os.path.realpath(folder))
    of_cache = root.parent.name == "snapshots" and root.parents[1].name.startswith("models--")
    blobs = root.parents[1] / "blobs" if of_cache else None
    found = {}
    for where, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(where, name) for name in [*folders, *names]):
            name, end = path.relative_to(root).as_posix(), Path(os.path.realpath(path))
            inside = end.is_relative_to(root) or end.parent == blobs
            if path.is_symlink() and (end.is_dir() or not inside):
                what = "a link to a folder" if inside else "a link that leads out of the folder"
                told = f"{folder / name} is {what}, to {end}, and is not followed"
                raise ValueError(f"{told}: put a copy in its place, or take it away")
            if path.is_file() and reads(name, path.stat().st_size):
                content = path.read_bytes()
                # What was read counts, whatever has become of the file since.
                found[name] = File(len(content), content, sha256_of(content), path)
            elif path.is_file():
                found[name] = File(path.stat().st_size, path=path)
    return found


def read_tree(api: HfApi, name: str, revision: str | None) -> tuple[ModelInfo, dict[str, RepoFile]]:
    """What the Hub says of a repository, and of the files of the commit that a revision is at."""
    info = api.model_info(name, revision=revision)
    tree = tree_at(api, name, info.sha) if info.sha and info.siblings is not None else {}
    if not info.sha or info.siblings is None or (info.siblings and not tree):
        told = "the server's answer is not that of a Hub (it lacks a commit, or its files)"
        raise ValueError(f"{told}: check HF_ENDPOINT")
    return info, tree


def tree_at(api: HfApi, name: str, revision: str) -> dict[str, RepoFile]:
    entries = api.list_repo_tree(name, revision=revision, recursive=True)
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def read_repository(
    name: str, revision: str | None, into: Path, reads: Callable[[str, int], bool] = is_small
) -> tuple[str, dict[str, File]]:
    """The commit that ``revision`` (main if ``None``) is at, and its files; the small ones are
    downloaded to a new folder of ours. ``Failure`` if the Hub does not give them."""
    with during(f"looking at {name}{f'@{revision}' if revision else ''}"):
        info, tree = read_tree(HfApi(), name, revision)
    assert info.sha is not None
    download(name, info.sha, [path for path, file in tree.items() if reads(path, file.size)], into)
    files = {p: File(f.size, sha256=f.lfs.sha256 if f.lfs else None) for p, f in tree.items()}
    return info.sha, files | read_folder(into, reads)


def download(name: str, commit: str, paths: list[str], into: Path) -> None:
    """Download files to a folder of ours, and compare them with the hashes that the Hub lists."""
    with during(f"downloading from {name}@{commit}"):
        into.mkdir(exist_ok=True)
        patterns = [glob.escape(path) for path in paths]
        snapshot_download(name, revision=commit, local_dir=into, allow_patterns=patterns)
        found = HfApi().verify_repo_checksums(name, revision=commit, local_dir=into)
        wrong = [mismatch["path"] for mismatch in found.mismatches]
        if wrong := wrong + [path for path in paths if path in found.missing_paths]:
            raise ValueError(f"{wrong[0]} has another hash than its list of files tells")
