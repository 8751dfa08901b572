"""Every kind of fault at every request of publish and verify: no wrong state, no token, no pass of
what was not seen, and the next run completes."""

import json
import time

import pytest
from huggingface_hub import constants

import glm4v_patched
from hub_upload import verify as verifying
from hub_upload.__main__ import main
from hub_upload.faults import end_silence
from hub_upload.files import MANIFEST
from hub_upload.stranger import NAMES, PASSED
from tests.helpers.fake_build import CODE, FILES, INDEX, SMALL_SHARDS, write_build
from tests.helpers.local_hub import LocalHub

REPO = "our-org/model"
TAG = f"v{glm4v_patched.__version__}"
FAULTS = {
    **{str(status): {"status": status} for status in (400, 401, 403, 404, 412, 500)},
    "429": {"status": 429, "headers": {"Retry-After": "0"}},
    "an empty object": {"answer": {}},
    "an empty list": {"answer": []},
    "a cut request": {"cut_request": 1},
    "no answer to what was done": {"cut_response": 0},
    "half an answer": {"cut_response": 10},
    "silence": {"call": lambda: time.sleep(1.5)},
}
# Of a sound run. verify asks for each file in the same way, so some of them stand for all.
REQUESTS = {"publish": range(19), "verify": [*range(4), *range(4, 46, 6), *range(46, 58)]}


def pairs(command: str) -> list:
    """Each fault at one request, always; all others behind the marker."""
    requests = REQUESTS[command]
    found = []
    for i, fault in enumerate(FAULTS):
        for at in requests:
            quick = at == requests[5 * i % len(requests)]
            marks = () if quick else pytest.mark.exhaustive
            found.append(pytest.param(fault, at, id=f"{fault} at {at}", marks=marks))
    return found


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that is waited for a second."""
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "1")
    for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
        monkeypatch.setattr(constants, name, 1)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with LocalHub() as hub:
        hub.redirect_client(monkeypatch)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub
        hub.errors.clear()
    monkeypatch.undo()
    end_silence()


@pytest.fixture
def run(hub, capfd):
    def run(*arguments) -> tuple[int, str]:
        status = main([*arguments])
        output, errors = capfd.readouterr()
        assert hub.token not in output + errors
        assert "Traceback" not in output + errors
        return status, output + errors

    return run


def is_whole(hub: LocalHub, commit: str) -> bool:
    files = hub.repositories[REPO].commits[commit].files
    wanted = CODE | FILES | SMALL_SHARDS
    assert set(files) == {*wanted, INDEX, MANIFEST, ".gitattributes"}
    return all(files[name].content == content for name, content in wanted.items())


def plant(hub: LocalHub, fault: str, at: int) -> None:
    hub.fail("*", "", after=at, message=f"echo of {hub.token}", **FAULTS[fault])


@pytest.mark.parametrize(("fault", "at"), pairs("publish"))
def test_publish_leaves_nothing_wrong(fault, at, hub, run, tmp_path):
    build = write_build(tmp_path / "build", SMALL_SHARDS, local=True)
    command = ("publish", str(build), "--repo", REPO, "--push")
    plant(hub, fault, at)
    status, told = run(*command)
    repository = hub.repositories.get(REPO)
    if status == 0:
        assert repository.tags == {TAG: repository.head}, told
    else:
        assert told.count("hub_upload: ") == 1, told
    if repository:
        initial, *others = repository.commits
        assert len(others) <= 1 and all(is_whole(hub, commit) for commit in others)
        assert repository.tags in ({}, {TAG: repository.head} if others else {})
    hub.faults.clear()
    status, told = run(*command)
    assert status == 0, told
    repository = hub.repositories[REPO]
    assert len(repository.commits) == 2 and is_whole(hub, repository.head)
    assert repository.tags == {TAG: repository.head}


@pytest.mark.parametrize(("fault", "at"), pairs("verify"))
def test_verify_passes_only_what_it_has_seen(fault, at, hub, run, tmp_path, monkeypatch):
    checks = [{"name": name, "status": PASSED, "detail": "-"} for name in NAMES]
    said = "".join(json.dumps(check) + "\n" for check in checks)
    script = tmp_path / "script.py"
    script.write_text(
        f"import json, sys\nopen(json.load(open(sys.argv[1]))['results'], 'w').write({said!r})\n"
    )
    monkeypatch.setattr(verifying, "STRANGER", script)
    build = write_build(tmp_path / "build", SMALL_SHARDS, local=True)
    hub.add_repository(REPO, {path.name: path.read_bytes() for path in build.iterdir()})
    plant(hub, fault, at)
    status, told = run("verify", REPO)
    passed = f"{len(NAMES) + 14} passed"
    if status == 0:  # the client has asked again
        assert passed in told, told
    else:
        assert told.startswith("hub_upload: ") or " failed" in told.splitlines()[-1], told
    hub.faults.clear()
    status, told = run("verify", REPO)
    assert status == 0 and passed in told, told


def test_the_sweeps_reach_every_request(hub, run, tmp_path, monkeypatch):
    build = write_build(tmp_path / "build", SMALL_SHARDS, local=True)
    assert run("publish", str(build), "--repo", REPO, "--push")[0] == 0
    sent = len(hub.requests)
    assert sent == len(REQUESTS["publish"])
    monkeypatch.setattr(verifying, "STRANGER", tmp_path / "missing")
    run("verify", REPO)
    assert len(hub.requests) - sent == max(REQUESTS["verify"]) + 1
