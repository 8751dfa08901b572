"""The local Hub through the installed client: what it stands for must be what clients see."""

import hashlib
import signal
import subprocess
import sys
from contextlib import suppress

import huggingface_hub
import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    constants,
    get_hf_file_metadata,
    get_session,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.helpers import local_hub
from tests.helpers.local_hub import LocalHub, Sparse

REPO = "our-org/model"
SHARD = b"weights " * 1000
SHA = hashlib.sha256(SHARD).hexdigest()
COPIES_ACROSS = "src_repo_id" in CommitOperationCopy.__dataclass_fields__
GIGABYTES = Sparse(size=2_000_000_000, sha256="ab" * 32)


@pytest.fixture
def hub(monkeypatch):
    with LocalHub() as hub:
        # Not endpoint= alone: 0.36 reads the answer to a commit with HF_ENDPOINT.
        hub.redirect_client(monkeypatch)
        yield hub


@pytest.fixture
def api(hub):
    return HfApi(endpoint=hub.endpoint, token=hub.token)


def asked(hub, method, part):
    return [r for r in hub.requests if r.method == method and part in r.path]


def add(path, content):
    return CommitOperationAdd(path, content)


def test_create_says_what_the_hub_says(hub, api):
    assert api.whoami()["name"] == hub.user
    assert api.create_repo(REPO, private=True).repo_id == REPO
    assert api.repo_info(REPO).private
    assert [f.path for f in api.list_repo_tree(REPO)] == [".gitattributes"]
    api.create_repo(REPO, exist_ok=True)
    for name, token, status in [
        (REPO, hub.token, 409),
        ("our-org/new", "hf_wrong", 401),
        ("our-org/new", False, 401),
        ("another-org/new", hub.token, 403),
    ]:
        with pytest.raises(HfHubHTTPError) as refused:
            api.create_repo(name, token=token)
        assert refused.value.response.status_code == status


def test_a_private_repository_is_not_there_for_strangers(hub, api):
    hub.add_repository(REPO, private=True)
    with pytest.raises(RepositoryNotFoundError):
        api.repo_info(REPO, token=False)
    with pytest.raises(RepositoryNotFoundError):
        api.repo_info("our-org/missing")


def test_upload_commits_regular_and_lfs_files(hub, api, tmp_path):
    hub.add_repository(REPO)
    (tmp_path / "model.safetensors").write_bytes(SHARD)
    operations = [
        add("config.json", b"{}"),
        add("model.safetensors", tmp_path / "model.safetensors"),
        add("notes/a.txt", b"a"),
    ]
    commit = api.create_commit(REPO, operations, commit_message="first")

    assert hub.repositories[REPO].head == commit.oid == api.repo_info(REPO).sha
    tree = {f.path: f for f in api.list_repo_tree(REPO, recursive=True)}
    assert set(tree) == {
        ".gitattributes",
        "config.json",
        "model.safetensors",
        "notes",
        "notes/a.txt",
    }
    assert tree["config.json"].lfs is None and tree["config.json"].size == 2
    # What `git hash-object` says of the two bytes.
    assert tree["config.json"].blob_id == "9e26dfeeb6e641a33dae4961196235bdb965b21b"
    assert (tree["model.safetensors"].lfs.sha256, tree["model.safetensors"].size) == (
        SHA,
        len(SHARD),
    )
    assert [f.path for f in api.list_repo_tree(REPO, "notes")] == ["notes/a.txt"]
    assert [c.title for c in api.list_repo_commits(REPO)] == ["first", "initial commit"]
    (info,) = api.get_paths_info(REPO, ["model.safetensors", "missing"])
    assert info.lfs.sha256 == SHA
    siblings = {f.rfilename: f for f in api.repo_info(REPO, files_metadata=True).siblings}
    assert siblings["model.safetensors"].lfs.sha256 == SHA
    (upload,) = asked(hub, "PUT", "/lfs/")
    assert upload.received == len(SHARD)


def test_the_same_content_is_neither_sent_nor_committed_again(hub, api):
    hub.add_repository(REPO, {"config.json": b"{}", "model.safetensors": SHARD})
    head = hub.repositories[REPO].head
    files = [add("config.json", b"{}"), add("model.safetensors", SHARD)]
    assert api.create_commit(REPO, files, commit_message="again").oid == head
    assert not asked(hub, "PUT", "/lfs/") and not asked(hub, "POST", "/commit/")


def test_delete_removes_files_and_folders(hub, api):
    hub.add_repository(REPO, {"a": b"a", "b/c": b"c", "b/d": b"d"})
    gone = [CommitOperationDelete("a"), CommitOperationDelete("b/")]
    api.create_commit(REPO, gone, commit_message="delete")
    assert set(hub.repositories[REPO].files) == {".gitattributes"}
    with pytest.raises(EntryNotFoundError):
        api.create_commit(REPO, gone[:1], commit_message="delete")


def test_a_moved_branch_is_412_and_changes_nothing(hub, api):
    repository = hub.add_repository(REPO, {"a": b"a"})
    before = api.repo_info(REPO).sha
    repository.add_commit("refs/heads/main", {"a": b"b"}, "somebody else")
    moved = repository.head
    with pytest.raises(HfHubHTTPError) as refused:
        api.create_commit(REPO, [add("c", b"c")], commit_message="c", parent_commit=before)
    assert refused.value.response.status_code == 412
    assert repository.head == moved


def test_pull_request_leaves_main_alone(hub, api):
    repository = hub.add_repository("strangers/model", {"a": b"a"})
    head = repository.head
    files = [add("a", b"b"), add("model.safetensors", SHARD)]
    commit = api.create_commit("strangers/model", files, commit_message="pr", create_pr=True)
    assert (commit.pr_num, commit.pr_revision) == (1, "refs/pr/1")
    assert repository.head == head
    refs = api.list_repo_refs("strangers/model", include_pull_requests=True)
    assert [(r.ref, r.target_commit) for r in refs.pull_requests] == [("refs/pr/1", commit.oid)]
    assert api.repo_info("strangers/model", revision="refs/pr/1").sha == commit.oid
    with pytest.raises(HfHubHTTPError) as refused:
        api.create_commit("strangers/model", [add("a", b"b")], commit_message="push")
    assert refused.value.response.status_code == 403


def test_tags_and_branches(hub, api):
    repository = hub.add_repository(REPO, {"a": b"a"})
    first = repository.head
    api.create_tag(REPO, tag="v1", revision=first)
    api.create_branch(REPO, branch="side", revision="v1")
    api.create_commit(REPO, [add("a", b"b")], commit_message="side", revision="side")
    assert api.repo_info(REPO, revision="v1").sha == repository.head == first
    assert {b.name for b in api.list_repo_refs(REPO).branches} == {"main", "side"}
    for create in (api.create_tag, api.create_branch):
        name = {"tag": "v1"} if create == api.create_tag else {"branch": "side"}
        with pytest.raises(HfHubHTTPError) as refused:
            create(REPO, **name)
        assert refused.value.response.status_code == 409
    api.delete_tag(REPO, tag="v1")
    with pytest.raises(RevisionNotFoundError):
        api.repo_info(REPO, revision="v1")


def copy(**where):
    return CommitOperationCopy("big.safetensors", "copied.safetensors", **where)


def test_copy_inside_a_repository(hub, api):
    repository = hub.add_repository(REPO, {"big.safetensors": GIGABYTES})
    api.create_commit(REPO, [copy()], commit_message="copy")
    assert repository.files["copied.safetensors"].content == GIGABYTES


@pytest.mark.skipif(not COPIES_ACROSS, reason=f"not in {huggingface_hub.__version__}")
def test_copy_across_repositories_moves_no_byte(hub, api):
    source = hub.add_repository("source/model", {"big.safetensors": GIGABYTES})
    target = hub.add_repository(REPO)
    where = {"src_repo_id": "source/model", "src_repo_type": "model", "src_revision": source.head}
    api.create_commit(REPO, [copy(**where)], commit_message="copy")
    assert target.files["copied.safetensors"].content == GIGABYTES
    assert sum(r.sent + r.received for r in hub.requests) < 10_000


@pytest.mark.skipif(not COPIES_ACROSS, reason=f"not in {huggingface_hub.__version__}")
def test_copy_across_regions_and_of_old_lfs_files_is_refused(hub, api):
    from huggingface_hub.errors import FileDuplicationError

    source = hub.add_repository("source/model", {"big.safetensors": GIGABYTES}, region="eu")
    target = hub.add_repository(REPO)
    where = {"src_repo_id": "source/model", "src_repo_type": "model", "src_revision": source.head}
    with pytest.raises(FileDuplicationError, match="storage regions differ"):
        api.create_commit(REPO, [copy(**where)], commit_message="copy")
    source.has_xet = False
    with pytest.raises(ValueError, match="no xet hash"):
        api.create_commit(REPO, [copy(**where)], commit_message="copy")
    assert "copied.safetensors" not in target.files


def test_resolve_tells_commit_size_and_etag(hub, api):
    repository = hub.add_repository(REPO, {"big.safetensors": GIGABYTES, "a": b"abc"})
    url = hf_hub_url(REPO, "big.safetensors", endpoint=hub.endpoint)
    metadata = get_hf_file_metadata(url, token=hub.token)
    assert metadata.commit_hash == repository.head
    assert (metadata.etag, metadata.size) == (GIGABYTES.sha256, GIGABYTES.size)
    for name, revision, error in [
        ("missing", "main", EntryNotFoundError),
        ("a", "missing", RevisionNotFoundError),
    ]:
        with pytest.raises(error):
            api.hf_hub_download(REPO, name, revision=revision)
    with pytest.raises(RepositoryNotFoundError):
        api.hf_hub_download("our-org/missing", "a")


@pytest.mark.parametrize(
    "span, status, content",
    [
        ("bytes=0-2", 206, b"012"),
        ("bytes=7-", 206, b"789"),
        ("bytes=-2", 206, b"89"),
        ("bytes=8-99", 206, b"89"),
        ("bytes=10-", 416, None),
    ],
)
def test_resolve_serves_ranges(hub, span, status, content):
    hub.add_repository(REPO, {"a": b"0123456789"})
    url = hf_hub_url(REPO, "a", endpoint=hub.endpoint)
    answer = get_session().get(url, headers={"Range": span})
    assert answer.status_code == status
    assert content is None or answer.content == content


def test_snapshot_download_gives_the_files_back(hub, tmp_path):
    files = {"config.json": b"{}", "model.safetensors": SHARD, "sub/a.txt": b"a"}
    hub.add_repository(REPO, files)
    where = snapshot_download(
        REPO, endpoint=hub.endpoint, cache_dir=tmp_path, allow_patterns=list(files)
    )
    for name, content in files.items():
        with open(f"{where}/{name}", "rb") as file:
            assert file.read() == content


def test_a_download_that_was_cut_goes_on_where_it_stopped(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.add_repository(REPO, {"model.safetensors": SHARD})
    hub.fail("GET", "/resolve/", cut_response=3000)
    where = {"endpoint": hub.endpoint, "cache_dir": tmp_path}
    with suppress(OSError):  # 0.36 gives up and goes on when it is called again
        hf_hub_download(REPO, "model.safetensors", **where)
    with open(hf_hub_download(REPO, "model.safetensors", **where), "rb") as file:
        assert file.read() == SHARD
    assert [r.sent for r in asked(hub, "GET", "/resolve/")] == [3000, len(SHARD) - 3000]


def test_an_invalid_card_is_refused_before_anything_is_sent(hub, api):
    hub.add_repository(REPO)
    with pytest.raises(ValueError, match="license"):
        card = b"---\nlicense: [a]\n---\n"
        api.create_commit(REPO, [add("README.md", card)], commit_message="card")
    with pytest.warns(UserWarning, match="empty or missing yaml"):
        api.create_commit(REPO, [add("README.md", b"# x")], commit_message="card")


@pytest.mark.parametrize("status", [401, 403, 412, 429, 500, 507])
def test_a_commit_fails_as_told_and_then_succeeds(hub, api, status):
    repository = hub.add_repository(REPO)
    head = repository.head
    hub.fail("POST", "/commit/", status=status, headers={"Retry-After": "1"})
    with pytest.raises(HfHubHTTPError) as failed:
        api.create_commit(REPO, [add("a", b"a")], commit_message="a")
    assert failed.value.response.status_code == status
    assert repository.head == head
    api.create_commit(REPO, [add("a", b"a")], commit_message="a")
    assert repository.files["a"].content == b"a"


def test_a_cut_commit_is_not_made_and_a_cut_answer_is(hub, api):
    repository = hub.add_repository(REPO)
    head = repository.head
    hub.fail("POST", "/commit/", cut_request=10)
    with pytest.raises(Exception, match="(?i)disconnected|aborted|reset|connection"):
        api.create_commit(REPO, [add("a", b"a")], commit_message="a")
    assert repository.head == head
    hub.fail("POST", "/commit/", cut_response=0)
    with pytest.raises(Exception, match="(?i)disconnected|aborted|reset|connection"):
        api.create_commit(REPO, [add("a", b"a")], commit_message="a")
    assert repository.files["a"].content == b"a"


def test_a_cut_upload_leaves_nothing_and_the_client_tries_again(hub, api):
    repository = hub.add_repository(REPO)
    hub.fail("PUT", "/lfs/", cut_request=100)
    api.create_commit(REPO, [add("model.safetensors", SHARD)], commit_message="a")
    first, second = asked(hub, "PUT", "/lfs/")
    assert (first.received, first.status, second.received) == (100, None, len(SHARD))
    assert repository.files["model.safetensors"].content == SHARD


def test_an_object_that_was_not_uploaded_cannot_be_committed(hub, api):
    repository = hub.add_repository("source/model", {"big.safetensors": GIGABYTES})
    head = repository.head
    del repository.objects[GIGABYTES.sha256]
    hub.namespaces.add("source")
    with pytest.raises(BadRequestError, match="not here"):
        api.create_commit("source/model", [copy()], commit_message="copy")
    assert repository.head == head


def test_an_upload_of_other_bytes_is_refused(hub):
    repository = hub.add_repository(REPO)
    answer = get_session().put(f"{hub.endpoint}/lfs/{REPO}/{SHA}", data=SHARD[1:])
    assert answer.status_code == 400
    assert not repository.objects


def test_it_serves_from_the_command_line():
    process = subprocess.Popen(
        [sys.executable, local_hub.__file__, "our-org"],
        stdout=subprocess.PIPE,
        text=True,
        # Where the tests run in the background, it is ignored and inherited so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        variables = dict(line.removeprefix("export ").rstrip().split("=") for line in lines)
        api = HfApi(endpoint=variables["HF_ENDPOINT"], token=variables["HF_TOKEN"])
        assert api.create_repo(REPO)
        assert variables["HF_HUB_DISABLE_XET"] == "1"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_reading_bytes_that_do_not_exist_fails_the_test(monkeypatch, tmp_path):
    with pytest.raises(AssertionError, match="of a file that has none"), LocalHub() as hub:
        head = Sparse(size=1000, sha256="cd" * 32, head=b"12345678")
        hub.add_repository(REPO, {"a.safetensors": head})
        url = hf_hub_url(REPO, "a.safetensors", endpoint=hub.endpoint)
        assert get_session().get(url, headers={"Range": "bytes=0-7"}).content == b"12345678"
        assert not hub.errors
        assert get_session().get(url).status_code == 500
