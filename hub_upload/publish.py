"""Brings a built folder to the Hub; the only file here that writes there.

Everything is decided before anything is sent: the folder is read once, passes what `verify` checks
without running it, and is compared with the head of the destination by content. What differs goes
into one commit on that head, the commit is read back and compared, and only then tagged. So a run
that stops anywhere leaves the branch either as it was or complete, and the next one finds what has
arrived.
"""

import argparse
import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import huggingface_hub
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    get_token,
    hf_hub_url,
)
from huggingface_hub.errors import (
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff
from huggingface_hub.utils.sha import git_hash

from .faults import (
    Failure,
    NotOfAHub,
    commit_of,
    during,
    printable,
    server_message,
    status_of,
    without_secrets,
)
from .files import ID, INDEX, MANIFEST, files_in, read_manifest
from .verify import Target, check_files, read_folder

GIT_FILE = ".gitattributes"  # the Hub makes it with the repository
COPIES_ACROSS = "src_repo_id" in CommitOperationCopy.__dataclass_fields__
COPIES_SINCE = "1.33"
GO_ON = "run the same command again: it finds what has arrived and does the rest"

Say = Callable[[str], None]
_during = partial(during, writing=True)


class PublishError(Failure):
    """Why it cannot be published, and what to do about it."""


class CopyRefused(Failure):
    """The server does not copy the weights itself; the message says why."""


@dataclass(frozen=True)
class Wanted:
    """A file that the destination is to have.

    Attributes:
        content: All of it, as it was hashed, and as it is sent; None for weights.
        path: Where weights are; None if they are only on the Hub.
    """

    size: int
    sha256: str
    content: bytes | None = None
    path: Path | None = None

    @property
    def is_here(self) -> bool:
        return self.content is not None or self.path is not None

    def is_at(self, there: RepoFile | None) -> bool:
        if there is None or there.size != self.size:
            return False
        if there.lfs:
            return there.lfs.sha256 == self.sha256
        content = self.content
        if content is None and self.path is not None:  # weights so small that they are in git
            content = self.path.read_bytes()
            if hashlib.sha256(content).hexdigest() != self.sha256:  # changed since the build
                return False
        return content is not None and there.blob_id == git_hash(content)


@dataclass(frozen=True)
class Build:
    """What ``python -m hub_upload build`` made: its manifest and the files to publish."""

    manifest: dict
    files: dict[str, Wanted]

    @property
    def tag(self) -> str:
        return f"v{self.manifest['version']}"

    @property
    def weights(self) -> dict[str, dict]:
        return self.manifest["weights"]["files"]

    @property
    def source(self) -> tuple[str, str] | None:
        """Repository and commit that the weights can be copied from."""
        weights = self.manifest["weights"]
        return (weights["repository"], weights["revision"]) if weights["repository"] else None


@dataclass(frozen=True)
class Destination:
    """The repository as it is; ``head`` is ``None`` if there is none."""

    head: str | None = None
    private: bool = False
    files: dict[str, RepoFile] | None = None
    manifest: bytes | None = None
    tagged: str | None = None


@dataclass(frozen=True)
class Plan:
    """What happens to each file."""

    copied: list[str]
    uploaded: list[str]
    deleted: list[str]
    kept: list[str]
    foreign: list[str]
    why_uploaded: str | None  # why weights that are on the Hub are not copied there

    @property
    def changes(self) -> bool:
        return bool(self.copied or self.uploaded or self.deleted)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder that build made")
    parser.add_argument(
        "--repo", required=True, metavar="ORG/NAME", help="repository to publish to"
    )
    parser.add_argument(
        "--push", action="store_true", help="do it; without, only show what would be done"
    )
    parser.add_argument(
        "--private", action="store_true", help="create the repository as a private one"
    )
    parser.add_argument("--pr", action="store_true", help="open a pull request; nothing is tagged")
    parser.add_argument(
        "--code-only", action="store_true", help="leave weights out, for auto_maps to point at"
    )
    parser.add_argument(
        "--allow-foreign",
        action="store_true",
        help="publish beside (and over) files that no build of ours put there",
    )


def run(options: argparse.Namespace) -> int:
    """The command; the token comes from ``HF_TOKEN`` or ``hf auth login``, never from arguments."""
    publish(options, HfApi(), lambda line: print(printable(line), flush=True))
    return 0


def publish(options: argparse.Namespace, api: HfApi, say: Say) -> None:
    """Compare, show, and with ``--push`` do it.

    Raises:
        Failure: whatever goes wrong outside of this program.
    """
    repo = options.repo
    if not re.fullmatch(ID, repo):
        raise PublishError(f"--repo {repo} is no id of a repository: give it as org/name")
    build = read_build(options.folder, options.code_only)
    if options.push and not (api.token or get_token()):
        raise PublishError("no token: log in with `hf auth login`, or set HF_TOKEN")
    with _during(f"looking at {repo}", f"nothing was changed; {GO_ON}"):
        destination = look(api, repo, build.tag)
        _check_destination(destination, options)
        plan = make_plan(api, build, destination, options)
    _show(plan, build, destination, options, say)
    if not options.pr:
        _check_tag(plan, build, destination, repo)
    if not options.push:
        say("Dry run: nothing was sent. Add --push to do this.")
        return
    if destination.head is None:
        with _during(f"creating {repo}", f"no file was sent; {GO_ON}"):
            # Without --private, as the organisation has it.
            api.create_repo(repo, private=options.private or None)
            destination = look(api, repo, build.tag)
            plan = make_plan(api, build, destination, options)
    if not plan.changes:
        say(f"{repo} has all of this already, at {destination.head}.")
        commit = destination.head
    elif options.pr and (number := _find_pull_request(api, repo, build, plan)):
        say(f"Pull request {number} has all of this already; if it was closed, reopen it.")
        return
    else:
        commit = _commit(api, build, destination, plan, options, say)
    if not options.pr and destination.tagged is None:
        with _during(f"tagging {repo}", f"commit {commit} is complete, but has no tag; {GO_ON}"):
            api.create_tag(repo, tag=build.tag, revision=commit)
        with _during(f"reading back the tag of {repo}", f"commit {commit} is complete; {GO_ON}"):
            tagged = _tagged(api, repo, build.tag)
        if tagged != commit:
            raise PublishError(_not_tagged(repo, build.tag, commit, tagged))
        say(f"Tagged {build.tag}.")


def read_build(folder: Path, code_only: bool = False) -> Build:
    """Read a built folder, and see that it is as build left it (weights: when they are sent)."""
    try:
        here = read_folder(folder)
        if MANIFEST not in here.contents:
            raise ValueError(f"{MANIFEST} is missing")
        manifest = read_manifest(here.contents[MANIFEST])
    except ValueError as error:
        raise PublishError(
            f"{folder} is no built folder ({error}): make one with `python -m hub_upload build`"
        ) from error
    listed = manifest["code"] | manifest["files"]
    weights = manifest["weights"]["files"]
    files, wrong = {}, [f"{name}: missing" for name in sorted(listed.keys() - here.sizes.keys())]
    for name, size in sorted(here.sizes.items()):
        if name in weights:
            files[name] = Wanted(size, weights[name]["sha256"], path=folder / name)
            if size != weights[name]["size"]:
                wrong.append(f"{name}: {size} bytes, not {weights[name]['size']}")
        elif name not in listed and name != MANIFEST:
            wrong.append(f"{name}: not from the build")
        else:
            content = here.contents.get(name, b"")  # none is too large to be read
            files[name] = Wanted(size, hashlib.sha256(content).hexdigest(), content)
            if name in listed and files[name].sha256 != listed[name]:
                wrong.append(f"{name}: changed since the build")
    if wrong:
        raise PublishError(
            f"{folder} is not what its {MANIFEST} lists: {'; '.join(wrong)}. Build it again"
        )
    _check(here, weights, code_only)
    for name, file in weights.items():
        files.setdefault(name, Wanted(file["size"], file["sha256"]))
    if code_only:
        files = {name: file for name, file in files.items() if not _is_weight(name, weights)}
    return Build(manifest, dict(sorted(files.items())))


def _check(here: Target, weights: Collection[str], code_only: bool) -> None:
    """What ``verify`` finds without running anything, in the very bytes that are sent."""
    if code_only:
        here.code_only = True
        here.sizes = {n: size for n, size in here.sizes.items() if not _is_weight(n, weights)}
    checks = check_files(here)
    failed = [f"{name}: {c.detail}" for name, c in checks.done.items() if checks.failed(name)]
    if failed:
        raise PublishError(
            f"{here.name} does not pass `python -m hub_upload verify`: {'; '.join(failed)}"
        )


def _is_weight(name: str, weights: Collection[str]) -> bool:
    return name in weights or name == INDEX


def look(api: HfApi, repo: str, tag: str) -> Destination:
    """Read the head of the destination; only GETs are sent."""
    try:
        info = api.repo_info(repo)
    except RepositoryNotFoundError:
        return Destination(files={})
    files = _tree(api, repo, commit_of(info))
    if info.siblings and not files:
        raise NotOfAHub(f"no tree of a repository with {len(info.siblings)} files")
    manifest = None
    if MANIFEST in files:
        # Not hf_hub_download: nothing to be gained from a copy on this disk.
        url = hf_hub_url(repo, MANIFEST, revision=info.sha, endpoint=api.endpoint)
        answer = http_backoff("GET", url, headers=build_hf_headers(token=api.token))
        hf_raise_for_status(answer)
        manifest = answer.content
    return Destination(info.sha, bool(info.private), files, manifest, _tagged(api, repo, tag))


def _tagged(api: HfApi, repo: str, tag: str) -> str | None:
    """The commit that a tag is at; ``None`` without the tag."""
    try:
        return commit_of(api.repo_info(repo, revision=tag))
    except RevisionNotFoundError:
        return None


def _not_tagged(repo: str, tag: str, commit: str, tagged: str | None) -> str:
    said = f"the server answered that {repo} has the tag {tag} now, at commit {commit}"
    if tagged is None:
        return f"{said}, but it is not there; the commit is complete, {GO_ON}"
    return (
        f"{said}, but it is at {tagged}: somebody else made it at the same moment. People pin "
        "tags, so it is not moved: raise the version of glm4v-patched and build again"
    )


def _tree(api: HfApi, repo: str, revision: str) -> dict[str, RepoFile]:
    entries = api.list_repo_tree(repo, revision=revision, recursive=True)
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def make_plan(
    api: HfApi, build: Build, destination: Destination, options: argparse.Namespace
) -> Plan:
    """Decide what happens to each file here and there."""
    there = destination.files
    ours, our_weights = _files_of(destination.manifest)
    foreign = sorted(
        name
        for name in there.keys() - ours - {GIT_FILE}
        # Without a manifest of ours, a file of a name that we use is somebody's all the same.
        if destination.manifest is None or name not in build.files
    )
    if foreign and not options.allow_foreign:
        raise PublishError(
            f"{options.repo} has {len(foreign)} files that no {MANIFEST} of ours lists "
            f"({', '.join(foreign[:5])}{', ...' if len(foreign) > 5 else ''}): is it the right "
            "repository? --allow-foreign publishes beside them, and over those of the same name"
        )
    deleted = sorted(
        name
        for name in there.keys() & ours - build.files.keys() - {GIT_FILE}
        if not (options.code_only and _is_weight(name, our_weights))
    )
    beside_weights = options.code_only and our_weights & there.keys()
    whole = all(
        Wanted(file["size"], file["sha256"]).is_at(there.get(name))
        for name, file in build.weights.items()
    ) and (INDEX in there or INDEX not in build.manifest["files"])
    if beside_weights and not whole:
        raise PublishError(
            f"{options.repo} has weights, and not all of those that {MANIFEST} of this build lists "
            "and no others: publish without --code-only, or the code would stand beside other "
            "weights"
        )
    kept = [name for name, file in build.files.items() if file.is_at(there.get(name))]
    changed = [name for name in build.files if name not in kept]
    weights = [name for name in changed if name in build.weights]
    why_not = _why_not_copied(api, build, weights)
    copied = [] if why_not else weights
    missing = [name for name in weights if not build.files[name].is_here]
    if why_not and missing:
        raise PublishError(_cannot_send(missing, why_not))
    return Plan(
        copied=copied,
        uploaded=[name for name in changed if name not in copied],
        deleted=deleted,
        kept=kept,
        foreign=[name for name in foreign if name not in build.files],
        why_uploaded=why_not if weights and build.source else None,
    )


def _files_of(content: bytes | None) -> tuple[set[str], set[str]]:
    """Names of the files, and of those of them that are weights, that a manifest lists."""
    if content is None:
        return set(), set()
    try:
        manifest = read_manifest(content, f"the {MANIFEST} at the destination")
    except ValueError as error:
        raise PublishError(
            f"{error}; is it the right repository? Delete that file there if it is"
        ) from error
    return files_in(manifest), set(manifest["weights"]["files"])


def _why_not_copied(api: HfApi, build: Build, names: list[str]) -> str | None:
    """Why the Hub cannot be asked to copy these weights from where the manifest says."""
    if not names:
        return None
    if build.source is None:
        return f"{MANIFEST} names no repository that they could be copied from"
    repository, revision = build.source
    if not COPIES_ACROSS:
        return (
            f"huggingface_hub {huggingface_hub.__version__} cannot copy across repositories, which "
            f"{COPIES_SINCE} and later can"
        )
    try:
        source = _tree(api, repository, revision)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return f"{repository}@{revision} is not there, or not for this token"
    for name in names:
        want, there = build.files[name], source.get(name)
        if there is None or not there.lfs or not want.is_at(there):
            found = "missing" if there is None else f"{there.size} bytes, {there.lfs or 'not LFS'}"
            return (
                f"{name} at {repository}@{revision} is not what {MANIFEST} lists "
                f"({want.size} bytes, sha256 {want.sha256}): {found}"
            )
    return None


def _cannot_send(names: list[str], why: str) -> str:
    return (
        f"{len(names)} files of weights ({names[0]}, ...) are neither at the destination nor in "
        f"the folder, and cannot be copied: {why}. Publish from an environment with "
        f"huggingface_hub>={COPIES_SINCE} (this one has {huggingface_hub.__version__}), where the "
        "source can be read and is in the same storage region; or build with --weights FOLDER, to "
        "upload them; or leave them out with --code-only"
    )


def _check_destination(destination: Destination, options: argparse.Namespace) -> None:
    if destination.head is None and options.pr:
        raise PublishError(
            f"{options.repo} does not exist, or not for this token, so there is nothing to open a "
            "pull request against: publish without --pr"
        )
    if options.private and destination.head and not destination.private:
        raise PublishError(
            f"{options.repo} exists and is public, but --private is given: make it private in its "
            "settings, or leave the option out"
        )


def _check_tag(plan: Plan, build: Build, destination: Destination, repo: str) -> None:
    tagged = destination.tagged
    if tagged is None or (tagged == destination.head and not plan.changes):
        return
    what = "this build differs from its head" if plan.changes else f"its head is {destination.head}"
    raise PublishError(
        f"{repo} has the tag {build.tag} at {tagged}, but {what}. People pin tags, so it is not "
        "moved: raise the version of glm4v-patched and build again. If nobody has used it, delete "
        f'it with `python -c "from huggingface_hub import HfApi; '
        f"HfApi().delete_tag('{repo}', tag='{build.tag}')\"` and run this again"
    )


def _show(
    plan: Plan,
    build: Build,
    destination: Destination,
    options: argparse.Namespace,
    say: Say,
) -> None:
    if destination.head is None:
        # The Hub does not tell a missing repository from one that this token may not see.
        state = f"not there for this token: to be created{', private' * options.private}"
    else:
        state = f"{'private' if destination.private else 'public'}, at {destination.head}"
    say(f"Repository {options.repo} ({state})")
    say(f"Version    {build.tag}{' as a pull request, without a tag' if options.pr else ''}")

    def size_of(name: str) -> int:
        return build.files[name].size if name in build.files else destination.files[name].size

    totals = []
    for verb, names, remark in [
        ("copy", plan.copied, "from {}@{}".format(*(build.source or ("", "")))),
        ("upload", plan.uploaded, ""),
        ("delete", plan.deleted, ""),
        ("keep", plan.kept, "already there"),
        ("keep", plan.foreign, "not ours"),
    ]:
        for name in names:
            say(f"  {verb:<7} {_human(size_of(name)):>9}  {name:<40} {remark}".rstrip())
        size = sum(size_of(name) for name in names)
        totals.append(f"{verb} {len(names)} ({_human(size)})")
    say("Total      " + ", ".join(totals[:4]))
    if plan.why_uploaded:
        say(f"Weights are uploaded: {plan.why_uploaded}.")
    card = build.files.get("README.md")
    if card and options.repo not in card.content.decode("utf-8"):
        say(f"Note: README.md does not name {options.repo}; `build --name {options.repo}` would.")


def _human(size: int) -> str:
    amount, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{size} B" if unit == "B" else f"{amount:.1f} {unit}"


def _find_pull_request(api: HfApi, repo: str, build: Build, plan: Plan) -> str | None:
    """The number of a pull request that already makes the destination what is wanted."""
    with _during(f"looking at the pull requests of {repo}", f"nothing was changed; {GO_ON}"):
        refs = api.list_repo_refs(repo, include_pull_requests=True).pull_requests
        for ref in refs:
            if not _differences(_tree(api, repo, ref.ref), build, plan):
                return ref.ref.removeprefix("refs/pr/")
    return None


def _commit(
    api: HfApi,
    build: Build,
    destination: Destination,
    plan: Plan,
    options: argparse.Namespace,
    say: Say,
) -> str:
    """One commit on the head that was compared, read back and compared again."""
    repo = options.repo
    state = f"no tag was made; {GO_ON}"
    with _during(f"publishing to {repo}", state):
        arguments = {
            "repo_id": repo,
            "commit_message": f"glm4v-patched {build.manifest['version']}",
            "parent_commit": destination.head,
            "create_pr": options.pr,
        }
        try:
            copies = _copies(api, build, plan.copied)
            others = _additions(api, build, plan.uploaded, options, say) + _deletions(plan)
            with _copies_refused(bool(copies)):
                commit = api.create_commit(operations=copies + others, **arguments)
        except CopyRefused as refusal:
            missing = [name for name in plan.copied if not build.files[name].is_here]
            if missing:
                raise PublishError(f"{_cannot_send(missing, str(refusal))}; {state}") from refusal
            size = _human(sum(build.files[name].size for name in plan.copied))
            say(without_secrets(f"The server does not copy: {refusal}."))
            say(f"Uploading {len(plan.copied)} files, {size}.")
            # Operations carry the state of the attempt: these are new ones.
            names = plan.copied + plan.uploaded
            operations = _additions(api, build, names, options, say) + _deletions(plan)
            commit = api.create_commit(operations=operations, **arguments)
    say(f"Committed {commit.oid}{f', {commit.pr_url}' if options.pr else ''}")
    with _during(
        f"reading back {repo}", f"commit {commit.oid} is neither verified nor tagged; {GO_ON}"
    ):
        tree = _tree(api, repo, commit.pr_revision if options.pr else commit.oid)
    if wrong := _differences(tree, build, plan):
        raise PublishError(
            f"commit {commit.oid} of {repo} is not what was sent, so it is not tagged: "
            f"{'; '.join(wrong[:5])}. Run the same command again to send these files once more; a "
            ".gitignore in the repository may keep them out"
        )
    say(f"Verified {len(build.files)} files.")
    return commit.oid


def _differences(tree: dict[str, RepoFile], build: Build, plan: Plan) -> list[str]:
    """What in a tree is not as planned."""
    differing = [name for name, file in build.files.items() if not file.is_at(tree.get(name))]
    remaining = [name for name in plan.deleted if name in tree]
    return [f"{name} differs" for name in differing] + [f"{name} remains" for name in remaining]


def _copies(api: HfApi, build: Build, names: list[str]) -> list[CommitOperationCopy]:
    if not names:
        return []
    repository, revision = build.source
    files = api.get_paths_info(repository, names, revision=revision)
    for file in files:
        if not file.xet_hash:  # a large file from before the Hub's present storage
            raise CopyRefused(f"{file.path} of {repository} has no xet hash")
    if len(files) != len(names):
        raise NotOfAHub(f"{len(files)} of {len(names)} files that its tree lists")
    return [
        CommitOperationCopy(
            name, name, src_repo_id=repository, src_repo_type="model", src_revision=revision
        )
        for name in names
    ]


def _additions(
    api: HfApi, build: Build, names: list[str], options: argparse.Namespace, say: Say
) -> list[CommitOperationAdd]:
    """What is committed: small files as they were read, weights as the manifest lists them."""
    files = {name: build.files[name] for name in names}
    weights = [name for name in names if name in build.weights]
    if weights:
        size = _human(sum(files[name].size for name in weights))
        say(f"Reading {len(weights)} files of weights ({size}) to compare them with {MANIFEST}.")
    before = {name: _state(files[name].path) for name in weights}
    operations = {
        name: CommitOperationAdd(name, file.path if file.content is None else file.content)
        for name, file in files.items()
    }
    for name in weights:
        found, listed = operations[name].upload_info.sha256.hex(), build.weights[name]["sha256"]
        if found != listed:
            raise PublishError(
                f"{name} has sha256 {found}, but {MANIFEST} lists {listed}: the file has changed "
                "since the build, or cannot be read without errors; nothing was sent, build again"
            )
    if weights:
        # They are read once more to be sent, and not every server compares what arrives.
        sent = [operations[name] for name in weights]
        api.preupload_lfs_files(options.repo, sent, create_pr=options.pr)
        if changed := [name for name in weights if _state(files[name].path) != before[name]]:
            raise PublishError(
                f"{', '.join(changed)} changed while it was sent: nothing was committed; build "
                "again, and let nothing write to the folder meanwhile"
            )
    return list(operations.values())


def _state(path: Path) -> tuple[int, ...]:
    """Another one whenever the file was written to, or another took its place."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _deletions(plan: Plan) -> list[CommitOperationDelete]:
    return [CommitOperationDelete(name, is_folder=False) for name in plan.deleted]


@contextmanager
def _copies_refused(copying: bool) -> Iterator[None]:
    """Tell the server's refusal to copy from its other errors."""
    try:
        yield
    except Exception as error:
        # Not in 0.36, which copies nothing across.
        refusal = getattr(huggingface_hub.errors, "FileDuplicationError", None)
        if copying and refusal and isinstance(error, refusal):
            raise CopyRefused(" ".join(str(error).split())) from error
        status = status_of(error)
        refused = status is not None and 400 <= status < 500 and status not in (401, 408, 429)
        if copying and refused and "/lfs-files/duplicate" in str(error.response.url):
            raise CopyRefused(f"{status}, {server_message(error)}") from error
        raise
