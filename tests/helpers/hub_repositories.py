"""Repositories in memory, as git and LFS have them; ``local_hub`` serves them."""

import hashlib
from dataclasses import dataclass, field
from fnmatch import fnmatch

LFS_PATTERNS = ("*.safetensors", "*.bin", "*.model", "*.pt", "*.zip")
LFS_THRESHOLD = 10_000_000  # the Hub sends larger files to LFS whatever they are called
GITATTRIBUTES = "".join(f"{p} filter=lfs diff=lfs merge=lfs -text\n" for p in LFS_PATTERNS).encode()


@dataclass(frozen=True)
class Sparse:
    """A file of which only size, hash and the first bytes exist."""

    size: int
    sha256: str
    head: bytes = b""


@dataclass(frozen=True)
class File:
    """A file in a tree: its content, and whether git holds that or a pointer to LFS."""

    content: bytes | Sparse
    lfs: bool

    @property
    def size(self) -> int:
        return self.content.size if isinstance(self.content, Sparse) else len(self.content)

    @property
    def sha256(self) -> str:
        if isinstance(self.content, Sparse):
            return self.content.sha256
        return hashlib.sha256(self.content).hexdigest()

    @property
    def pointer(self) -> bytes:
        lines = ("version https://git-lfs.github.com/spec/v1", f"oid sha256:{self.sha256}")
        return "\n".join([*lines, f"size {self.size}\n"]).encode()

    @property
    def oid(self) -> str:
        """git's name of the blob."""
        blob = self.pointer if self.lfs else self.content
        return hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest()

    @property
    def xet_hash(self) -> str:
        return hashlib.sha256(b"xet" + self.sha256.encode()).hexdigest()

    def part(self, start: int, end: int) -> bytes:
        if isinstance(self.content, Sparse):
            if end > len(self.content.head):
                raise AssertionError(f"bytes {start}-{end} were read of a file that has none")
            return self.content.head[start:end]
        return self.content[start:end]


class Refusal(Exception):
    """An answer that is no success; ``code`` is the Hub's ``X-Error-Code``."""

    def __init__(self, status: int, message: str, code: str | None = None, **more: str):
        super().__init__(message)
        self.status, self.code, self.answer = status, code, {"error": message} | more


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: str | None
    title: str
    files: dict[str, File]


@dataclass
class Repository:
    """Commits, the references to them, and the LFS objects that a commit may point at."""

    name: str
    private: bool = False
    region: str = "us"
    has_xet: bool = True  # older LFS files of the Hub have no xet hash
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    objects: dict[str, bytes | Sparse] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.add_commit("refs/heads/main", {".gitattributes": GITATTRIBUTES}, "initial commit")

    @property
    def head(self) -> str:
        return self.refs["refs/heads/main"]

    @property
    def files(self) -> dict[str, File]:
        return self.commits[self.head].files

    @property
    def tags(self) -> dict[str, str]:
        return self.named("refs/tags/")

    @property
    def pull_requests(self) -> dict[str, str]:
        return self.named("refs/pr/")

    def named(self, prefix: str) -> dict[str, str]:
        """The references of a kind, by their short names."""
        found = {ref: oid for ref, oid in self.refs.items() if ref.startswith(prefix)}
        return {ref.removeprefix(prefix): oid for ref, oid in found.items()}

    def commit_of(self, revision: str) -> Commit:
        for name in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
            if (oid := self.refs.get(name, name)) in self.commits:
                return self.commits[oid]
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def add_commit(
        self, ref: str, changes: dict[str, bytes | Sparse | File | None], title: str, base=None
    ) -> str:
        """Commit on top of ``base`` (the reference itself); ``None`` deletes a file."""
        parent = base or self.refs.get(ref)
        files = dict(self.commits[parent].files) if parent else {}
        for path, content in changes.items():
            if content is None:
                del files[path]
                continue
            if not isinstance(content, File):
                content = File(content, is_lfs(path, content))
            if content.lfs:
                self.objects[content.sha256] = content.content
            files[path] = content
        listing = [f"{path} {file.oid}" for path, file in sorted(files.items())]
        # The number keeps two commits of the same tree apart, as the date does in git.
        text = "\n".join([f"{parent} {len(self.commits)} {title}", *listing])
        oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits[oid] = Commit(oid, parent, title, files)
        self.refs[ref] = oid
        return oid


def is_lfs(path: str, content: bytes | Sparse) -> bool:
    size = content.size if isinstance(content, Sparse) else len(content)
    return size > LFS_THRESHOLD or any(fnmatch(path, pattern) for pattern in LFS_PATTERNS)
