"""Brings a built folder to the Hub; the only file here that writes there.

Everything is decided before anything is sent: the folder is read once, passes `verify`, and is
compared with the head of the destination by content. What differs goes into one commit on that
head, the commit is read back and compared, and only then tagged. So a run that stops anywhere
leaves the branch either as it was or complete, and the next one finds what has arrived.
"""

import argparse
import re
import sys
from pathlib import Path

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    get_token,
)
from huggingface_hub.hf_api import RepoSibling

from glm4v_patched.terminal_text import format_bytes, listed, printable

from .checks import OF_GIT, refuse_failed, require
from .files import Build, File, read_folder
from .hub import AGAIN, is_at, look_at
from .layout import ID, MANIFEST
from .manifest import read_manifest
from .verify import check_build

GIT_FILE = ".gitattributes"  # the Hub makes it with the repository
UPLOAD = "build with --weights FOLDER, to upload them"
NEVER_MOVED = "People pin tags, so it is not moved: raise the version and build again"


def say(line: str) -> None:
    print(printable(line), flush=True)


def read_build(folder: Path) -> Build:
    """A built folder as build left it; weights are compared when they are sent."""
    files = read_folder(folder, hidden=True)
    build = Build(str(folder), {n: file for n, file in files.items() if n not in OF_GIT})
    refuse_failed(build.name, check_build(build, [sys.executable]))
    for name, given in build.weights.items():
        path = files[name].path if name in files else None
        build.files[name] = File(given.size, given.sha256, path=path)
    build.files = dict(sorted(build.files.items()))
    return build


class Publication:
    """What is to be at the destination, what is there, and what happens to each file."""

    def __init__(self, folder: Path, repo: str, allow_foreign: bool) -> None:
        self.repo, self.allow_foreign, self.api = repo, allow_foreign, HfApi()
        require(
            re.fullmatch(ID, repo), f"--repo {repo} is no id of a repository: give it as org/name"
        )
        self.build = read_build(folder)
        self.files, self.tag = self.build.files, f"v{self.build.manifest.version}"
        self.look()

    def look(self) -> None:
        """Compare with the head of the destination, and plan; only reads."""
        # The Hub does not tell a missing repository from one that this token may not see.
        require(
            self.api.repo_exists(self.repo),
            f"{self.repo} is not there, or not for this token: make it with `hf repo create "
            f"{self.repo}` (and --private), or log in with `hf auth login`",
        )
        info, self.there = look_at(self.api, self.repo, None)
        self.head, self.tagged = str(info.sha), self.read_tag()
        # Without a manifest of ours, a file of a name that we use is somebody's all the same.
        ours: set[str] = set()
        if MANIFEST in self.there:
            path = self.api.hf_hub_download(self.repo, MANIFEST, revision=self.head)
            theirs = read_manifest(Path(path).read_bytes(), f"{self.repo}: {MANIFEST}")
            ours = theirs.names | self.files.keys()
        foreign = sorted(self.there.keys() - ours - {GIT_FILE})
        if foreign and not self.allow_foreign:
            told = f"{len(foreign)} files that no {MANIFEST} of ours lists ({listed(foreign, 5)})"
            cure = "--allow-foreign publishes beside them, and over those of the same name"
            raise ValueError(f"{self.repo} has {told}: is it the right repository? {cure}")
        self.foreign = [name for name in foreign if name not in self.files]
        changed = self.lacking(self.there)
        self.copied = [name for name in changed if self.files[name].path is None]
        self.uploaded = [name for name in changed if self.files[name].path]
        self.deleted = sorted(self.there.keys() & ours - self.files.keys())
        self.changes = bool(changed or self.deleted)
        self.copies = self.require_copies() if self.copied else []

    def read_tag(self) -> str | None:
        there = self.api.revision_exists(self.repo, self.tag)
        return look_at(self.api, self.repo, self.tag)[0].sha if there else None

    def lacking(self, there: dict[str, RepoSibling]) -> list[str]:
        """Files that are not there as planned."""
        return [name for name, file in self.files.items() if not is_at(there.get(name), file)]

    def require_copies(self) -> list[CommitOperationCopy]:
        """Of weights that the Hub itself copies; ``ValueError`` unless they are where they come
        from."""
        origin = self.build.origin
        assert origin, "weights that are neither here nor anywhere do not pass verify"
        repo, commit = origin.repository, origin.revision
        _, source = look_at(self.api, repo, commit)
        if wrong := [name for name in self.copied if not is_at(source.get(name), self.files[name])]:
            told = f"{listed(wrong)} at {origin} is not what {MANIFEST} lists"
            raise ValueError(f"{told}, so it is not copied; {UPLOAD}")
        return [CommitOperationCopy(name, name, commit, repo, "model") for name in self.copied]

    def show(self) -> None:
        def size_of(*names: str) -> str:
            files = (self.files.get(name) or self.there[name] for name in names)
            return format_bytes(sum(file.size or 0 for file in files))

        say(f"Repository {self.repo} at {self.head}, version {self.tag}")
        rows = {"copy": self.copied, "upload": self.uploaded, "delete": self.deleted}
        rows["keep"] = sorted(self.files.keys() - {*self.copied, *self.uploaded})
        rows["leave"] = self.foreign
        for verb, names in rows.items():
            for name in names:
                say(f"  {verb:<7} {size_of(name):>9}  {name}")
        totals = [f"{verb} {len(names)} ({size_of(*names)})" for verb, names in rows.items()]
        say(f"Total      {', '.join(totals)}; leave: not ours")
        if self.copied:
            say(f"Weights are copied from {self.build.origin}. If the Hub refuses, {UPLOAD}.")

    def require_tag(self) -> None:
        """Raise ``ValueError`` if the tag is there, and not on what is to be published."""
        if self.tagged not in (None, None if self.changes else self.head):
            head = f"{self.head}, which this build {'differs from' if self.changes else 'is at'}"
            told = f"{self.repo} has the tag {self.tag} at {self.tagged}, but its head is {head}"
            raise ValueError(f"{told}. {NEVER_MOVED}")

    def commit(self) -> str:
        """One commit on the head that was compared, read back and compared again."""
        commit = self.api.create_commit(
            self.repo,
            [*self.copies, *self.additions(), *map(CommitOperationDelete, self.deleted)],
            commit_message=f"glm4v-patched {self.build.manifest.version}",
            parent_commit=self.head,
        )
        say(f"Committed {commit.oid}")
        _, there = look_at(self.api, self.repo, commit.oid)
        if wrong := [*self.lacking(there), *(name for name in self.deleted if name in there)]:
            told = f"commit {commit.oid} is not what was sent, so it is not tagged"
            cure = f"{AGAIN}; a .gitignore in the repository may keep files out"
            raise ValueError(f"{told}: {listed(wrong, 5)} differs; {cure}")
        say(f"Verified {len(self.files)} files.")
        return commit.oid

    def additions(self) -> list[CommitOperationAdd]:
        """Small files as they were read, weights as the manifest lists them."""
        files = {name: self.files[name] for name in self.uploaded}
        paths = {n: f.path for n, f in files.items() if f.content is None and f.path}
        before = {name: state_of(path) for name, path in paths.items()}
        added = [CommitOperationAdd(n, paths.get(n) or f.content or b"") for n, f in files.items()]
        for addition in added:
            name, found = addition.path_in_repo, addition.upload_info.sha256.hex()
            if found != files[name].sha256:
                told = f"{name} has sha256 {found}, but {MANIFEST} lists {files[name].sha256}"
                raise ValueError(f"{told}: nothing was sent, build again")
        # Weights are read once more to be sent, and not every server compares what arrives.
        self.api.preupload_lfs_files(self.repo, added)
        if changed := [name for name in paths if state_of(paths[name]) != before[name]]:
            told = f"{listed(changed)} changed while it was sent: nothing was committed"
            raise ValueError(f"{told}; build again, and let nothing write to the folder meanwhile")
        return added

    def create_tag(self, commit: str) -> None:
        self.api.create_tag(self.repo, tag=self.tag, revision=commit)
        if (tagged := self.read_tag()) != commit:
            told = f"the tag {self.tag} should be at {self.repo}@{commit}, but it is at {tagged}"
            raise ValueError(f"{told}, made by somebody else meanwhile. {NEVER_MOVED}")
        say(f"Tagged {self.tag}.")


def state_of(path: Path) -> tuple[int, ...]:
    """Another one whenever the file was written to, or another took its place."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def publish(options: argparse.Namespace) -> None:
    """Compare, show, and with ``--push`` do it."""
    require(
        get_token() or not options.push, "no token: log in with `hf auth login`, or set HF_TOKEN"
    )
    it = Publication(options.folder, options.repo, options.allow_foreign)
    it.show()
    it.require_tag()
    if not options.push:
        say("Dry run: nothing was sent. Add --push to do this.")
        return
    if not it.changes:
        say(f"{it.repo} has all of this already, at {it.head}.")
    commit = it.commit() if it.changes else it.head
    if it.tagged is None:
        it.create_tag(commit)
