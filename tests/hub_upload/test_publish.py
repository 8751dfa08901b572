"""Publishing with the installed client to a local Hub: its files afterwards, with and without
faults."""

import os

import huggingface_hub
import pytest
from huggingface_hub import HfApi

import glm4v_patched
from glm4v_patched.models import adopt as adopting
from hub_upload.build import build_model_repository, read_source
from hub_upload.manifest import MANIFEST
from tests.helpers import local_hub
from tests.helpers.publishable import (
    CODE,
    NAME,
    TAG,
    UPSTREAM,
    as_files,
    is_complete,
    is_published,
    shards_of,
)

SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def without_weights(hub, original, tmp_path):
    """A build of the Hub's original, whose weights the Hub will copy."""
    pinned = hub.add_repository(UPSTREAM, as_files(original)).head
    build_model_repository(read_source(f"{UPSTREAM}@{pinned}"), tmp_path / "without", NAME)
    return tmp_path / "without"


@pytest.fixture
def of_this_clone(monkeypatch, built, tmp_path):
    """Write a build with changed code and version, as if this clone had them."""

    def write(version, changes):
        monkeypatch.setattr(glm4v_patched, "__version__", version)
        monkeypatch.setattr(adopting, "read_our_code", lambda: CODE | changes)
        build_model_repository(read_source(str(built)), tmp_path / version, NAME)
        return tmp_path / version

    return write


def writes(hub):
    return [r for r in hub.requests if r.method not in ("GET", "HEAD")]


def add_foreign_commit(repository):
    return repository.add_commit({".gitattributes": b"* text\n"})


def test_a_dry_run_only_reads_and_needs_no_token(hub, publish, copy, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    status, output = publish(copy, "--push")
    assert status == 1 and "no token" in output
    status, output = publish(copy)
    assert status == 0 and "Dry run: nothing was sent" in output
    assert f"upload   711.3 kB  {SHARD}" in output
    assert f"upload {len(as_files(copy))} (" in output
    assert not writes(hub) and not hub.repositories[NAME].tags


def test_weights_are_copied_without_a_byte_of_them(hub, publish, without_weights):
    """The source has other weights by now."""
    source = hub.repositories[UPSTREAM]
    pinned = source.head
    source.add_commit({SHARD: b"later"})
    status, output = publish(without_weights)
    assert status == 0 and not writes(hub)
    assert "copy 2 (860.9 kB), upload" in output and f"from {UPSTREAM}@{pinned}" in output
    assert publish(without_weights, "--push")[0] == 0 and is_published(hub, without_weights)
    assert not hub.asked("PUT") and not [r for r in hub.requests if r.path.endswith("tensors")]


def test_published_twice_nothing_changes(hub, publish, copy):
    status, output = publish(copy, "--push")
    assert status == 0 and f"Tagged {TAG}" in output and is_published(hub, copy)
    uploads = hub.asked("PUT", "/lfs/")
    assert {r.received for r in uploads} == {(copy / n).stat().st_size for n in shards_of(copy)}
    before = len(hub.requests)
    (copy / ".gitignore").write_text("not part of the build")
    status, output = publish(copy, "--push")
    assert status == 0 and "has all of this already" in output
    assert {r.method for r in hub.requests[before:]} <= {"GET", "HEAD"}


def test_a_missing_repository_is_refused_with_the_cure(hub, run, copy):
    status, output = run("publish", copy, "--repo", NAME, "--push")
    assert status == 1 and f"create it with `hf repo create {NAME}`" in output and not writes(hub)
    HfApi().create_repo(NAME, private=True)
    status, output = run("publish", copy, "--repo", NAME, "--push")
    assert status == 0 and hub.repositories[NAME].private and is_published(hub, copy)


# Faults while weights are copied, and the message.
APART = {"failed": [{"sha256": "0" * 64, "error": "storage regions differ: eu and us"}]}
GONE = {"status": 404, "headers": {"X-Error-Code": "RevisionNotFound"}}
COPIES_FAILED = [
    ("/lfs-files/duplicate", {"answer": APART}, "storage regions differ: eu and us"),
    ("/lfs-files/duplicate", {"cut_response": 0}, "Server disconnected"),
    (f"{UPSTREAM}/revision/", GONE, "Revision Not Found"),
]


@pytest.mark.parametrize(("path", "fault", "why"), COPIES_FAILED, ids=str)
def test_failed_copies_are_reported(hub, publish, without_weights, path, fault, why):
    hub.fail("*", path, times=9, message=f"echo of {hub.token}", **fault)
    status, output = publish(without_weights, "--push")
    assert status == 1 and why in output and hub.token not in output
    assert not hub.asked("POST", "/commit/") and not hub.asked("POST", "/tag/")
    hub.faults.clear()
    assert publish(without_weights, "--push")[0] == 0 and not hub.asked("PUT")


def test_a_source_with_other_weights_of_the_same_size_is_not_copied(hub, publish, without_weights):
    files = hub.repositories[UPSTREAM].files
    files[SHARD] = local_hub.File(files[SHARD].content[::-1], lfs=True)
    status, output = publish(without_weights, "--push")
    assert status == 1 and f"differs from {MANIFEST}" in output
    assert not hub.asked("POST", "/commit/")


def test_foreign_files_are_refused_without_the_option(hub, publish, copy, of_this_clone):
    control = "a\x1b[2J\u202etxt\nTagged v9"
    foreign = {"README.md": b"mine", "their.bin": b"theirs", control: b"theirs"}
    repository = hub.add_repository(NAME, foreign)
    for arguments in ([], ["--push"], ["--push", "--allow-foreign"]):
        status, output = publish(copy, *arguments)
        # Control characters in names are escaped.
        assert r"a\x1b[2J\u202etxt" in output and not {"\x1b", "\u202e"} & {*output}
        if "--allow-foreign" not in arguments:
            assert status == 1 and not writes(hub)
            assert "3 files" in output and "their.bin" in output and "--allow-foreign" in output
            assert not [line for line in output.splitlines() if line.startswith("Tagged")]
    assert status == 0
    # Files added to a repository of ours are foreign, too.
    repository.add_commit({"notes.txt": b"theirs"})
    newer = of_this_clone("0.2.0", {"loss.py": b"# newer\n"})
    status, output = publish(newer, "--push")
    assert status == 1 and "notes.txt" in output
    assert publish(newer, "--push", "--allow-foreign")[0] == 0
    rest = {name: file for name, file in repository.files.items() if file.content != b"theirs"}
    assert is_complete(rest, newer) and {"notes.txt", "their.bin"} <= {*repository.files}


def test_files_of_our_older_version_are_deleted(hub, publish, of_this_clone, built):
    publish(of_this_clone("0.1.0", {"left.py": b"# of the older version\n"}), "--push")
    repository = hub.repositories[NAME]
    repository.add_commit({"new.py": b"# of a name that is ours by now\n"})
    newer = of_this_clone("0.2.0", {"loss.py": b"# newer\n", "new.py": b"# newer\n"})
    status, output = publish(newer, "--push")
    assert status == 0 and "delete 1 (" in output and is_complete(repository.files, newer)
    assert repository.tags["v0.2.0"] == repository.head != repository.tags["v0.1.0"]
    assert len(repository.commits) == 4


def test_a_tag_is_never_moved(hub, publish, copy, of_this_clone, monkeypatch):
    publish(copy, "--push")
    repository = hub.repositories[NAME]
    head, before = repository.head, len(writes(hub))
    status, output = publish(of_this_clone(TAG[1:], {"loss.py": b"# newer\n"}), "--push")
    assert status == 1 and len(writes(hub)) == before
    assert f"has the tag {TAG} on {head}" in output and "raise the version" in output
    monkeypatch.setattr(adopting, "read_our_code", lambda: CODE)
    new_head = add_foreign_commit(repository)
    status, output = publish(copy, "--push")
    assert status == 1 and f"its head is {new_head}" in output
    assert repository.tags == {TAG: head}


# Faults; test_faults.py has one of every kind


def test_a_branch_that_moves_while_publishing_is_left_alone(hub, publish, copy):
    repository = hub.add_repository(NAME)
    commits = []
    hub.fail("POST", "/commit/", call=lambda: commits.append(add_foreign_commit(repository)))
    status, output = publish(copy, "--push")
    assert status == 1 and "412" in output and "Committed" not in output
    assert repository.head == commits[0] and not repository.tags
    assert publish(copy, "--push")[0] == 0 and is_complete(repository.files, copy)
    assert repository.files[".gitattributes"].content == b"* text\n"
    assert repository.tags == {TAG: repository.head}


def test_a_tag_that_somebody_else_creates_meanwhile_is_not_moved(hub, publish, copy):
    repository = hub.add_repository(NAME)
    first = repository.head
    hub.fail("POST", "/tag/", call=lambda: repository.refs.update({TAG: first}))
    status, output = publish(copy, "--push")
    assert status == 1 and "409" in output and repository.tags == {TAG: first}

    del repository.refs[TAG]
    ours = repository.head
    hub.fail("POST", "/tag/", call=lambda: add_foreign_commit(repository))
    assert publish(copy, "--push")[0] == 0
    assert repository.tags == {TAG: ours} and repository.head != ours


def test_a_gitignore_at_the_destination_is_refused(hub, publish, copy):
    """The client leaves out the files that it names, without an error."""
    hub.add_repository(NAME, {".gitignore": b"*.py"})
    status, output = publish(copy, "--push", "--allow-foreign")
    assert status == 1 and "delete it first" in output and not writes(hub)


def test_weights_that_are_not_those_of_the_build_are_not_sent(hub, publish, copy):
    """Neither if they changed before, nor while they are sent to a server that does not check."""
    content = (copy / SHARD).read_bytes()
    (copy / SHARD).write_bytes(content[:-1] + b"x")
    status, output = publish(copy, "--push")
    assert status == 1 and SHARD in output and "has sha256" in output and not hub.asked("PUT")
    (copy / SHARD).write_bytes(content)

    hub.fail("PUT", "/lfs/", answer={}, times=9)
    before = (copy / SHARD).stat()

    def write_other_bytes_with_the_same_time():
        (copy / SHARD).write_bytes(b"x" * len(content))
        os.utime(copy / SHARD, ns=(before.st_atime_ns, before.st_mtime_ns))

    hub.fail("POST", "/objects/batch", call=write_other_bytes_with_the_same_time)
    status, output = publish(copy, "--push")
    assert status == 1 and f"{SHARD} changed during the upload, so nothing was" in output
    assert not hub.asked("POST", "/commit/") and not hub.asked("POST", "/tag/")
