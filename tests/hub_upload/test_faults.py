"""What servers, connections, disks and kills do to all three commands: one line that says what to
do, without the token; nothing wrong or half-written; and the next run completes."""

import errno
import re
import sys
import time
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from huggingface_hub import constants

from hub_upload import publish as publishing
from hub_upload.build import build, read_source
from hub_upload.hub import AGAIN, HfApi, without_secrets
from hub_upload.layout import our_code
from hub_upload.publish import read_build
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.publishable import NAME, TAG, UPSTREAM, as_files, is_published, is_whole


@pytest.fixture
def ask(hub, original, built, run, nothing_runs, tmp_path):
    """Run one of the three by its name; its status, and its line of error."""
    source = f"{UPSTREAM}@{hub.add_repository(UPSTREAM, as_files(original)).head}"
    hub.add_repository("our-org/there", as_files(built))
    hub.add_repository(NAME)
    commands = {
        "build": ("build", "--weights", source, "--out", tmp_path / "into/out", "--name", NAME),
        "verify": ("verify", "our-org/there"),
        "publish": ("publish", built, "--repo", NAME, "--push"),
    }
    return lambda command: run(*commands[command])


def nothing_is_wrong(hub, command: str, built: Path, tmp_path: Path) -> bool:
    """Whether what a command has left by now is what was there before, or all of it."""
    if command == "build" and (into := tmp_path / "into").exists():
        assert [path.name for path in into.iterdir()] == ["out"] * (into / "out").exists()
        assert not (into / "out").exists() or read_build(into / "out")
    if command == "publish":
        there = hub.repositories[NAME]
        _, *others = there.commits
        assert len(others) <= 1 and all(is_whole(there.commits[oid], built) for oid in others)
        assert there.tags in ({}, {TAG: there.head} if others else {})
    return True


@contextmanager
def waited_for(seconds: float):
    """The client of this process waits so long for an answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", str(seconds))
        for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
            patch.setattr(constants, name, seconds)
        yield


# Every kind of fault at every request


def say_nothing() -> None:
    time.sleep(5)
    raise ConnectionAbortedError


KINDS: dict[str, dict] = {
    **{str(status): {"status": status} for status in (400, 401, 403, 404, 412, 500)},
    "429": {"status": 429, "headers": {"Retry-After": "0"}},
    "an empty object": {"answer": {}},
    "an empty list": {"answer": []},
    "a cut request": {"cut_request": 1},
    "no answer to what was done": {"cut_response": 0},
    "half an answer": {"cut_response": 10},
    "silence": {"call": say_nothing},
}
# Of a sound run. The same is asked for each file: some of them stand for all.
NUMBER = {"build": 23, "verify": 5 + 2 * (len(our_code()) + 13), "publish": 13}


def faults() -> list:
    """Always one kind at each of the first and last requests; all others behind the marker."""
    found = []
    for command, number in NUMBER.items():
        ends = {*range(4), *range(number - 9, number)}
        for (i, kind), at in product(enumerate(KINDS), range(number)):
            always = at in ends and (i + 3 * at) % len(KINDS) == 0
            marks = () if always else pytest.mark.exhaustive
            found.append(pytest.param(command, kind, at, marks=marks))
    return found


@pytest.mark.parametrize(("command", "kind", "at"), faults())
def test_a_fault_at_any_request_leaves_nothing_wrong_and_the_next_run_completes(
    command, kind, at, hub, ask, built, tmp_path
):
    fault = KINDS[kind]
    hub.fail("*", "", after=at, message=f"echo of {hub.token}", **fault)
    with waited_for(0.2 if kind == "silence" else 60):
        status, told = ask(command)
    hub.faults.clear()
    hub.errors.clear()
    assert nothing_is_wrong(hub, command, built, tmp_path)
    # A header of weights that cannot be read fails its check; all else ends the command.
    failed = re.findall(r"(?m)^(\w+) +failed", told)
    ended = told.count("hub_upload: ") == 1 and "run the same command again" in told
    assert status == 0 or ended or failed == ["weights"], told
    assert ask(command)[0] == 0 and nothing_is_wrong(hub, command, built, tmp_path)
    if command == "publish":
        assert is_published(hub, built)
        # What has arrived is not sent again.
        sent = [request for request in hub.asked("PUT") if request.status == 200]
        assert len(sent) <= 2 + ("answer" in fault)


@pytest.mark.parametrize("command", NUMBER)
def test_the_faults_reach_every_request(command, hub, ask):
    assert ask(command)[0] == 0
    assert len(hub.requests) == NUMBER[command]


def test_an_error_that_nobody_foresaw_is_one_line_and_says_how_to_see_more(hub, ask, monkeypatch):
    hub.fail("GET", "/api/models/", answer={"id": f"echo of {hub.token}"}, times=9)
    status, told = ask("verify")
    assert (status, told.count("\n")) == (1, 0) and f"{hub.endpoint} lists no commit" in told
    monkeypatch.setattr(HfApi, "model_info", lambda *of, **more: {}["x"])
    status, told = ask("verify")
    assert (status, told.count("\n")) == (1, 0) and f"KeyError: 'x'; {AGAIN}" in told
    assert hub.endpoint in told and "python -X dev -m hub_upload" in told
    monkeypatch.setattr(sys, "flags", SimpleNamespace(dev_mode=True))
    with pytest.raises(KeyError):
        ask("verify")


# Disks


def test_a_disk_that_is_full_for_the_output_leaves_nothing_of_it(original, built, run, tmp_path):
    out = tmp_path / "into" / "out"
    command = ("build", "--weights", original, "--out", out, "--name", NAME)
    for earlier in (False, True):
        with files_of_at_most((built / "tokenizer.json").stat().st_size - 1):
            status, told = run(*command)
        assert status == 1 and "too large" in told, told
        assert [path.name for path in out.parent.glob("*")] == ["out"] * earlier
        assert not earlier or as_files(out) == as_files(built)
        assert run(*command)[0] == 0


def test_a_message_keeps_neither_the_token_nor_what_signs_an_address(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    told = without_secrets("hf_secret: 403 for url 'https://s3/lfs/a?X-Amz-Signature=0ab&b=c', no")
    assert told == "<token>: 403 for url 'https://s3/lfs/a', no"


def test_output_that_cannot_be_written_stops_publishing_before_anything_is_sent(
    hub, ask, monkeypatch
):
    monkeypatch.setattr(publishing, "say", Mock(side_effect=OSError(errno.ENOSPC, "no space")))
    status, told = ask("publish")
    assert status == 1 and "no space" in told and len(hub.repositories[NAME].commits) == 1


# Cut off for good


@pytest.mark.parametrize("copied", [False, True])
def test_cut_off_at_any_request_the_next_run_completes(
    copied, hub, original, built, publish, tmp_path, nothing_runs
):
    """What was asked last was done, and nothing is answered after it: as for one that is killed."""
    folder = built
    if copied:
        folder = tmp_path / "without"
        head = hub.add_repository(UPSTREAM, as_files(original)).head
        build(read_source(f"{UPSTREAM}@{head}"), folder, NAME)
    hub.requests.clear()
    assert publish(folder, "--push")[0] == 0
    for at in range(len(hub.requests)):
        hub.add_repository(NAME)
        hub.fail("*", "", after=at, times=1000, cut_response=0)
        assert publish(folder, "--push")[0] == 1, at
        hub.faults.clear()
        assert not hub.repositories[NAME].tags or is_published(hub, folder), at
        assert publish(folder, "--push")[0] == 0 and is_published(hub, folder), at
