"""Publishing through the installed client to a Hub on loopback: what is there afterwards, and what
is not, whatever happens in between."""

import huggingface_hub
import pytest

import glm4v_patched
from hub_upload import verify
from hub_upload.errors import without_secrets
from hub_upload.layout import INDEX, MANIFEST
from tests.helpers import local_hub
from tests.helpers.local_hub import File as Stored
from tests.helpers.publishable import (
    CODE,
    FILES,
    NAME,
    SHARDS,
    SMALL_SHARDS,
    TAG,
    UPSTREAM,
    add_source,
    is_published,
    shard,
    sign,
    write_build,
)

SHARD = sorted(SMALL_SHARDS)[0]
NEWER = CODE | {"modeling_chatglm.py": CODE["modeling_chatglm.py"] + b"# newer\n"}


@pytest.fixture
def of_this_clone(monkeypatch, tmp_path):
    """Write a build, and let this clone be the one that such a build comes from."""

    def write(version, code=CODE, shards=SMALL_SHARDS):
        folder = write_build(tmp_path / version, shards, local=True, version=version, code=code)
        monkeypatch.setattr(glm4v_patched, "__version__", version)
        monkeypatch.setattr(verify, "our_code", lambda: code)
        return folder

    return write


def writes(hub):
    return [r for r in hub.requests if r.method not in ("GET", "HEAD")]


def somebody_commits(repository):
    return repository.add_commit({".gitattributes": b"* text\n"})


def test_a_dry_run_only_reads_and_needs_no_token(hub, publish, made_up, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    status, output = publish(made_up, "--push")
    assert status == 1 and "no token" in output
    for _ in ("missing", "there"):
        status, output = publish(made_up)
        assert status == 0 and "Dry run: nothing was sent" in output
        assert "upload    40.0 kB  model-00001-of-00003.safetensors" in output
        assert f"upload {len(CODE) + len(FILES) + len(SMALL_SHARDS) + 2} (" in output
        hub.add_repository(NAME)
    assert not writes(hub) and not hub.repositories[NAME].tags


def test_another_name_is_told(hub, publish, made_up, built):
    """One that is none, and one that is not that of the card."""
    for name in ("name", "https://huggingface.co/our-org/name", "our-org/na me"):
        status, output = publish(made_up, "--push", repo=name)
        assert status == 1 and f"--repo {name}" in output and "org/name" in output
    assert not hub.requests
    assert "README.md does not name our-org/other" in publish(made_up, repo="our-org/other")[1]
    assert "does not name" not in publish(built)[1]


def test_28_gigabytes_are_copied_without_a_byte_of_them(hub, publish, tmp_path):
    pinned = add_source(hub, SHARDS).pinned
    build = write_build(tmp_path / "build", SHARDS, pinned)
    status, output = publish(build)
    assert status == 0 and not writes(hub)
    assert f"copy 15 (27.9 GB), upload {len(CODE) + len(FILES) + 2} (" in output
    assert f"copied from {UPSTREAM}@{pinned}" in output
    assert publish(build, "--push")[0] == 0 and is_published(hub, NAME, SHARDS)
    small = sum(len(content) for content in (CODE | FILES).values())
    assert sum(r.received + r.sent for r in hub.requests) < 2 * small
    assert not hub.asked("PUT") and not hub.asked("GET", ".safetensors/")


def test_published_twice_nothing_changes(hub, publish, made_up):
    status, output = publish(made_up, "--push")
    assert status == 0 and f"Tagged {TAG}" in output and is_published(hub, NAME)
    uploads = hub.asked("PUT", "/lfs/")
    assert sorted(r.received for r in uploads) == sorted(map(len, SMALL_SHARDS.values()))
    before = len(hub.requests)
    (made_up / ".gitignore").write_text("of git, and not of the build")
    status, output = publish(made_up, "--push")
    assert status == 0 and "has all of this already" in output and is_published(hub, NAME)
    assert {r.method for r in hub.requests[before:]} <= {"GET", "HEAD"}


@pytest.mark.parametrize("arguments", [["--push"], ["--push", "--private"]])
def test_private_is_what_was_asked_for(hub, publish, made_up, arguments):
    assert publish(made_up, *arguments)[0] == 0
    assert hub.repositories[NAME].private == ("--private" in arguments)
    assert publish(made_up, "--push", "--private")[0] == (0 if "--private" in arguments else 1)


# What keeps weights from being copied: settings of the source, a fault, and what is told.
DUPLICATE, SOURCE = "/lfs-files/duplicate", f"{UPSTREAM}/revision/"
APART = {"failed": [{"sha256": "0" * 64, "error": "storage regions differ: eu and us"}]}
LISTED = {"id": UPSTREAM, "sha": "b" * 40}
COPIES_FAILED = [
    (DUPLICATE, {"answer": APART}, "storage regions differ: eu and us"),
    *((DUPLICATE, {"status": status}, f"{status}") for status in (403, 500)),
    (DUPLICATE, {"cut_response": 0}, "the connection failed"),
    (DUPLICATE, {"answer": []}, "not that of a Hub"),
    *((SOURCE, {"answer": answer}, "not that of a Hub") for answer in ({}, [{}])),
    (SOURCE, {"answer": LISTED | {"siblings": []}}, f"at {UPSTREAM}@"),
    (SOURCE, {"status": 404, "headers": {"X-Error-Code": "RevisionNotFound"}}, "not for this"),
]


@pytest.mark.parametrize(("path", "fault", "why"), COPIES_FAILED, ids=str)
def test_copies_that_fail_are_told(hub, publish, tmp_path, path, fault, why):
    source = add_source(hub, SMALL_SHARDS)
    build = write_build(tmp_path / "b", SMALL_SHARDS, source.pinned)
    hub.fail("*", path, times=9, message=f"told, {hub.token}", **fault)
    status, output = publish(build, "--push")
    assert status == 1 and why in output
    assert not hub.asked("POST", "/commit/") and not hub.asked("POST", "/tag/")
    assert path == SOURCE or "build with --weights FOLDER, to upload them" in output
    hub.faults.clear()
    assert publish(build, "--push")[0] == 0 and is_published(hub, NAME) and not hub.asked("PUT")


def test_a_source_with_other_weights_is_not_copied(hub, publish, tmp_path):
    head = add_source(hub, SHARDS).head  # the later weights
    status, output = publish(write_build(tmp_path / "build", SHARDS, head), "--push")
    assert status == 1 and f"is not what {MANIFEST} lists" in output
    assert not hub.asked("POST", "/commit/") and not hub.asked("POST", "/create")


def test_foreign_content_is_refused_unless_told(hub, publish, made_up, of_this_clone):
    control = "a\x1b[2J\u202etxt\nTagged v9"
    theirs = {"README.md": b"mine", "their.bin": b"theirs", control: b"theirs"}
    repository = hub.add_repository(NAME, theirs)
    for arguments in ([], ["--push"], ["--push", "--allow-foreign"]):
        status, output = publish(made_up, *arguments)
        # Control characters of names are shown as escapes.
        assert r"a\x1b[2J\u202etxt" in output and not {"\x1b", "\u202e"} & {*output}
        if "--allow-foreign" not in arguments:
            assert status == 1 and not writes(hub)
            assert "3 files" in output and "their.bin" in output and "--allow-foreign" in output
            assert not [line for line in output.splitlines() if line.startswith("Tagged")]
    assert status == 0
    # Files that were added to ours are foreign, too.
    repository.add_commit({"notes.txt": b"theirs"})
    newer = of_this_clone("0.2.0")
    status, output = publish(newer, "--push")
    assert status == 1 and "notes.txt" in output
    assert publish(newer, "--push", "--allow-foreign")[0] == 0
    for name, content in (FILES | {"notes.txt": b"theirs", "their.bin": b"theirs"}).items():
        assert repository.files[name].content == content


def test_files_of_our_older_version_are_deleted(hub, publish, of_this_clone):
    publish(of_this_clone("0.1.0", CODE | {"left.py": b"# of the older version\n"}), "--push")
    shards = {"model.safetensors": shard(0, 1000)}
    status, output = publish(of_this_clone("0.2.0", NEWER, shards), "--push")
    assert status == 0 and "delete 4 (" in output
    repository = hub.repositories[NAME]
    assert {*repository.files} == {*NEWER, *FILES, *shards, INDEX, MANIFEST, ".gitattributes"}
    assert repository.tags["v0.2.0"] == repository.head != repository.tags["v0.1.0"]
    assert len(repository.commits) == 3


def test_a_tag_is_never_moved(hub, publish, made_up, of_this_clone, monkeypatch):
    publish(made_up, "--push")
    repository = hub.repositories[NAME]
    head, before = repository.head, len(writes(hub))
    newer = of_this_clone("0.1.0", NEWER)
    status, output = publish(newer, "--push")
    assert status == 1 and len(writes(hub)) == before
    assert f"has the tag v0.1.0 at {head}" in output and "raise the version" in output
    monkeypatch.setattr(verify, "our_code", lambda: CODE)
    moved = somebody_commits(repository)
    status, output = publish(made_up, "--push")
    assert status == 1 and f"its head is {moved}" in output
    assert repository.tags == {"v0.1.0": head}


def test_a_manifest_at_the_destination_that_is_none_is_told(hub, publish, made_up):
    hub.add_repository(NAME, {MANIFEST: b'{"version": "1"}'})
    status, output = publish(made_up, "--push", "--allow-foreign")
    assert status == 1 and f"{NAME}: {MANIFEST} is none" in output and not writes(hub)


# Before anything is sent

DAMAGES = [
    ("modeling_chatglm.py", b"# edited", "modeling_chatglm.py is not what the manifest says"),
    ("modeling_chatglm.py", NEWER["modeling_chatglm.py"], "code: 1 files are not this clone's"),
    ("README.md", FILES["README.md"] + b"edited", "README.md is not what the manifest says"),
    (MANIFEST, None, f"build has no {MANIFEST}"),
    (SHARD, b"short", "5 bytes, not"),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGES)
def test_a_folder_that_is_not_as_built_is_not_sent(hub, publish, made_up, name, content, message):
    """And what differs from this clone is not published by it, also where the manifest agrees."""
    (made_up / name).unlink()
    if content is not None:
        (made_up / name).write_bytes(content)
    if "this clone" in message:
        sign(made_up)
    status, output = publish(made_up, "--push")
    assert status == 1 and message in output and not hub.requests


# Faults; test_faults.py has one of every kind


def test_a_branch_that_moves_while_publishing_is_left_alone(hub, publish, made_up):
    repository = hub.add_repository(NAME)
    moved = []
    hub.fail("POST", "/commit/", call=lambda: moved.append(somebody_commits(repository)))
    status, output = publish(made_up, "--push")
    assert status == 1 and "412" in output and "Committed" not in output
    assert repository.head == moved[0] and not repository.tags
    assert publish(made_up, "--push")[0] == 0
    assert repository.files[".gitattributes"].content == b"* text\n"
    assert repository.tags == {TAG: repository.head}


def test_a_commit_that_is_not_what_was_sent_is_not_tagged(hub, publish, made_up):
    repository = hub.add_repository(NAME)
    before = repository.head

    def lose_a_file():
        if repository.head != before:
            repository.files["config.json"] = Stored(b"lost")

    hub.fail("GET", "/revision/(?!v)", times=9, call=lose_a_file)
    status, output = publish(made_up, "--push")
    assert status == 1 and "config.json differs" in output and "not tagged" in output
    assert not repository.tags
    hub.faults.clear()
    assert publish(made_up, "--push")[0] == 0
    assert repository.files["config.json"].content == FILES["config.json"]
    assert repository.tags == {TAG: repository.head}


def test_a_tag_is_at_our_commit_or_told(hub, publish, made_up):
    """Somebody else's tag, or a commit between ours and the tag."""
    repository = hub.add_repository(NAME)
    first = repository.head
    tag = {TAG: first}
    hub.fail("POST", "/tag/", answer={}, call=lambda: repository.refs.update(tag))
    status, output = publish(made_up, "--push")
    ours = repository.head
    assert status == 1 and f"at {NAME}@{ours}, but it is at {first}" in output
    assert "raise the version" in output and repository.tags == {TAG: first}

    del repository.refs[TAG]
    hub.fail("POST", "/tag/", call=lambda: somebody_commits(repository))
    assert publish(made_up, "--push")[0] == 0
    assert repository.tags == {TAG: ours} and repository.head != ours


def test_a_wrong_token_and_organisation_are_told(hub, publish, made_up, monkeypatch):
    status, output = publish(made_up, "--push", repo="another-org/model")
    assert status == 1 and "403" in output and "another-org" in output
    monkeypatch.setenv("HF_TOKEN", "hf_secretofanother")
    for arguments in ([], ["--push"]):
        status, output = publish(made_up, *arguments)
        assert status == 1 and "401" in output
    assert not hub.repositories


@pytest.mark.parametrize("at", ["/api/models/", "/repos/create", "/preupload/", "/commit/"])
def test_small_files_that_change_meanwhile_are_sent_as_they_were_checked(hub, publish, made_up, at):
    names = ["modeling_chatglm.py", "config.json", "README.md", MANIFEST]
    contents = {name: (made_up / name).read_bytes() for name in names}
    change = lambda: [(made_up / n).write_bytes(b"x" * len(c)) for n, c in contents.items()]  # noqa: E731
    hub.fail("*", at, call=change)
    assert publish(made_up, "--push")[0] == 0
    for name, content in contents.items():
        assert (made_up / name).read_bytes() != content
        assert hub.repositories[NAME].files[name].content == content
    assert set(hub.repositories[NAME].tags) == {TAG}


def test_weights_that_are_not_those_of_the_build_are_not_sent(hub, publish, made_up, monkeypatch):
    """Neither where they changed before, nor while they are sent to a server that trusts."""
    content = (made_up / SHARD).read_bytes()
    (made_up / SHARD).write_bytes(content[:-1] + b"x")
    status, output = publish(made_up, "--push")
    assert status == 1 and SHARD in output and "has sha256" in output and not hub.asked("PUT")
    (made_up / SHARD).write_bytes(content)

    def upload(handler, repo, oid):
        handler.hub.repositories[repo].objects[oid] = handler.body
        return {}

    monkeypatch.setattr(local_hub._Handler, "lfs_upload", upload)
    other = b"x" * len(content)
    hub.fail("POST", "/objects/batch", call=lambda: (made_up / SHARD).write_bytes(other))
    status, output = publish(made_up, "--push")
    assert status == 1 and f"{SHARD} changed while it was sent: nothing was" in output
    assert not hub.asked("POST", "/commit/") and not hub.asked("POST", "/tag/")


def test_signatures_of_addresses_are_not_printed():
    told = "PUT http://hub/lfs/a?X-Amz-Signature=b&c=d failed (url: /lfs/a?X-Amz-Signature=b), why?"
    assert without_secrets(told) == "PUT http://hub/lfs/a failed (url: /lfs/a), why?"
