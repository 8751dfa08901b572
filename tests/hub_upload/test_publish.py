"""Publishing through the installed client to a Hub on loopback: what is there afterwards, and what
is not, whatever happens in between."""

import hashlib
import queue
import re
import signal
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import CommitOperationCopy, HfApi
from huggingface_hub.hf_api import RepoFile

import glm4v_patched
from hub_upload import verify as verifying
from hub_upload.__main__ import main
from hub_upload.faults import without_secrets
from hub_upload.publish import Wanted, git_hash
from tests.helpers import local_hub
from tests.helpers.fake_build import (
    CARD,
    CODE,
    FILES,
    INDEX,
    SHARDS,
    SMALL_SHARDS,
    SOURCE,
    add_source,
    shard,
    write_build,
)
from tests.helpers.local_hub import File, LocalHub

ROOT = Path(__file__).parents[2]
REPO = "our-org/glm-4v-9b-trainable"
MANIFEST = "CODE_MANIFEST.json"
COPIES_ACROSS = "src_repo_id" in CommitOperationCopy.__dataclass_fields__
copies_across = pytest.mark.skipif(
    not COPIES_ACROSS, reason=f"huggingface_hub {huggingface_hub.__version__} does not"
)


@pytest.fixture
def hub(monkeypatch):
    with LocalHub() as hub:
        hub.redirect_client(monkeypatch)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub


@pytest.fixture
def run(hub, capfd):
    """Run the command; its status and all that it printed, which never holds the token."""

    def run(folder, *arguments, repo=REPO):
        status = main(["publish", str(folder), "--repo", repo, *arguments])
        output, errors = capfd.readouterr()
        assert hub.token not in output + errors
        assert "Traceback" not in output + errors
        own = [line for line in errors.splitlines() if line.startswith("hub_upload: ")]
        assert len(own) == (status == 1), errors
        return status, output + "".join(own)

    return run


@pytest.fixture
def of_this_clone(monkeypatch):
    """Write a build, and let this clone be the one that such a build comes from."""

    def write(*arguments, version="0.1.0", code=CODE, **settings):
        folder = write_build(*arguments, version=version, code=code, **settings)
        monkeypatch.setattr(glm4v_patched, "__version__", version)
        monkeypatch.setattr(verifying, "REMOTE", folder)
        return folder

    return write


NEWER = CODE | {"modeling_chatglm.py": CODE["modeling_chatglm.py"] + b"# newer\n"}


@pytest.fixture
def build(tmp_path):
    """A build with its shards in the folder, from a source that nobody knows."""
    return write_build(tmp_path / "build", SMALL_SHARDS, local=True)


def asked(hub, method, part=""):
    return [r for r in hub.requests if r.method == method and part in r.path]


def writes(hub):
    return [r for r in hub.requests if r.method not in ("GET", "HEAD")]


def published(hub, shards=SMALL_SHARDS, code=CODE, repo=REPO):
    """Whether all is there, in one commit, and the tag on it."""
    repository = hub.repositories[repo]
    files = repository.files
    wanted = {*code, *FILES, *shards, INDEX, MANIFEST, ".gitattributes"}
    assert set(files) == wanted
    for name, content in (CODE | FILES | shards).items():
        assert files[name].content == content, name
    assert len(repository.commits) == 2
    return repository.tags == {"v0.1.0": repository.head}


def test_a_dry_run_only_reads(hub, run, build):
    for _ in ("missing", "there"):
        status, output = run(build)
        assert status == 0
        assert not writes(hub)
        assert "Dry run: nothing was sent" in output
        assert "upload    40.0 kB  model-00001-of-00003.safetensors" in output
        number = len(CODE) + len(FILES) + len(SMALL_SHARDS) + 2  # the index and the manifest
        assert f"upload {number} (" in output
        hub.add_repository(REPO)
    assert not hub.repositories[REPO].tags


def test_a_wrong_name_and_a_card_of_another_are_told(hub, run, tmp_path):
    build = write_build(tmp_path / "a", SMALL_SHARDS, local=True)
    for name in ("name", "https://huggingface.co/our-org/name", "our-org/na me"):
        status, output = run(build, "--push", repo=name)
        assert status == 1 and f"--repo {name}" in output and "org/name" in output
    assert not hub.requests
    assert "README.md does not name our-org/other" in run(build, repo="our-org/other")[1]
    card = f"{CARD}{REPO}\n".encode()
    build = write_build(tmp_path / "b", SMALL_SHARDS, local=True, card=card)
    assert "does not name" not in run(build)[1]


def test_a_dry_run_needs_no_token(hub, run, build, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert run(build)[0] == 0
    status, output = run(build, "--push")
    assert status == 1 and "no token" in output
    assert not writes(hub)


@copies_across
def test_28_gigabytes_are_copied_without_a_byte_of_them(hub, run, tmp_path):
    source = add_source(hub, SHARDS)
    build = write_build(tmp_path / "build", SHARDS, source.pinned)
    status, output = run(build)
    assert status == 0 and not writes(hub)
    assert f"copy 15 (27.9 GB), upload {len(CODE) + len(FILES) + 2} (" in output
    assert f"from {SOURCE}@{source.pinned}" in output

    assert run(build, "--push")[0] == 0
    assert published(hub, SHARDS)
    small = sum(len(content) for content in (CODE | FILES).values())
    assert sum(r.received + r.sent for r in hub.requests) < 2 * small
    assert not asked(hub, "PUT") and not asked(hub, "GET", ".safetensors/")


@pytest.mark.skipif(COPIES_ACROSS, reason="for clients that cannot copy across")
def test_a_client_that_cannot_copy_says_which_can(hub, run, tmp_path):
    source = add_source(hub, SHARDS)
    build = write_build(tmp_path / "build", SHARDS, source.pinned)
    status, output = run(build, "--push")
    assert status == 1
    assert f"huggingface_hub {huggingface_hub.__version__} cannot copy" in output
    assert "huggingface_hub>=1.33" in output and "--weights FOLDER" in output
    assert not writes(hub)


def test_local_shards_are_uploaded_once(hub, run, build):
    status, output = run(build, "--push")
    assert status == 0, output
    assert published(hub)
    uploads = asked(hub, "PUT", "/lfs/")
    assert sorted(r.received for r in uploads) == sorted(map(len, SMALL_SHARDS.values()))
    assert "Tagged v0.1.0" in output


@pytest.mark.parametrize("arguments", [["--push"], ["--push", "--private"]])
def test_private_is_what_was_asked_for(hub, run, build, arguments):
    assert run(build, *arguments)[0] == 0
    assert hub.repositories[REPO].private == ("--private" in arguments)
    assert run(build, "--push", "--private")[0] == (0 if "--private" in arguments else 1)


def test_published_twice_nothing_changes(hub, run, build):
    run(build, "--push")
    before = len(hub.requests)
    status, output = run(build, "--push")
    assert status == 0 and "has all of this already" in output
    assert {r.method for r in hub.requests[before:]} == {"GET"}
    assert published(hub)


@pytest.mark.parametrize(
    "settings, fault, why",
    [
        ({"region": "eu"}, None, "storage regions differ: eu and us"),
        ({"has_xet": False}, None, "no xet hash"),
        ({}, {"status": 403}, "403, the local Hub was told to fail"),
        ({}, {"status": 400}, "400, the local Hub was told to fail"),
    ],
)
@copies_across
def test_a_refused_copy_is_an_upload_where_the_shards_are(hub, run, tmp_path, settings, fault, why):
    source = add_source(hub, SMALL_SHARDS, **settings)
    for local in (False, True):
        if fault:
            message = f"the local Hub was told to fail, {hub.token}"
            hub.fail("POST", "/lfs-files/duplicate", message=message, **fault)
        build = write_build(tmp_path / str(local), SMALL_SHARDS, source.pinned, local)
        status, output = run(build, "--push")
        assert why in output
        assert status == (0 if local else 1)
        if not local:
            assert "--weights FOLDER" in output
            assert not hub.repositories[REPO].tags
            assert set(hub.repositories[REPO].files) == {".gitattributes"}
    assert published(hub)
    assert len(asked(hub, "PUT", "/lfs/")) == 3


def test_shards_that_are_here_and_there_reach_the_destination(hub, run, tmp_path):
    source = add_source(hub, SMALL_SHARDS)
    build = write_build(tmp_path / "build", SMALL_SHARDS, source.pinned, local=True)
    assert run(build, "--push")[0] == 0
    assert published(hub)
    assert len(asked(hub, "PUT", "/lfs/")) == (0 if COPIES_ACROSS else 3)


@copies_across
def test_a_source_with_other_weights_is_not_copied(hub, run, tmp_path):
    source = add_source(hub, SHARDS)
    build = write_build(tmp_path / "build", SHARDS, source.head)  # the later weights
    status, output = run(build, "--push")
    assert status == 1 and "is not what CODE_MANIFEST.json lists" in output
    assert not writes(hub)


def test_code_only_leaves_weights_out_and_alone(hub, run, tmp_path, of_this_clone):
    source = add_source(hub, SHARDS)
    build = write_build(tmp_path / "build", SHARDS, source.pinned)
    assert run(build, "--push", "--code-only", repo="our-org/code")[0] == 0
    files = {*CODE, *FILES, MANIFEST, ".gitattributes"}
    code = hub.repositories["our-org/code"]
    assert set(code.files) == files
    assert code.tags == {"v0.1.0": code.head}

    full = write_build(tmp_path / "full", SMALL_SHARDS, local=True)
    assert run(full, "--push")[0] == 0
    full = of_this_clone(tmp_path / "newer", SMALL_SHARDS, local=True, version="0.1.1", code=NEWER)
    assert run(full, "--push", "--code-only")[0] == 0
    repository = hub.repositories[REPO]
    assert repository.files["modeling_chatglm.py"].content == NEWER["modeling_chatglm.py"]
    assert repository.files.keys() >= SMALL_SHARDS.keys() | {INDEX}
    assert set(repository.tags) == {"v0.1.0", "v0.1.1"}

    others = {"model.safetensors": shard(0, 10)}
    other = of_this_clone(tmp_path / "other", others, local=True, version="0.2.0")
    status, output = run(other, "--push", "--code-only")
    assert status == 1 and "publish without --code-only" in output
    assert set(repository.tags) == {"v0.1.0", "v0.1.1"}


def test_a_pull_request_is_opened_once_and_tags_nothing(hub, run, build):
    status, output = run(build, "--push", "--pr")
    assert status == 1 and "nothing to open a pull request against" in output
    repository = hub.add_repository("strangers/model")
    head = repository.head
    for _ in range(2):
        status, output = run(build, "--push", "--pr", repo="strangers/model")
        assert status == 0, output
    assert "Pull request 1 has all of this already" in output
    assert repository.head == head and not repository.tags
    assert set(repository.pull_requests) == {"1"}
    files = repository.commit_of("refs/pr/1").files
    assert {name: files[name].content for name in SMALL_SHARDS} == SMALL_SHARDS


def test_foreign_content_is_refused_unless_told(hub, run, build):
    repository = hub.add_repository(REPO, {"README.md": b"mine", "their.bin": b"theirs"})
    head = repository.head
    status, output = run(build, "--push")
    assert status == 1
    assert "2 files" in output and "README.md, their.bin" in output and "--allow-foreign" in output
    assert repository.head == head and not writes(hub)
    assert run(build, "--push", "--allow-foreign")[0] == 0
    assert repository.files["their.bin"].content == b"theirs"
    assert repository.files["README.md"].content == FILES["README.md"]


def test_files_that_were_added_to_ours_are_foreign_too(hub, run, build, tmp_path, of_this_clone):
    run(build, "--push")
    repository = hub.repositories[REPO]
    repository.add_commit("refs/heads/main", {"notes.txt": b"theirs"}, "theirs")
    newer = of_this_clone(tmp_path / "newer", SMALL_SHARDS, local=True, version="0.2.0")
    status, output = run(newer, "--push")
    assert status == 1 and "notes.txt" in output
    assert run(newer, "--push", "--allow-foreign")[0] == 0
    assert repository.files["notes.txt"].content == b"theirs"


def test_files_of_our_older_version_are_deleted(hub, run, tmp_path, of_this_clone):
    code = CODE | {"left.py": b"# of the older version\n"}
    run(of_this_clone(tmp_path / "older", SMALL_SHARDS, local=True, code=code), "--push")
    shards = {"model.safetensors": shard(0, 1000)}
    newer = of_this_clone(tmp_path / "newer", shards, local=True, version="0.2.0", code=NEWER)
    status, output = run(newer, "--push")
    assert status == 0
    assert "delete 4 (" in output
    repository = hub.repositories[REPO]
    assert set(repository.files) == {
        *NEWER, *FILES, *shards, INDEX, MANIFEST, ".gitattributes"
    }  # fmt: skip
    assert repository.tags["v0.2.0"] == repository.head != repository.tags["v0.1.0"]
    assert len(repository.commits) == 3


def test_a_tag_is_never_moved(hub, run, build, tmp_path, of_this_clone, monkeypatch):
    run(build, "--push")
    repository = hub.repositories[REPO]
    head = repository.head
    newer = of_this_clone(tmp_path / "newer", SMALL_SHARDS, local=True, code=NEWER)
    before = len(writes(hub))
    status, output = run(newer, "--push")
    monkeypatch.setattr(verifying, "REMOTE", build)
    assert status == 1
    assert f"has the tag v0.1.0 at {head}" in output and "raise the version" in output
    assert repository.head == head and len(writes(hub)) == before

    moved = repository.add_commit("refs/heads/main", {".gitattributes": b""}, "somebody")
    status, output = run(build, "--push")
    assert status == 1 and f"its head is {moved}" in output
    assert repository.tags == {"v0.1.0": head}


def test_a_folder_that_is_not_as_built_is_not_sent(hub, run, tmp_path):
    status, output = run(tmp_path, "--push")
    assert status == 1 and "is no built folder" in output
    for name, content, message in [
        ("modeling_chatglm.py", b"# edited", "changed since the build"),
        ("notes.txt", b"forgotten", "not from the build"),
        ("LICENSE", None, "missing"),
        ("model-00001-of-00003.safetensors", b"short", "5 bytes, not"),
        ("model-00001-of-00003.safetensors", b"x" * 40000, "has sha256"),
    ]:
        build = write_build(tmp_path / f"{message}", SMALL_SHARDS, local=True)
        if content is None:
            (build / name).unlink()
        else:
            (build / name).write_bytes(content)
        status, output = run(build, "--push")
        assert status == 1 and name in output and message in output
    assert not asked(hub, "PUT") and not asked(hub, "POST", "/commit/")


CUT = "the connection failed"
NO_HUB = "the server's answer is not that of a Hub"
FAULTS = {
    "401 creating": ("POST", "/repos/create", {"status": 401}, "the token is not valid"),
    "403 creating": ("POST", "/repos/create", {"status": 403}, "the token may not do this"),
    "409 creating": ("POST", "/repos/create", {"status": 409}, "somebody else made it"),
    "500 validating": ("POST", "/validate-yaml", {"status": 500}, "the server fails"),
    "401 asking": ("POST", "/preupload/", {"status": 401}, "the token is not valid"),
    "404 asking": ("POST", "/preupload/", {"status": 404}, "not there, or not for this token"),
    "403 uploading": ("PUT", "/lfs/", {"status": 403}, "the token may not do this"),
    "507 uploading": ("PUT", "/lfs/", {"status": 507}, "disk is full"),
    "400 committing": ("POST", "/commit/", {"status": 400}, "the server refuses"),
    "412 committing": ("POST", "/commit/", {"status": 412}, "the branch has moved"),
    "429 committing": (
        "POST", "/commit/", {"status": 429, "headers": {"Retry-After": "7"}}, "wait 7 seconds",
    ),
    "429 of the Hub, committing": (
        "POST", "/commit/", {"status": 429, "headers": {"ratelimit": '"api";r=0;t=8'}},
        "wait 8 seconds",
    ),
    "500 committing": ("POST", "/commit/", {"status": 500}, "the server fails"),
    "cut committing": ("POST", "/commit/", {"cut_request": 100}, CUT),
    "cut after committing": ("POST", "/commit/", {"cut_response": 0}, CUT),
    "401 tagging": ("POST", "/tag/", {"status": 401}, "the token is not valid"),
    "409 tagging": ("POST", "/tag/", {"status": 409}, "somebody else made it"),
    "500 tagging": ("POST", "/tag/", {"status": 500}, "the server fails"),
    "cut tagging": ("POST", "/tag/", {"cut_request": 1}, CUT),
    "cut after tagging": ("POST", "/tag/", {"cut_response": 0}, CUT),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_message_and_the_next_run_completes(hub, run, build, name):
    method, path, fault, message = FAULTS[name]
    hub.fail(method, path, message=f"echo of {hub.token}", **fault)
    status, output = run(build, "--push")
    assert status == 1
    assert message in output
    assert "run the same command again" in output
    repository = hub.repositories.get(REPO)
    if repository and name != "cut after tagging":
        assert not repository.tags
    if repository and "tagging" not in name and name != "cut after committing":
        assert len(repository.commits) == 1
    status, output = run(build, "--push")
    assert status == 0, output
    assert published(hub)
    # What has arrived is not sent again: at most the file that failed.
    assert len(asked(hub, "PUT")) == 3 + ("uploading" in name)


@pytest.mark.parametrize(
    "fault, message",
    [
        ({"status": 401}, "the token is not valid"),
        ({"status": 429}, "too many requests: wait a little"),
        ({"status": 500}, "the server fails"),
        ({"cut_request": 50}, CUT),
        ({"cut_response": 0}, CUT),
    ],
)
@copies_across
def test_a_copy_that_fails_but_is_not_refused_uploads_nothing(hub, run, tmp_path, fault, message):
    source = add_source(hub, SMALL_SHARDS)
    build = write_build(tmp_path / "build", SMALL_SHARDS, source.pinned, local=True)
    hub.fail("POST", "/lfs-files/duplicate", **fault)
    status, output = run(build, "--push")
    assert status == 1 and message in output
    assert not hub.repositories[REPO].tags
    assert run(build, "--push")[0] == 0
    assert published(hub)
    assert not asked(hub, "PUT")


def test_an_invalid_card_stops_it_with_the_reason(hub, run, tmp_path):
    card = CARD.replace("license: other", "license: [a]").encode()
    build = write_build(tmp_path / "build", SMALL_SHARDS, local=True, card=card)
    status, output = run(build, "--push")
    assert status == 1 and "card: license is ['a'], expected 'other'" in output
    assert not hub.requests


@pytest.mark.slow
def test_a_connection_cut_for_good_in_a_file_ends_in_a_message(hub, run, build):
    # The client tries six times, in 23 seconds.
    hub.fail("PUT", "/lfs/", times=99, cut_request=1000)
    status, output = run(build, "--push")
    assert status == 1
    start = f"hub_upload: publishing to {REPO}: {CUT} ("
    end = "); no tag was made; run the same command again: it finds what has arrived and "
    assert output.splitlines()[-1].startswith(start) and output.endswith(end + "does the rest")
    assert {request.status for request in asked(hub, "PUT")} == {None}
    assert len(hub.repositories[REPO].commits) == 1 and not hub.repositories[REPO].tags
    hub.faults.clear()
    assert run(build, "--push")[0] == 0
    assert published(hub)


# 0.36 does not wait when it is asked to.
WAITS = int(huggingface_hub.__version__.split(".")[0]) >= 1
UPLOADING = [("POST", "/preupload/"), ("POST", "/objects/batch"), ("PUT", "/lfs/")]


@pytest.mark.parametrize("method, path", UPLOADING)
def test_too_many_requests_once_are_waited_for_or_told(hub, run, build, method, path):
    hub.fail(method, path, status=429, headers={"Retry-After": "0"})
    status, output = run(build, "--push")
    assert status == (0 if WAITS else 1)
    if not WAITS:
        assert "too many requests: wait 0 seconds (429: " in output
        assert "run the same command again" in output
        assert not hub.repositories[REPO].tags and len(hub.repositories[REPO].commits) == 1
        assert run(build, "--push")[0] == 0
    assert published(hub)
    # What has arrived is not sent again: only the file that was refused.
    assert len(asked(hub, "PUT")) == 3 + (method == "PUT")


@pytest.mark.slow
@pytest.mark.parametrize("method, path", UPLOADING)
def test_too_many_requests_for_good_are_told(hub, run, build, method, path):
    hub.fail(method, path, times=99, status=429, headers={"Retry-After": "0"})
    status, output = run(build, "--push")
    assert status == 1 and "too many requests: wait 0 seconds (429: " in output
    assert not hub.repositories[REPO].tags and len(hub.repositories[REPO].commits) == 1
    hub.faults.clear()
    assert run(build, "--push")[0] == 0
    assert published(hub)


ANSWERS = {
    ("POST", "/repos/create"): [{}, []],
    ("GET", f"/api/models/{REPO}$"): [{}, [], {"id": REPO}, {"id": REPO, "siblings": [{}]}],
    ("GET", "/revision/v0.1.0"): [{}, [], {"id": REPO}],
    ("GET", "/tree/"): [{}, [], [{}], [{"type": "file"}], {"error": "none"}],
    ("POST", "/validate-yaml"): [[]],
    ("POST", "/preupload/"): [{}, [], {"files": []}, {"files": [{}]}],
    ("POST", "/objects/batch"): [{}, [], {"objects": [{}]}, {"objects": [1]}],
    ("POST", "/commit/"): [{}, []],
}


@pytest.mark.parametrize(
    "method, path, answer",
    [(*where, answer) for where, answers in ANSWERS.items() for answer in answers],
    ids=str,
)
def test_an_answer_of_no_hub_is_one_message(hub, run, build, method, path, answer):
    if path != "/repos/create":
        hub.add_repository(REPO)
    hub.fail(method, path, times=99, answer=answer)
    status, output = run(build, "--push")
    assert status == 1 and NO_HUB in output and "HF_ENDPOINT" in output
    assert "run the same command again" in output
    there = hub.repositories.get(REPO)
    assert there is None or (not there.tags and len(there.commits) == 1)
    hub.faults.clear()
    assert run(build, "--push")[0] == 0
    assert published(hub)


@pytest.mark.parametrize("answer", [{}, [], {"branches": []}], ids=str)
def test_an_answer_of_no_hub_about_pull_requests_opens_none(hub, run, build, answer):
    repository = hub.add_repository("strangers/model")
    hub.fail("GET", "/refs", answer=answer)
    status, output = run(build, "--push", "--pr", repo="strangers/model")
    assert status == 1 and NO_HUB in output and not repository.pull_requests
    assert run(build, "--push", "--pr", repo="strangers/model")[0] == 0


@copies_across
@pytest.mark.parametrize(
    "path, answer",
    [("/paths-info/", {}), ("/paths-info/", []), ("/paths-info/", [{}]), ("/duplicate", [])],
    ids=str,
)
def test_an_answer_of_no_hub_about_a_copy_uploads_nothing(hub, run, tmp_path, path, answer):
    source = add_source(hub, SMALL_SHARDS)
    build = write_build(tmp_path / "build", SMALL_SHARDS, source.pinned, local=True)
    hub.fail("POST", path, answer=answer)
    status, output = run(build, "--push")
    assert status == 1 and NO_HUB in output and not hub.repositories[REPO].tags
    assert run(build, "--push")[0] == 0
    assert published(hub) and not asked(hub, "PUT")


def test_a_branch_that_moves_while_publishing_is_left_alone(hub, run, build):
    repository = hub.add_repository(REPO)
    moved = []

    def move():
        files = {".gitattributes": b"* text\n"}
        moved.append(repository.add_commit("refs/heads/main", files, "somebody else"))

    hub.fail("POST", "/commit/", call=move)
    status, output = run(build, "--push")
    assert status == 1 and "the branch has moved" in output and "Nothing was committed" in output
    assert repository.head == moved[0] and not repository.tags
    assert run(build, "--push")[0] == 0
    assert repository.files[".gitattributes"].content == b"* text\n"
    assert repository.tags == {"v0.1.0": repository.head}


def test_a_commit_that_is_not_what_was_sent_is_not_tagged(hub, run, build):
    repository = hub.add_repository(REPO)
    before = repository.head

    def lose_a_file():
        if repository.head != before:
            repository.files["config.json"] = File(b"lost", False)

    hub.fail("GET", "/tree/", times=3, call=lose_a_file)
    status, output = run(build, "--push")
    assert status == 1 and "config.json differs" in output and "not tagged" in output
    assert not repository.tags
    hub.faults.clear()
    assert run(build, "--push")[0] == 0
    assert repository.files["config.json"].content == FILES["config.json"]
    assert repository.tags == {"v0.1.0": repository.head}


def test_a_commit_that_cannot_be_read_back_is_tagged_by_the_next_run(hub, run, build):
    hub.add_repository(REPO)
    before = hub.repositories[REPO].head
    hub.fail("GET", rf"/tree/(?!{before})", status=403)
    status, output = run(build, "--push")
    assert status == 1 and "neither verified nor tagged" in output
    assert not hub.repositories[REPO].tags
    assert run(build, "--push")[0] == 0
    assert published(hub)


def test_a_tag_that_is_answered_and_not_made_is_told_and_made_by_the_next_run(hub, run, build):
    repository = hub.add_repository(REPO)
    hub.fail("POST", "/tag/", answer={})
    status, output = run(build, "--push")
    assert status == 1 and "Tagged" not in output
    assert f"tag v0.1.0 now, at commit {repository.head}, but it is not there" in output
    assert "run the same command again" in output and not repository.tags
    assert run(build, "--push")[0] == 0
    assert published(hub)


def test_a_tag_that_lands_on_another_commit_is_told_and_left(hub, run, build):
    repository = hub.add_repository(REPO)
    first = repository.head
    hub.fail(
        "POST",
        "/tag/",
        answer={},
        call=lambda: repository.refs.update({"refs/tags/v0.1.0": first}),
    )
    status, output = run(build, "--push")
    assert status == 1 and f"at commit {repository.head}, but it is at {first}" in output
    assert "raise the version" in output and repository.tags == {"v0.1.0": first}


def test_a_tag_that_cannot_be_read_back_is_told(hub, run, build):
    hub.add_repository(REPO)
    hub.fail("GET", "/revision/v0.1.0", after=1, times=99, status=403)
    status, output = run(build, "--push")
    assert status == 1 and "reading back the tag" in output and "is complete" in output
    hub.faults.clear()
    assert run(build, "--push")[0] == 0
    assert published(hub)


def test_a_stranger_s_token_and_organisation_are_told(hub, run, build, monkeypatch):
    status, output = run(build, "--push", repo="another-org/model")
    assert status == 1 and "the token may not do this" in output and "(403: " in output
    monkeypatch.setenv("HF_TOKEN", "hf_wrongsecret")
    for arguments in ([], ["--push"]):
        status, output = run(build, *arguments)
        assert status == 1 and "the token is not valid" in output
        assert "hf_wrongsecret" not in output
    assert not hub.repositories


def test_a_hub_that_is_not_there_is_told(hub, run, build, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    status, output = run(build, "--push")
    assert status == 1 and CUT in output and "nothing was changed" in output


def test_signatures_of_addresses_are_not_printed():
    told = "PUT http://hub/lfs/a?X-Amz-Signature=b&c=d failed (url: /lfs/a?X-Amz-Signature=b), why?"
    assert without_secrets(told) == "PUT http://hub/lfs/a failed (url: /lfs/a), why?"


def command(hub, build, tmp_path, *arguments, variables=None, **settings):
    environment = {"PATH": "", "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "hub_upload", "publish", build, "--repo", REPO, *arguments],
        env=environment | (variables or hub.environment),
        cwd=ROOT,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | settings,
    )


def finish(process):
    try:
        output, errors = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"hung: {process.communicate()[0]}")
    return process.returncode, (output or "") + (errors or "")


@pytest.mark.parametrize(
    "copied",
    [
        pytest.param(False, marks=pytest.mark.exhaustive),
        pytest.param(True, marks=[copies_across, pytest.mark.slow]),
    ],
)
def test_killed_at_any_request_the_next_run_completes(hub, tmp_path, copied):
    pinned = add_source(hub, SMALL_SHARDS).pinned if copied else None
    build = write_build(tmp_path / "build", SMALL_SHARDS, pinned, local=not copied)
    status, output = finish(command(hub, build, tmp_path, "--push"))
    assert status == 0 and published(hub), output
    assert hub.token not in output
    number = len(hub.requests)
    assert number > 10
    for killed_at in range(number):
        del hub.repositories[REPO]
        started = queue.Queue()

        def kill(started=started):
            process = started.get(timeout=60)
            process.kill()
            process.wait(60)

        hub.fail("*", "", after=killed_at, call=kill)
        process = command(hub, build, tmp_path, "--push")
        started.put(process)
        status, output = finish(process)
        assert status == -signal.SIGKILL, f"not killed at request {killed_at}: {output}"
        repository = hub.repositories.get(REPO)
        assert repository is None or not repository.tags or published(hub)
        status, output = finish(command(hub, build, tmp_path, "--push"))
        assert status == 0, f"killed at request {killed_at}: {output}"
        assert published(hub)


@copies_across
def test_a_server_without_xet_names_the_variable(hub, build, tmp_path):
    pytest.importorskip("hf_xet")
    variables = hub.environment | {"HF_HUB_DISABLE_XET": "0"}
    status, output = finish(command(hub, build, tmp_path, "--push", variables=variables))
    assert status == 1 and "set HF_HUB_DISABLE_XET=1" in output and "Traceback" not in output
    assert finish(command(hub, build, tmp_path, "--push"))[0] == 0
    assert published(hub)


@pytest.mark.parametrize("refused", [False, pytest.param(True, marks=copies_across)])
def test_an_upload_shows_how_far_it_is_unless_told_not_to(hub, tmp_path, refused):
    pinned = add_source(hub, SMALL_SHARDS, region="eu").pinned if refused else None
    build = write_build(tmp_path / "build", SMALL_SHARDS, pinned, local=True)
    pipe = {"stderr": subprocess.PIPE}
    for shown in (True, False):
        hub.repositories.pop(REPO, None)
        variables = hub.environment | ({} if shown else {"HF_HUB_DISABLE_PROGRESS_BARS": "1"})
        process = command(hub, build, tmp_path, "--push", variables=variables, **pipe)
        output, bars = process.communicate(timeout=60)
        assert process.returncode == 0 and published(hub), bars
        assert ("The server does not copy" in output) == refused
        for name, content in SMALL_SHARDS.items():
            # Name, share, and how many of how many bytes.
            size = f"{len(content) / 1000:.1f}k"
            bar = re.search(rf"{name}: 100%\|.*\| {size}/{size} \[", bars)
            assert bool(bar) == shown, bars
        assert bool(re.search(r"Upload 3 LFS files: 100%\|.*\| 3/3 \[", bars)) == shown
        assert shown or bars == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_to_a_full_disk_stops_before_anything_is_sent(hub, build, tmp_path):
    with open("/dev/full", "w") as full:
        pipe = {"stdout": full, "stderr": subprocess.PIPE}
        status, errors = finish(command(hub, build, tmp_path, "--push", **pipe))
    assert status == 1
    assert errors.startswith("hub_upload: no space left on a disk") and errors.count("\n") == 1
    assert not writes(hub)
    assert finish(command(hub, build, tmp_path, "--push"))[0] == 0
    assert published(hub)


def test_code_beside_shards_without_their_index_is_refused(
    hub, run, build, tmp_path, of_this_clone
):
    assert run(build, "--push")[0] == 0
    HfApi(token=hub.token).delete_file(INDEX, REPO)
    newer = of_this_clone(tmp_path / "newer", SMALL_SHARDS, local=True, version="0.1.1")
    status, output = run(newer, "--code-only", "--push")
    assert status == 1 and "publish without --code-only" in output
    assert set(hub.repositories[REPO].tags) == {"v0.1.0"}
    assert run(newer, "--push")[0] == 0
    assert INDEX in hub.repositories[REPO].files


# What is read is what is sent


@pytest.mark.parametrize("name", ["modeling_chatglm.py", "config.json", "README.md", MANIFEST])
@pytest.mark.parametrize("at", ["/api/models/", "/repos/create", "/preupload/", "/commit/"])
def test_a_small_file_that_changes_meanwhile_is_sent_as_it_was_checked(hub, run, build, name, at):
    content = (build / name).read_bytes()

    def exchange():
        (build / name).write_bytes(b"x" * len(content))

    hub.fail("*", at, call=exchange)
    assert run(build, "--push")[0] == 0
    assert (build / name).read_bytes() != content
    assert hub.repositories[REPO].files[name].content == content
    assert set(hub.repositories[REPO].tags) == {"v0.1.0"}


def test_weights_that_change_while_they_are_sent_are_not_committed(hub, run, build, monkeypatch):
    """On a server that takes what it is sent for what it was told."""
    shard = build / sorted(SMALL_SHARDS)[0]
    content = shard.read_bytes()

    def upload(handler, repo, oid):
        handler.hub.repositories[repo].objects[oid] = handler.body
        return {}

    monkeypatch.setattr(local_hub._Handler, "lfs_upload", upload)
    hub.fail("POST", "/objects/batch", call=lambda: shard.write_bytes(b"x" * len(content)))
    status, output = run(build, "--push")
    assert status == 1 and f"{shard.name} changed while it was sent: nothing was" in output
    assert len(hub.repositories[REPO].commits) == 1 and not hub.repositories[REPO].tags


def test_weights_that_the_server_keeps_in_git_are_those_of_the_build(build):
    """Read back, they are compared with what was listed, whatever is on the disk by then."""
    shard = build / sorted(SMALL_SHARDS)[0]
    content, other = shard.read_bytes(), b"x" * shard.stat().st_size
    want = Wanted(len(content), hashlib.sha256(content).hexdigest(), path=shard)

    def there(stored: bytes) -> RepoFile:
        return RepoFile(path=shard.name, size=len(stored), oid=git_hash(stored))

    assert want.is_at(there(content)) and not want.is_at(there(other))
    shard.write_bytes(other)
    assert not want.is_at(there(other))


LINKED = ["LICENSE", "README.md", "model-00001-of-00003.safetensors", "notes.txt", "folder"]


@pytest.mark.parametrize("name", LINKED)
def test_a_link_out_of_the_folder_is_not_published(hub, run, build, tmp_path, name):
    secret = tmp_path / "id_rsa"
    if name == "folder":
        secret.mkdir()
        (secret / "key").write_bytes(b"BEGIN PRIVATE KEY")
    else:
        path = build / name
        # Even with what the manifest lists: it may be another thing at the next reading.
        secret.write_bytes(path.read_bytes() if path.exists() else b"BEGIN PRIVATE KEY")
        path.unlink(missing_ok=True)
    (build / name).symlink_to(secret)
    status, output = run(build, "--push")
    assert status == 1 and str(build / name) in output and str(secret) in output
    assert "is not followed" in output and not hub.requests


def test_what_verify_would_refuse_is_not_sent(hub, run, tmp_path):
    """Also where the manifest agrees; and what differs from this clone is not published by it."""
    build = write_build(tmp_path / "a", SMALL_SHARDS, local=True, code=NEWER)
    status, output = run(build, "--push")
    assert status == 1 and "does not pass `python -m hub_upload verify`: code: 1 of" in output
    shards = {"model.safetensors": b"no safetensors"}
    status, output = run(write_build(tmp_path / "b", shards, local=True), "--push")
    assert status == 1 and "weight files: model.safetensors: " in output
    card = CARD.replace("# card", "# card\n\nNothing was finetuned.").encode()
    build = write_build(tmp_path / "c", SMALL_SHARDS, local=True, card=card)
    status, output = run(build)
    assert status == 1 and "card: it says 'Nothing was finetuned'" in output
    assert not hub.requests


def test_control_characters_of_names_are_shown_as_escapes(hub, run, build):
    odd = "a\x1b[2J\u202etxt\nTagged v9"
    hub.add_repository(REPO, {odd: b"theirs"})
    for arguments in ([], ["--allow-foreign"]):
        status, output = run(build, *arguments)
        assert status == (0 if arguments else 1)
        assert r"a\x1b[2J\u202etxt" in output
        assert "\x1b" not in output and "\u202e" not in output
        assert not [line for line in output.splitlines() if line.startswith("Tagged")]


def test_a_commit_between_ours_and_the_tag_is_not_tagged(hub, run, build):
    repository = hub.add_repository(REPO)
    ours = []

    def commit():
        ours.append(repository.head)
        repository.add_commit("refs/heads/main", {"theirs.txt": b"theirs"}, "somebody else")

    hub.fail("POST", "/tag/", call=commit)
    assert run(build, "--push")[0] == 0
    assert repository.tags == {"v0.1.0": ours[0]} and repository.head != ours[0]
    files = repository.commit_of("v0.1.0").files
    assert files["modeling_chatglm.py"].content == CODE["modeling_chatglm.py"]


def test_code_beside_weights_that_are_not_whole_is_refused(
    hub, run, build, tmp_path, of_this_clone
):
    assert run(build, "--push")[0] == 0
    there = hub.repositories[REPO]
    shard = next(name for name in there.files if name.endswith(".safetensors"))
    HfApi(token=hub.token).delete_file(shard, REPO)
    newer = of_this_clone(tmp_path / "newer", SMALL_SHARDS, local=True, version="0.1.1")
    status, output = run(newer, "--code-only", "--push")
    assert status == 1 and "publish without --code-only" in output
    assert set(there.tags) == {"v0.1.0"}
