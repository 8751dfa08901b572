"""Faults of servers, connections and disks in all three commands, and kills: one line with the cure
and without the token, nothing wrong or half-written, and the next run completes."""

import errno
import re
import shutil
import sys
import time
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from huggingface_hub import constants

from glm4v_patched.models.adopt import read_our_code
from hub_upload import publish as publishing
from hub_upload.build import build_model_repository, read_source
from hub_upload.hub import RETRY_HINT, HfApi, without_secrets
from hub_upload.publish import read_built_folder
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.publishable import NAME, TAG, UPSTREAM, as_files, is_complete, is_published


@pytest.fixture
def ask(hub, original, built, run, nothing_runs, tmp_path):
    """Run one of the three commands by name; return its status and output."""
    source = f"{UPSTREAM}@{hub.add_repository(UPSTREAM, as_files(original)).head}"
    hub.add_repository("our-org/there", as_files(built))
    hub.add_repository(NAME)
    commands = {
        "build": ("build", "--weights", source, "--out", tmp_path / "into/out", "--name", NAME),
        "verify": ("verify", "our-org/there"),
        "publish": ("publish", built, "--repo", NAME, "--push"),
    }
    return lambda command: run(*commands[command])


def state_is_consistent(hub, command: str, built: Path, tmp_path: Path) -> bool:
    """Return whether a command has left either the state before it or a complete result."""
    if command == "build" and (into := tmp_path / "into").exists():
        assert [path.name for path in into.iterdir()] == ["out"] * (into / "out").exists()
        assert not (into / "out").exists() or read_built_folder(into / "out")
    if command == "publish":
        repository = hub.repositories[NAME]
        _, *others = repository.commits
        assert len(others) <= 1
        assert all(is_complete(repository.commits[oid], built) for oid in others)
        assert repository.tags in ({}, {TAG: repository.head} if others else {})
    return True


@contextmanager
def client_timeout(seconds: float):
    """Set the timeout of this process's client."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", str(seconds))
        for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
            patch.setattr(constants, name, seconds)
        yield


# Every kind of fault at every request


def stay_silent() -> None:
    time.sleep(5)
    raise ConnectionAbortedError


FAULT_KINDS: dict[str, dict] = {
    **{str(status): {"status": status} for status in (400, 401, 403, 404, 412, 500)},
    "429": {"status": 429, "headers": {"Retry-After": "0"}},
    "an empty object": {"answer": {}},
    "an empty list": {"answer": []},
    "a cut request": {"cut_request": 1},
    "no response to a completed request": {"cut_response": 0},
    "half a response": {"cut_response": 10},
    "silence": {"call": stay_silent},
}
# Requests of a run without faults.
NUM_REQUESTS = {"build": 23, "verify": 5 + 2 * (len(read_our_code()) + 13), "publish": 10}


def faults() -> list:
    """One kind of fault at each request of publish, and at three requests of the commands that only
    read; all others are exhaustive."""
    cases = []
    for command, number in NUM_REQUESTS.items():
        defaults = range(number) if command == "publish" else (0, number - 5, number - 1)
        for (i, kind), at in product(enumerate(FAULT_KINDS), range(number)):
            is_default = at in defaults and (i + 3 * at) % len(FAULT_KINDS) == 0
            marks = () if is_default else pytest.mark.exhaustive
            cases.append(pytest.param(command, kind, at, marks=marks))
    return cases


@pytest.mark.parametrize(("command", "kind", "at"), faults())
def test_a_fault_at_any_request_leaves_nothing_wrong_and_the_next_run_completes(
    command, kind, at, hub, ask, built, tmp_path
):
    fault = FAULT_KINDS[kind]
    hub.fail("*", "", after=at, message=f"echo of {hub.token}", **fault)
    with client_timeout(0.2 if kind == "silence" else 60):
        status, output = ask(command)
    hub.faults.clear()
    hub.errors.clear()
    assert state_is_consistent(hub, command, built, tmp_path)
    # An unreadable header of weights fails the check; any other fault ends the command.
    failed = re.findall(r"(?m)^(\w+) +failed", output)
    has_cure = output.count("hub_upload: ") == 1 and "run the same command again" in output
    assert status == 0 or has_cure or failed == ["weights"], output
    if command == "build" and status == 0:  # an output that exists is refused
        shutil.rmtree(tmp_path / "into" / "out")
    assert ask(command)[0] == 0 and state_is_consistent(hub, command, built, tmp_path)
    if command == "publish":
        assert is_published(hub, built)
        # Files that have arrived are not sent again.
        sent = [request for request in hub.asked("PUT") if request.status == 200]
        assert len(sent) <= 2 + ("answer" in fault)


@pytest.mark.parametrize("command", NUM_REQUESTS)
def test_the_faults_reach_every_request(command, hub, ask):
    assert ask(command)[0] == 0
    assert len(hub.requests) == NUM_REQUESTS[command]


def test_an_unexpected_error_is_one_line_and_says_how_to_see_the_traceback(hub, ask, monkeypatch):
    hub.fail("GET", "/api/models/", answer={"id": f"echo of {hub.token}"}, times=9)
    status, output = ask("verify")
    assert (status, output.count("\n")) == (1, 0)
    assert f"{hub.endpoint} returned no commit" in output
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: {}["x"])
    status, output = ask("verify")
    assert (status, output.count("\n")) == (1, 0) and f"KeyError: 'x'; {RETRY_HINT}" in output
    assert hub.endpoint in output and "python -X dev -m hub_upload" in output
    monkeypatch.setattr(sys, "flags", SimpleNamespace(dev_mode=True))
    with pytest.raises(KeyError):
        ask("verify")


def test_a_disk_that_is_full_for_the_output_leaves_nothing_of_it(original, built, run, tmp_path):
    out = tmp_path / "into" / "out"
    command = ("build", "--weights", original, "--out", out, "--name", NAME)
    with files_of_at_most((built / "tokenizer.json").stat().st_size - 1):
        status, output = run(*command)
    assert status == 1 and "too large" in output, output
    assert not [*out.parent.glob("*")]
    assert run(*command)[0] == 0 and as_files(out) == as_files(built)


def test_messages_contain_neither_the_token_nor_signatures_of_urls(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    line = without_secrets("hf_secret: 403 for url 'https://s3/lfs/a?X-Amz-Signature=0ab&b=c', no")
    assert line == "<token>: 403 for url 'https://s3/lfs/a', no"


def test_output_that_cannot_be_written_stops_publishing_before_anything_is_sent(
    hub, ask, monkeypatch
):
    full = Mock(side_effect=OSError(errno.ENOSPC, "no space"))
    monkeypatch.setattr(publishing, "print_line", full)
    status, output = ask("publish")
    assert status == 1 and "no space" in output and len(hub.repositories[NAME].commits) == 1


@pytest.mark.parametrize("copied", [False, True])
def test_cut_off_at_any_request_the_next_run_completes(
    copied, hub, original, built, publish, tmp_path, nothing_runs
):
    """The last request is completed without a response, and none follows, as if killed."""
    folder = built
    if copied:
        folder = tmp_path / "without"
        head = hub.add_repository(UPSTREAM, as_files(original)).head
        build_model_repository(read_source(f"{UPSTREAM}@{head}"), folder, NAME)
    hub.requests.clear()
    assert publish(folder, "--push")[0] == 0
    for at in range(len(hub.requests)):
        hub.add_repository(NAME)
        hub.fail("*", "", after=at, times=1000, cut_response=0)
        assert publish(folder, "--push")[0] == 1, at
        hub.faults.clear()
        assert not hub.repositories[NAME].tags or is_published(hub, folder), at
        assert publish(folder, "--push")[0] == 0 and is_published(hub, folder), at
