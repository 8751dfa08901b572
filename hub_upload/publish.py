"""Publish a built folder on the Hub; no other file writes to the Hub.

A complete plan is made before anything is sent: the folder is read once, must pass `verify`, and is
compared by content with the head of the destination's branch. All differences go into one commit on
this head. The commit is read back and compared, and tagged only if it equals the build. If a run is
interrupted, the branch is either unchanged or complete, and the next run continues.
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

from glm4v_patched.terminal_text import (
    format_bytes,
    listed,
    pluralize,
    printable,
    show_progress,
    write_line,
)

from .checks import GIT_FILES, refuse_failed, require_that
from .files import BuiltFiles, File, read_folder
from .hub import RETRY_HINT, has_same_content, list_repository
from .manifest import ID_PATTERN, MANIFEST, parse_manifest
from .verify import check_build

GIT_FILE = ".gitattributes"  # the Hub creates this file with the repository
UPLOAD_CURE = "build with --weights FOLDER, to upload the weights"
TAG_CURE = "Users pin tags, so the tag is not moved: raise the version and build again"


def print_line(line: str) -> None:
    """Print a line at once, without control characters."""
    write_line(printable(line))


def read_built_folder(folder: Path) -> BuiltFiles:
    """Read a built folder, and raise ``ValueError`` if it does not pass verify.

    The sha256 of weights is compared only when the weights are sent.
    """
    files = read_folder(folder, hidden=True)
    build = BuiltFiles(str(folder), {n: file for n, file in files.items() if n not in GIT_FILES})
    refuse_failed(build.name, check_build(build, [sys.executable]))
    for name, entry in build.weights.items():
        path = files[name].path if name in files else None
        build.files[name] = File(entry.size, entry.sha256, path=path)
    build.files = dict(sorted(build.files.items()))
    return build


class Publication:
    """The plan of a publication: the build, the destination's files, and the action for each file.

    Args:
        repo: Id of the destination.
        allow_foreign: Whether files at the destination that no build wrote are accepted.

    Attributes:
        head: Commit of the destination that the plan changes.
        tagged: Commit that has this version's tag; None if there is no such tag.
        foreign: Files at the destination that no build wrote and that stay as they are.
        copied, uploaded, deleted: Names of files by action; the Hub copies weights itself.
        changes: Whether the plan changes any file.
        copies: The Hub's operations for ``copied``.
    """

    def __init__(self, folder: Path, repo: str, allow_foreign: bool) -> None:
        self.repo, self.allow_foreign, self.api = repo, allow_foreign, HfApi()
        require_that(
            re.fullmatch(ID_PATTERN, repo),
            f"--repo {repo} is not the id of a repository: expected org/name",
        )
        self.build = read_built_folder(folder)
        self.files, self.tag = self.build.files, f"v{self.build.manifest.version}"
        self.compare()

    def compare(self) -> None:
        """Compare the build with the head of the destination, and make the plan; send nothing."""
        # The Hub answers alike for missing repositories and for those that the token cannot access.
        require_that(
            self.api.repo_exists(self.repo),
            f"{self.repo} does not exist, or this token has no access to it: create it with `hf "
            f"repo create {self.repo}` (and --private), or log in with `hf auth login`",
        )
        info, self.remote_files = list_repository(self.api, self.repo, None)
        self.head, self.tagged = str(info.sha), self.read_tag()
        # Without our manifest, all of the destination's files are foreign, whatever their names.
        ours: set[str] = set()
        if MANIFEST in self.remote_files:
            path = self.api.hf_hub_download(self.repo, MANIFEST, revision=self.head)
            published = parse_manifest(Path(path).read_bytes(), f"{self.repo}: {MANIFEST}")
            ours = published.names | self.files.keys()
        foreign = sorted(self.remote_files.keys() - ours - {GIT_FILE})
        if foreign and not self.allow_foreign:
            raise ValueError(
                f"{self.repo} has {len(foreign)} files that no {MANIFEST} of ours lists "
                f"({listed(foreign, 5)}). If it is the right repository, --allow-foreign publishes "
                "beside them, and over those with the same names"
            )
        self.foreign = [name for name in foreign if name not in self.files]
        changed = self.differing(self.remote_files)
        self.copied = [name for name in changed if self.files[name].path is None]
        self.uploaded = [name for name in changed if self.files[name].path]
        self.deleted = sorted(self.remote_files.keys() & ours - self.files.keys())
        self.changes = bool(changed or self.deleted)
        self.copies = self.require_copies() if self.copied else []

    def read_tag(self) -> str | None:
        """Return the commit that this version's tag is on, or None if there is no such tag."""
        exists = self.api.revision_exists(self.repo, self.tag)
        return list_repository(self.api, self.repo, self.tag)[0].sha if exists else None

    def differing(self, remote: dict[str, RepoSibling]) -> list[str]:
        """Return the names of the build's files that ``remote`` lacks or has with other content."""
        return [
            name
            for name, file in self.files.items()
            if not has_same_content(remote.get(name), file)
        ]

    def require_copies(self) -> list[CommitOperationCopy]:
        """Return the operations by which the Hub copies weights from their origin.

        Raises ``ValueError`` if the origin's weights are not those that the manifest lists.
        """
        origin = self.build.origin
        assert origin, "verify refuses weights that are neither in the folder nor have an origin"
        repo, commit = origin.repository, origin.revision
        _, source = list_repository(self.api, repo, commit)
        if wrong := [
            name for name in self.copied if not has_same_content(source.get(name), self.files[name])
        ]:
            raise ValueError(
                f"{listed(wrong)} at {origin} differs from {MANIFEST}, so it is not copied; "
                f"{UPLOAD_CURE}"
            )
        return [CommitOperationCopy(name, name, commit, repo, "model") for name in self.copied]

    def show(self) -> None:
        """Print the plan: the action for each file, and totals."""

        def size_of(*names: str) -> str:
            files = (self.files.get(name) or self.remote_files[name] for name in names)
            return format_bytes(sum(file.size or 0 for file in files))

        print_line(f"Repository {self.repo} at {self.head}, version {self.tag}")
        actions = {"copy": self.copied, "upload": self.uploaded, "delete": self.deleted}
        actions["keep"] = sorted(self.files.keys() - {*self.copied, *self.uploaded})
        actions["leave"] = self.foreign
        for verb, names in actions.items():
            for name in names:
                print_line(f"  {verb:<7} {size_of(name):>9}  {name}")
        totals = [f"{verb} {len(names)} ({size_of(*names)})" for verb, names in actions.items()]
        print_line(f"Total      {', '.join(totals)}; leave: not ours")
        if self.copied:
            print_line(
                f"Weights are copied from {self.build.origin}. If the Hub refuses, {UPLOAD_CURE}."
            )

    def require_tag(self) -> None:
        """Raise ``ValueError`` if the tag exists on another commit than this build's."""
        if self.tagged not in (None, None if self.changes else self.head):
            relation = "this build differs from" if self.changes else "has this build"
            raise ValueError(
                f"{self.repo} has the tag {self.tag} on {self.tagged}, but its head is "
                f"{self.head}, which {relation}. {TAG_CURE}"
            )

    def commit(self) -> str:
        """Commit on the head that :meth:`compare` read, verify the commit, and return its id."""
        commit = self.api.create_commit(
            self.repo,
            [*self.copies, *self.additions(), *map(CommitOperationDelete, self.deleted)],
            commit_message=f"glm4v-patched {self.build.manifest.version}",
            parent_commit=self.head,
        )
        print_line(f"Committed {commit.oid}")
        _, remote = list_repository(self.api, self.repo, commit.oid)
        if wrong := [*self.differing(remote), *(name for name in self.deleted if name in remote)]:
            raise ValueError(
                f"commit {commit.oid} differs from what was sent in {listed(wrong, 5)}, so it is "
                f"not tagged; {RETRY_HINT}. A .gitignore in the repository may exclude files"
            )
        print_line(f"Verified {len(self.files)} files.")
        return commit.oid

    def additions(self) -> list[CommitOperationAdd]:
        """Return the operations that add files, after uploading the weights.

        Raises ``ValueError`` if weights differ from the manifest, or change during the upload.
        """
        files = {name: self.files[name] for name in self.uploaded}
        paths = {n: f.path for n, f in files.items() if f.content is None and f.path}
        before = {name: file_state(path) for name, path in paths.items()}
        added = []
        with show_progress("hashing", total=len(files), unit="file") as progress:
            for name, file in files.items():
                added.append(CommitOperationAdd(name, paths.get(name) or file.content or b""))
                progress.update()
        for addition in added:
            name, digest = addition.path_in_repo, addition.upload_info.sha256.hex()
            if digest != files[name].sha256:
                raise ValueError(
                    f"{name} has sha256 {digest}, but {MANIFEST} lists {files[name].sha256}: "
                    "nothing was sent, build again"
                )
        # Uploading reads the weights again, and not every server checks their sha256.
        with show_progress(f"uploading {pluralize(len(added), 'file')}"):
            self.api.preupload_lfs_files(self.repo, added)
        if changed := [name for name in paths if file_state(paths[name]) != before[name]]:
            raise ValueError(
                f"{listed(changed)} changed during the upload, so nothing was committed: build "
                "again, and make sure that nothing writes to the folder meanwhile"
            )
        return added

    def create_tag(self, commit: str) -> None:
        """Tag a commit with the build's version."""
        self.api.create_tag(self.repo, tag=self.tag, revision=commit)
        if (tagged := self.read_tag()) != commit:
            raise ValueError(
                f"the tag {self.tag} should be on {self.repo}@{commit}, but somebody else has "
                f"created it on {tagged} meanwhile. {TAG_CURE}"
            )
        print_line(f"Tagged {self.tag}.")


def file_state(path: Path) -> tuple[int, ...]:
    """Return values that change when the file is written to or replaced."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def publish(options: argparse.Namespace) -> None:
    """Print the plan of a publication and, with ``--push``, carry it out."""
    require_that(
        get_token() or not options.push, "no token: log in with `hf auth login`, or set HF_TOKEN"
    )
    publication = Publication(options.folder, options.repo, options.allow_foreign)
    publication.show()
    publication.require_tag()
    if not options.push:
        print_line("Dry run: nothing was sent. Add --push to publish.")
        return
    if not publication.changes:
        print_line(f"{publication.repo} has all of this already, at {publication.head}.")
    commit = publication.commit() if publication.changes else publication.head
    if publication.tagged is None:
        publication.create_tag(commit)
