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

import pytest
from huggingface_hub import constants

from hub_upload import files
from hub_upload.build import build, read_source
from hub_upload.errors import reason_of, without_secrets
from hub_upload.layout import our_code
from hub_upload.publish import read_build
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.publishable import NAME, TAG, UPSTREAM, as_files, is_published, is_whole


@pytest.fixture
def ask(hub, original, built, run, nothing_runs, tmp_path):
    """Run one of the three by its name; its status, and its line of error."""
    source = f"{UPSTREAM}@{hub.add_repository(UPSTREAM, as_files(original)).head}"
    hub.add_repository("our-org/there", as_files(built))
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
    if command == "publish" and (there := hub.repositories.get(NAME)):
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


NO_HUB, FAILED = "the server's answer is not that of a Hub", r"the connection failed \("
ODD = f"{NO_HUB}|Consistency check|has another hash|Response from http|is not what|not a valid"
KINDS = {
    **{str(status): ({"status": status}, str(status)) for status in (401, 403, 404, 412, 500)},
    "400": ({"status": 400}, "Bad request"),
    "429": ({"status": 429, "headers": {"Retry-After": "0"}}, "429"),
    "an empty object": ({"answer": {}}, ODD),
    "an empty list": ({"answer": []}, ODD),
    "a cut request": ({"cut_request": 1}, FAILED),
    "no answer to what was done": ({"cut_response": 0}, FAILED),
    "half an answer": ({"cut_response": 10}, FAILED),
    "silence": ({"call": say_nothing}, "did not answer within 0.2 s"),
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
    fault, _ = KINDS[kind]
    hub.fail("*", "", after=at, message=f"echo of {hub.token}", **fault)
    with waited_for(0.2 if kind == "silence" else 60):
        status, told = ask(command)
    hub.faults.clear()
    hub.errors.clear()
    assert status == 0 or "run the same command again" in told, told
    assert nothing_is_wrong(hub, command, built, tmp_path)
    # A header of weights that cannot be read fails its check; all else ends the command.
    assert re.findall(r"(?m)^(\w+) +failed", told) in ([], ["weights"]), told
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_that_stays_is_one_line_with_its_kind(kind, hub, ask):
    fault, message = KINDS[kind]
    hub.fail("*", "/resolve/.*/config.json", times=999, message=f"echo of {hub.token}", **fault)
    with waited_for(0.2 if kind == "silence" else 60):
        status, told = ask("verify")
    hub.errors.clear()
    assert (status, told.count("\n")) == (1, 0) and re.search(message, told), told
    assert "run the same command again" in told


def test_an_error_that_nobody_foresaw_is_one_line_and_says_how_to_see_more(ask, monkeypatch):
    monkeypatch.setattr(files.HfApi, "model_info", lambda *of, **more: {}["x"])
    status, told = ask("verify")
    assert (status, told.count("\n")) == (1, 0) and NO_HUB in told and "KeyError: 'x'" in told
    assert "python -X dev -m hub_upload" in told
    monkeypatch.setattr(sys, "flags", SimpleNamespace(dev_mode=True))
    with pytest.raises(KeyError):
        ask("verify")


# Disks


@pytest.mark.parametrize("file", ["tokenizer.json", "modeling_chatglm.py"])
def test_a_disk_that_is_full_for_the_output_is_one_line(file, original, built, run, tmp_path):
    """The one is written by a library in Rust, the other by this program."""
    out = tmp_path / "into" / "out"
    command = ("build", "--weights", original, "--out", out, "--name", NAME)
    for earlier in (False, True):
        with files_of_at_most((built / file).stat().st_size - 1):
            status, told = run(*command)
        assert status == 1 and "no space left" in told and "make room" in told, told
        assert [path.name for path in out.parent.glob("*")] == ["out"] * earlier
        assert not earlier or as_files(out) == as_files(built)
        assert run(*command)[0] == 0


def test_a_message_keeps_neither_the_token_nor_what_signs_an_address(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    told = without_secrets("hf_secret: 403 for url 'https://s3/lfs/a?X-Amz-Signature=0ab&b=c', no")
    assert told == "<token>: 403 for url 'https://s3/lfs/a', no"


def test_a_full_disk_and_a_full_quota_are_told_alike():
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        of_rust = RuntimeError(f"cannot write (os error {number})")
        for error in (OSError(number, "cannot write"), of_rust):
            assert "make room" in reason_of(error)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, as Linux has it")
def test_a_full_disk_stops_a_command_before_anything_is_sent(hub, ask, monkeypatch):
    """That of the output, and that of what is downloaded."""
    with monkeypatch.context() as patch, open("/dev/full", "w") as disk:
        patch.setattr(sys, "stdout", disk)
        status, told = ask("publish")
    assert status == 1 and told.startswith("hub_upload: no space left on a disk")
    assert NAME not in hub.repositories
    with files_of_at_most(1000):
        status, told = ask("verify")
    assert status == 1 and "no space left" in told and "make room" in told, told


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
        del hub.repositories[NAME]
        hub.fail("*", "", after=at, times=1000, cut_response=0)
        assert publish(folder, "--push")[0] == 1, at
        hub.faults.clear()
        there = hub.repositories.get(NAME)
        assert there is None or not there.tags or is_published(hub, folder), at
        assert publish(folder, "--push")[0] == 0 and is_published(hub, folder), at
