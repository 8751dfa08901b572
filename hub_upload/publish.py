"""Brings a built folder to the Hub; the only file here that writes there.

Everything is decided before anything is sent: the folder is read once, passes what `verify` checks
without running it, and is compared with the head of the destination by content. What differs goes
into one commit on that head, the commit is read back and compared, and only then tagged. So a run
that stops anywhere leaves the branch either as it was or complete, and the next one finds what has
arrived.
"""

import argparse
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    get_token,
)
from huggingface_hub import errors as hub_errors
from huggingface_hub.hf_api import CommitInfo, RepoFile
from huggingface_hub.utils.sha import git_hash
from tqdm import tqdm

from .checks import Target, refuse_what_fails
from .errors import AGAIN, Failure, during, printable
from .files import File, read_folder, read_tree, tree_at
from .layout import ID, INDEX, MANIFEST
from .load_check import shorten
from .manifest import Manifest, read_manifest

GIT_FILE = ".gitattributes"  # the Hub makes it with the repository
UNCHANGED = f"nothing was changed; {AGAIN}"
UPLOAD = "build with --weights FOLDER, to upload them, or leave them out with --code-only"
NEVER_MOVED = "People pin tags, so it is not moved: raise the version and build again"


def say(line: str) -> None:
    print(printable(line), flush=True)


def read_build(folder: Path, code_only: bool = False) -> tuple[Manifest, dict[str, File]]:
    """A built folder as build left it; weights are compared when they are sent."""
    try:
        target = Target(str(folder), read_folder(folder), code_only=code_only)
        manifest = read_manifest(target.read(MANIFEST))
    except ValueError as error:
        told = f"{folder} is no built folder ({error}): make one with `python -m hub_upload build`"
        raise Failure(told) from error
    weights = manifest.weights.files
    left_out = {*weights, INDEX} if code_only else set()
    target.files = {name: file for name, file in target.files.items() if name not in left_out}
    refuse_what_fails(target)
    if target.files["README.md"].sha256 != manifest.files.get("README.md"):
        raise Failure(f"{folder}: README.md was changed since the build: build again")
    for name in weights.keys() - left_out:
        path = target.files[name].path if name in target.files else None
        target.files[name] = File(weights[name].size, sha256=weights[name].sha256, path=path)
    return manifest, dict(sorted(target.files.items()))


def is_at(file: File, there: RepoFile | None) -> bool:
    """Whether the Hub has this content."""
    if there is None or there.size != file.size:
        return False
    if there.lfs:
        return there.lfs.sha256 == file.sha256
    return file.content is not None and there.blob_id == git_hash(file.content)


class Publication:
    """What is to be at the destination, what is there, and what happens to each file."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.repo, self.api = options, options.repo, HfApi()
        if not re.fullmatch(ID, self.repo):
            raise Failure(f"--repo {self.repo} is no id of a repository: give it as org/name")
        self.manifest, self.files = read_build(options.folder, options.code_only)
        self.weights, self.tag = self.manifest.weights, f"v{self.manifest.version}"

    def look(self) -> None:
        """Compare with the head of the destination; only reads."""
        self.head, self.tagged, self.theirs = None, None, None
        self.tree: dict[str, RepoFile] = {}
        try:
            info, self.tree = read_tree(self.api, self.repo, None)
        except hub_errors.RepositoryNotFoundError:
            # The Hub does not tell a missing repository from one that this token may not see.
            self.state = "not there for this token: to be created"
        else:
            self.head, self.tagged = info.sha, self.read_tag()
            self.state = f"{'private' if info.private else 'public'}, at {self.head}"
        if MANIFEST in self.tree:
            path = self.api.hf_hub_download(self.repo, MANIFEST, revision=self.head)
            try:
                self.theirs = read_manifest(Path(path).read_bytes(), f"{self.repo}: {MANIFEST}")
            except ValueError as error:
                told = f"{error}; is it the right repository? Delete that file there if it is"
                raise Failure(told) from error
        self.plan()

    def read_tag(self) -> str | None:
        try:
            commit = self.api.model_info(self.repo, revision=self.tag).sha
        except hub_errors.RevisionNotFoundError:
            return None
        if not commit:
            raise ValueError("the server's answer is not that of a Hub: check HF_ENDPOINT")
        return commit

    def plan(self) -> None:
        ours = set(self.theirs.names) if self.theirs else set()
        # Without a manifest of ours, a file of a name that we use is somebody's all the same.
        known = {GIT_FILE, *ours, *(self.files if self.theirs else ())}
        foreign = sorted(self.tree.keys() - known)
        if foreign and not self.options.allow_foreign:
            told = f"{len(foreign)} files that no {MANIFEST} of ours lists ({shorten(foreign, 5)})"
            cure = "--allow-foreign publishes beside them, and over those of the same name"
            raise Failure(f"{self.repo} has {told}: is it the right repository? {cure}")
        left_out = self.weights_to_leave() if self.options.code_only else set()
        self.deleted = sorted(self.tree.keys() & ours - self.files.keys() - {GIT_FILE} - left_out)
        self.kept = [name for name, file in self.files.items() if is_at(file, self.tree.get(name))]
        changed = self.files.keys() - self.kept
        self.copied = sorted(name for name in changed if self.files[name].path is None)
        self.uploaded = sorted(changed - {*self.copied})
        self.foreign = [name for name in foreign if name not in self.files]
        self.changes = bool(changed or self.deleted)
        if self.copied:
            self.require_copies()

    def weights_to_leave(self) -> set[str]:
        """With --code-only, weights there must be those of this build, or none."""
        theirs = set(self.theirs.weights.files) if self.theirs else set()
        listed = self.weights.files.items()
        same = [is_at(File(w.size, sha256=w.sha256), self.tree.get(name)) for name, w in listed]
        indexed = INDEX in self.tree or INDEX not in self.manifest.files
        if theirs & self.tree.keys() and not (all(same) and indexed):
            told = f"{self.repo} has weights, and not all of those that this {MANIFEST} lists"
            raise Failure(f"{told}: the code would not fit, so publish without --code-only")
        return theirs | {INDEX}

    def require_copies(self) -> None:
        """Raise ``Failure`` unless weights that are not in the folder are where they come from."""
        repository, revision = self.weights.repository, self.weights.revision
        assert repository, "weights that are neither here nor anywhere do not pass verify"
        try:
            found = self.api.get_paths_info(repository, self.copied, revision=revision)
        except (hub_errors.RepositoryNotFoundError, hub_errors.RevisionNotFoundError) as error:
            told = f"{repository}@{revision} is not there, or not for this token"
            raise Failure(f"{told}: no weights can be copied from there; {UPLOAD}") from error
        source = {file.path: file for file in found if isinstance(file, RepoFile)}
        if wrong := [name for name in self.copied if not is_at(self.files[name], source.get(name))]:
            told = f"{shorten(wrong)} at {repository}@{revision} is not what {MANIFEST} lists"
            raise Failure(f"{told}, so it is not copied; {UPLOAD}")

    def show(self) -> None:
        say(f"Repository {self.repo} ({self.state})")
        say(f"Version    {self.tag}{' as a pull request, without a tag' * self.options.pr}")
        rows = {"copy": self.copied, "upload": self.uploaded, "delete": self.deleted}
        rows |= {"keep": self.kept, "leave": self.foreign}
        for verb, names in rows.items():
            for name in names:
                say(f"  {verb:<7} {self.size_of([name]):>9}  {name}")
        totals = [f"{verb} {len(names)} ({self.size_of(names)})" for verb, names in rows.items()]
        say(f"Total      {', '.join(totals)}; leave: not ours")
        if self.copied:
            say(f"Weights are copied from {self.weights.repository}@{self.weights.revision}.")
        if self.repo.encode() not in (self.files["README.md"].content or b""):
            say(f"Note: README.md does not name {self.repo}; `build --name {self.repo}` would.")

    def size_of(self, names: Iterable[str]) -> str:
        sizes = [(self.files.get(name) or self.tree[name]).size for name in names]
        return tqdm.format_sizeof(sum(sizes), "B")

    def check_settings(self) -> None:
        if self.head is None and self.options.pr:
            told = f"{self.repo} is not there, or not for this token"
            raise Failure(f"{told}: nothing to open a pull request against; publish without --pr")
        if self.options.private and self.state.startswith("public"):
            raise Failure(f"{self.repo} is public: make it private in its settings first")
        if self.options.pr or self.tagged in (None, None if self.changes else self.head):
            return
        what = "this build differs from its head" if self.changes else f"its head is {self.head}"
        told = f"{self.repo} has the tag {self.tag} at {self.tagged}, but {what}"
        raise Failure(f"{told}. {NEVER_MOVED}")

    def find_pull_request(self) -> str | None:
        """The number of one that already makes the destination what is wanted."""
        with during(f"looking at the pull requests of {self.repo}", UNCHANGED):
            refs = self.api.list_repo_refs(self.repo, include_pull_requests=True).pull_requests
            numbers = [ref.ref.removeprefix("refs/pr/") for ref in refs or ()]
            return next((n for n in numbers if not self.differences(f"refs/pr/{n}")), None)

    def differences(self, revision: str) -> list[str]:
        """What at a revision is not as planned."""
        tree = tree_at(self.api, self.repo, revision)
        differing = [name for name, file in self.files.items() if not is_at(file, tree.get(name))]
        remaining = [name for name in self.deleted if name in tree]
        return [f"{name} differs" for name in differing] + [f"{n} remains" for n in remaining]

    def commit(self) -> str:
        """One commit on the head that was compared, read back and compared again."""
        copies = f"; if copying is what it refuses, {UPLOAD}" if self.copied else ""
        with during(f"publishing to {self.repo}", f"no tag was made{copies}; {AGAIN}"):
            commit = self.create_commit()
        say(f"Committed {commit.oid}{f', {commit.pr_url}' if self.options.pr else ''}")
        state = f"commit {commit.oid} is neither verified nor tagged; {AGAIN}"
        with during(f"reading back {self.repo}", state):
            wrong = self.differences(str(commit.pr_revision if self.options.pr else commit.oid))
        if wrong:
            told = f"commit {commit.oid} is not what was sent, so it is not tagged"
            cure = f"{AGAIN}; a .gitignore in the repository may keep files out"
            raise Failure(f"{told}: {shorten(wrong, 5)}; {cure}")
        say(f"Verified {len(self.files)} files.")
        return commit.oid

    def create_commit(self) -> CommitInfo:
        source: dict[str, Any] = {"src_repo_type": "model", "src_repo_id": self.weights.repository}
        source |= {"src_revision": self.weights.revision}
        operations: list = [CommitOperationCopy(name, name, **source) for name in self.copied]
        operations += self.additions()
        operations += [CommitOperationDelete(name, is_folder=False) for name in self.deleted]
        return self.api.create_commit(
            self.repo,
            operations,
            commit_message=f"glm4v-patched {self.manifest.version}",
            parent_commit=self.head,
            create_pr=self.options.pr,
        )

    def additions(self) -> list[CommitOperationAdd]:
        """Small files as they were read, weights as the manifest lists them."""
        small, large, weights = [], [], {}
        for name in self.uploaded:
            file = self.files[name]
            if file.content is not None:
                small.append(CommitOperationAdd(name, file.content))
            else:
                assert file.path, name
                weights[name] = state_of(file.path)
                large.append(CommitOperationAdd(name, file.path))
        for operation in large:
            name, found = operation.path_in_repo, operation.upload_info.sha256.hex()
            if found != self.files[name].sha256:
                told = f"{name} has sha256 {found}, but {MANIFEST} lists {self.files[name].sha256}"
                raise Failure(f"{told}: nothing was sent, build again")
        # They are read once more to be sent, and not every server compares what arrives.
        self.api.preupload_lfs_files(self.repo, large, create_pr=self.options.pr)
        if changed := [n for n, state in weights.items() if state_of(self.files[n].path) != state]:
            told = f"{shorten(changed)} changed while it was sent: nothing was committed"
            raise Failure(f"{told}; build again, and let nothing write to the folder meanwhile")
        return small + large

    def create_tag(self, commit: str) -> None:
        state = f"commit {commit} is complete, and may lack its tag; {AGAIN}"
        with during(f"tagging {self.repo}", state):
            self.api.create_tag(self.repo, tag=self.tag, revision=commit)
            tagged = self.read_tag()
        if tagged != commit:
            found = f"it is at {tagged}, made by somebody else meanwhile. {NEVER_MOVED}"
            found = found if tagged else f"it is not there; {state}"
            raise Failure(f"the tag {self.tag} should be at {commit} of {self.repo}, but {found}")
        say(f"Tagged {self.tag}.")


def state_of(path: Path | None) -> tuple[int, ...]:
    """Another one whenever the file was written to, or another took its place."""
    found = os.stat(str(path))
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def publish(options: argparse.Namespace) -> None:
    """Compare, show, and with ``--push`` do it."""
    it = Publication(options)
    if options.push and not get_token():
        raise Failure("no token: log in with `hf auth login`, or set HF_TOKEN")
    with during(f"looking at {it.repo}", UNCHANGED):
        it.look()
    it.show()
    it.check_settings()
    if not options.push:
        say("Dry run: nothing was sent. Add --push to do this.")
        return
    if it.head is None:
        with during(f"creating {it.repo}", f"no file was sent; {AGAIN}"):
            # Without --private, as the organisation has it.
            it.api.create_repo(it.repo, private=options.private or None)
            it.look()
    commit = it.head
    if not it.changes:
        say(f"{it.repo} has all of this already, at {it.head}.")
    elif options.pr and (number := it.find_pull_request()):
        say(f"Pull request {number} has all of this already; if it was closed, reopen it.")
    else:
        commit = it.commit()
    if commit and not options.pr and it.tagged is None:
        it.create_tag(commit)
