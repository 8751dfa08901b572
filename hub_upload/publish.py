"""Publish a built folder on the Hub; no other file writes to the Hub.

A complete plan is made before anything is sent: the folder is read once, must pass `verify`, and is
compared by content with the head of the destination's branch. All differences go into one commit on
this head, which is then tagged. If a run is interrupted, the branch is either unchanged or
complete, and the next run continues.
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

from .checks import FAILED, GIT_FILES, require_that
from .files import BuiltFiles, File, read_folder
from .hub import has_same_content, list_repository
from .manifest import ID_PATTERN, MANIFEST, parse_manifest
from .verify import check_build

GIT_FILE = ".gitattributes"  # the Hub creates this file with the repository
UPLOAD_CURE = "build with --weights FOLDER, to upload the weights"


def print_line(line: str) -> None:
    """Print a line at once, without control characters."""
    write_line(printable(line))


def read_built_folder(folder: Path) -> BuiltFiles:
    """Read a built folder, and raise ``ValueError`` if it does not pass verify.

    The sha256 of weights is compared only when the weights are sent.
    """
    files = read_folder(folder, hidden=True)
    build = BuiltFiles(str(folder), {n: file for n, file in files.items() if n not in GIT_FILES})
    checks = check_build(build, [sys.executable])
    if failed := [f"{check.name}: {check.detail}" for check in checks if check.status == FAILED]:
        raise ValueError(f"{build.name} does not pass verify: {'; '.join(failed)}")
    for name, entry in build.weights.items():
        path = files[name].path if name in files else None
        build.files[name] = File(entry.size, entry.sha256, path=path)
    build.files = dict(sorted(build.files.items()))
    return build


def publish(options: argparse.Namespace) -> None:
    """Print the plan of a publication and, with ``--push``, carry it out."""
    repo, api = options.repo, HfApi()
    require_that(
        get_token() or not options.push, "no token: log in with `hf auth login`, or set HF_TOKEN"
    )
    require_that(
        re.fullmatch(ID_PATTERN, repo),
        f"--repo {repo} is not the id of a repository: expected org/name",
    )
    build = read_built_folder(options.folder)
    # The Hub answers alike for missing repositories and for those that the token cannot access.
    require_that(
        api.repo_exists(repo),
        f"{repo} does not exist, or this token has no access to it: create it with `hf repo create "
        f"{repo}` (and --private), or log in with `hf auth login`",
    )
    info, remote = list_repository(api, repo, None)
    head, tag = str(info.sha), f"v{build.manifest.version}"
    tagged = list_repository(api, repo, tag)[0].sha if api.revision_exists(repo, tag) else None
    actions = plan_actions(build, repo, head, remote, options.allow_foreign)
    copies = require_copies(api, build, actions["copy"])
    show_plan(build, remote, actions, f"Repository {repo} at {head}, version {tag}")
    is_changed = any(actions[verb] for verb in ("copy", "upload", "delete"))
    # A tag that exists is right only if it is on the head and the head has this build already.
    if tagged is not None and (is_changed or tagged != head):
        relation = "this build differs from" if is_changed else "has this build"
        raise ValueError(
            f"{repo} has the tag {tag} on {tagged}, but its head is {head}, which {relation}. "
            "Users pin tags, so the tag is not moved: raise the version and build again"
        )
    if not options.push:
        print_line("Dry run: nothing was sent. Add --push to publish.")
        return
    if is_changed:
        additions = upload(api, build, repo, actions["upload"])
        commit = api.create_commit(
            repo,
            [*copies, *additions, *map(CommitOperationDelete, actions["delete"])],
            commit_message=f"glm4v-patched {build.manifest.version}",
            parent_commit=head,
        )
        head = commit.oid
        print_line(f"Committed {head}")
    else:
        print_line(f"{repo} has all of this already, at {head}.")
    if tagged is None:
        api.create_tag(repo, tag=tag, revision=head)  # raises if the tag exists by now
        print_line(f"Tagged {tag}.")


def plan_actions(
    build: BuiltFiles, repo: str, head: str, remote: dict[str, RepoSibling], allow_foreign: bool
) -> dict[str, list[str]]:
    """Return the names of files by the action for them; "copy" is done by the Hub itself.

    Args:
        head: Commit of the destination that the build is compared with.
        remote: Files of this commit.
        allow_foreign: Whether files at the destination that no build wrote are accepted.
    """
    # Without a manifest of ours, all files at the destination count as foreign.
    ours: set[str] = set()
    if MANIFEST in remote:
        path = HfApi().hf_hub_download(repo, MANIFEST, revision=head)
        published = parse_manifest(Path(path).read_bytes(), f"{repo}: {MANIFEST}")
        ours = published.names | build.files.keys()
    foreign = sorted(remote.keys() - ours - {GIT_FILE})
    if foreign and not allow_foreign:
        raise ValueError(
            f"{repo} has {len(foreign)} files that no {MANIFEST} of ours lists "
            f"({listed(foreign, 5)}). If it is the right repository, --allow-foreign publishes "
            "beside them, and over those with the same names"
        )
    if ".gitignore" in remote:
        raise ValueError(f"{repo} has a .gitignore, which may leave files out: delete it first")
    same = [name for name, file in build.files.items() if has_same_content(remote.get(name), file)]
    changed = [name for name in build.files if name not in same]
    return {
        "copy": [name for name in changed if build.files[name].path is None],
        "upload": [name for name in changed if build.files[name].path],
        "delete": sorted(remote.keys() & ours - build.files.keys()),
        "keep": same,
        "leave": [name for name in foreign if name not in build.files],
    }


def require_copies(api: HfApi, build: BuiltFiles, names: list[str]) -> list[CommitOperationCopy]:
    """Return the operations by which the Hub copies weights from their origin.

    Raises ``ValueError`` if the origin's weights are not those that the manifest lists.
    """
    if not names:
        return []
    origin = build.origin
    assert origin, "verify refuses weights that are neither in the folder nor have an origin"
    repo, commit = origin.repository, origin.revision
    _, source = list_repository(api, repo, commit)
    if wrong := [n for n in names if not has_same_content(source.get(n), build.files[n])]:
        raise ValueError(
            f"{listed(wrong)} at {origin} differs from {MANIFEST}, so it is not copied; "
            f"{UPLOAD_CURE}"
        )
    return [CommitOperationCopy(name, name, commit, repo, "model") for name in names]


def show_plan(
    build: BuiltFiles, remote: dict[str, RepoSibling], actions: dict[str, list[str]], title: str
) -> None:
    """Print the plan: the action for each file, and totals."""

    def size_of(*names: str) -> str:
        files = (build.files.get(name) or remote[name] for name in names)
        return format_bytes(sum(file.size or 0 for file in files))

    print_line(title)
    for verb, names in actions.items():
        for name in names:
            print_line(f"  {verb:<7} {size_of(name):>9}  {name}")
    totals = [f"{verb} {len(names)} ({size_of(*names)})" for verb, names in actions.items()]
    print_line(f"Total      {', '.join(totals)}; leave: not ours")
    if actions["copy"]:
        print_line(f"Weights are copied from {build.origin}. If the Hub refuses, {UPLOAD_CURE}.")


def upload(api: HfApi, build: BuiltFiles, repo: str, names: list[str]) -> list[CommitOperationAdd]:
    """Upload weights, and return the operations that add all of these files.

    Raises ``ValueError`` if weights differ from the manifest, or change during the upload.
    """
    files = {name: build.files[name] for name in names}
    paths = {n: f.path for n, f in files.items() if f.content is None and f.path}
    times = {name: _times(path) for name, path in paths.items()}
    additions = []
    with show_progress("hashing", total=len(files), unit="file") as progress:
        for name, file in files.items():
            additions.append(CommitOperationAdd(name, paths.get(name) or file.content or b""))
            progress.update()
    for addition in additions:
        name, digest = addition.path_in_repo, addition.upload_info.sha256.hex()
        if digest != files[name].sha256:
            raise ValueError(
                f"{name} has sha256 {digest}, but {MANIFEST} lists {files[name].sha256}: nothing "
                "was sent, build again"
            )
    # Uploading reads the weights again, and not every server checks their sha256.
    with show_progress(f"uploading {pluralize(len(additions), 'file')}"):
        api.preupload_lfs_files(repo, additions)
    if changed := [name for name, path in paths.items() if _times(path) != times[name]]:
        raise ValueError(
            f"{listed(changed)} changed during the upload, so nothing was committed: build again, "
            "and make sure that nothing writes to the folder meanwhile"
        )
    return additions


def _times(path: Path) -> tuple[int, int]:
    """Return when a file's content and its inode were last changed, in nanoseconds."""
    status = path.stat()
    return status.st_mtime_ns, status.st_ctime_ns
