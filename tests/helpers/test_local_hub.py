"""The local Hub through the installed client: what it refuses, and what clients see of it.

What publish, verify and build ask of it, their own tests see.
"""

import hashlib

import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    get_session,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
)

from tests.helpers.local_hub import LocalHub, Sparse

pytest.importorskip("huggingface_hub", "1.33")  # as what is published needs

REPO = "our-org/model"
SHARD = b"weights " * 1000


@pytest.fixture
def hub(monkeypatch):
    with LocalHub() as hub:
        hub.redirect_client(monkeypatch)
        yield hub


@pytest.fixture
def api(hub):
    return HfApi(endpoint=hub.endpoint, token=hub.token)


def commit(api, *operations, name=REPO, **settings):
    return api.create_commit(name, operations, commit_message="a", **settings)


def test_repositories_are_made_and_seen_by_those_who_may(hub, api):
    assert api.whoami()["name"] == hub.user
    assert api.create_repo(REPO, private=True).repo_id == REPO and api.repo_info(REPO).private
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
    for name, token in ((REPO, False), ("our-org/missing", hub.token)):
        with pytest.raises(RepositoryNotFoundError):
            api.repo_info(name, token=token)


def test_regular_and_large_files_come_back_as_they_were_sent(hub, api, tmp_path):
    hub.add_repository(REPO)
    files = {"config.json": b"{}", "model.safetensors": SHARD, "notes/a.txt": b"a"}
    operations = [CommitOperationAdd(*item) for item in files.items()]
    oid = commit(api, *operations).oid
    assert hub.repositories[REPO].head == oid == api.repo_info(REPO).sha
    tree = {f.path: f for f in api.list_repo_tree(REPO, recursive=True)}
    assert set(tree) == {".gitattributes", "notes", *files}
    # What `git hash-object` says of the two bytes.
    assert tree["config.json"].blob_id == "9e26dfeeb6e641a33dae4961196235bdb965b21b"
    assert tree["config.json"].lfs is None and tree["config.json"].size == 2
    assert tree["model.safetensors"].lfs.sha256 == hashlib.sha256(SHARD).hexdigest()
    assert [c.title for c in api.list_repo_commits(REPO)] == ["a", "initial commit"]
    where = snapshot_download(REPO, endpoint=hub.endpoint, cache_dir=tmp_path)
    for name, content in files.items():
        with open(f"{where}/{name}", "rb") as file:
            assert file.read() == content
    # The same content is neither sent nor committed again.
    assert commit(api, *(CommitOperationAdd(*item) for item in files.items())).oid == oid
    assert len(hub.asked("PUT", "/lfs/")) == len(hub.asked("POST", "/commit/")) == 1
    commit(api, CommitOperationDelete("config.json"), CommitOperationDelete("notes/"))
    assert set(hub.repositories[REPO].files) == {".gitattributes", "model.safetensors"}
    with pytest.raises(EntryNotFoundError):
        commit(api, CommitOperationDelete("config.json"))


def test_what_is_sent_is_checked_and_what_is_cut_is_not_kept(hub, api):
    repository = hub.add_repository(REPO)
    url = f"{hub.endpoint}/lfs/{REPO}/{hashlib.sha256(SHARD).hexdigest()}"
    assert get_session().put(url, content=SHARD[1:]).status_code == 400
    assert not repository.objects
    with pytest.raises(ValueError, match="license"):
        commit(api, CommitOperationAdd("README.md", b"---\nlicense: [a]\n---\n"))
    hub.fail("PUT", "/lfs/", cut_request=100)
    hub.fail("POST", "/commit/", cut_response=0)
    with pytest.raises(Exception, match="(?i)disconnected|aborted|reset|connection"):
        commit(api, CommitOperationAdd("model.safetensors", SHARD))
    _, first, second = hub.asked("PUT", "/lfs/")
    assert (first.received, first.status, second.received) == (100, None, len(SHARD))
    assert repository.files["model.safetensors"].content == SHARD


def test_reading_bytes_that_do_not_exist_fails_the_test():
    with pytest.raises(AssertionError, match="of a file that has none"), LocalHub() as hub:
        hub.add_repository(REPO, {"a.safetensors": Sparse(1000, "cd" * 32, b"12345678")})
        url = hf_hub_url(REPO, "a.safetensors", endpoint=hub.endpoint)
        assert get_session().get(url, headers={"Range": "bytes=0-7"}).content == b"12345678"
        assert not hub.errors
        assert get_session().get(url).status_code == 500
