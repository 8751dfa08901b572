"""What servers, connections, disks and kills do to all three commands: one line that says what to
do, without the token; nothing wrong or half-written; and the next run completes."""

import multiprocessing
import queue
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, close_session

from hub_upload import files
from hub_upload.__main__ import main
from hub_upload.errors import reason_of
from hub_upload.layout import our_code
from hub_upload.load_check import STEPS
from hub_upload.publish import read_build
from hub_upload.verify import CHECKS
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.local_hub import File, redirect_client
from tests.helpers.publishable import (
    NAME,
    SMALL_SHARDS,
    TAG,
    UPSTREAM,
    add_source,
    as_files,
    is_published,
    is_whole,
    waited_for,
    write_build,
)

by_name = pytest.mark.parametrize("command", ["build", "verify"])


@pytest.fixture
def ask(hub, original, built, run, nothing_runs, tmp_path):
    """Run build or verify by name; its status and its line of error."""
    source = f"{UPSTREAM}@{hub.add_repository(UPSTREAM, as_files(original)).head}"
    hub.add_repository(NAME, as_files(built))
    out = tmp_path / "into" / "out"
    commands = {"build": ("build", "--weights", source, "--out", out, "--name", NAME)}
    commands["verify"] = ("verify", NAME)
    ask = lambda command, *more: run(*commands[command], *more)  # noqa: E731
    ask.out = out
    return ask


def completes(hub, ask, command: str) -> bool:
    """Whether the next run does, and what the one before has left."""
    into = ask.out.parent
    assert not into.exists() or [*into.iterdir()] == []
    hub.faults.clear()
    assert ask(command)[0] == 0
    if command == "build":
        read_build(ask.out)
        assert [path.name for path in into.iterdir()] == ["out"]
    return True


LISTING, CONFIG = "/api/models/", "/resolve/.*/config.json"
NO_HUB, CUT = "the server's answer is not that of a Hub", "the connection failed \\("
LISTED = {"id": NAME, "sha": "b" * 40}
FAULTS = [
    ("*", LISTING, {"status": 401}, "401"),
    ("*", LISTING, {"cut_response": 10}, CUT),
    ("*", LISTING, {"answer": []}, NO_HUB),
    ("*", LISTING, {"answer": LISTED}, NO_HUB),
    ("*", LISTING, {"answer": LISTED | {"siblings": [{"rfilename": "config.json"}]}}, NO_HUB),
    ("*", CONFIG, {"status": 429}, "429"),
    ("*", CONFIG, {"answer": []}, "Response from http"),
    ("GET", CONFIG, {"answer": {}}, "Consistency check failed"),
    # An optional file: without it, the build would be another one.
    ("GET", "/resolve/.*/generation_config.json", {"status": 403}, "403"),
]


@by_name
@pytest.mark.parametrize(("method", "path", "fault", "message"), FAULTS, ids=str)
def test_a_fault_of_a_server_is_one_line(command, method, path, fault, message, hub, ask):
    hub.fail(method, path, times=999, message=f"echo of {hub.token}", **fault)
    status, told = ask(command)
    assert status == 1 and re.search(message, told) and told.count("\n") == 0, told
    assert "run the same command again" in told
    assert completes(hub, ask, command)


def test_a_mistake_of_ours_is_no_answer_of_a_server(hub, ask, monkeypatch):
    # It is the test's, and not the client's.
    monkeypatch.setattr(files.HfApi, "model_info", lambda *of, **more: {}["x"])
    with pytest.raises(KeyError):
        ask("verify")
    with pytest.raises(AttributeError) as odd:
        CommitOperationAdd(None, b"")
    assert re.search(NO_HUB, reason_of(odd.value))


@by_name
def test_a_changed_file_and_a_full_disk_are_one_line(command, hub, ask):
    with files_of_at_most(1000):
        status, told = ask(command)
    assert status == 1 and "no space left" in told and "make room" in told, told
    # Of the right size, and of another content than is listed.
    files = hub.repositories[UPSTREAM if command == "build" else NAME].files
    given = files["config.json"]
    other = File(b" " * len(given.content))
    hub.fail("HEAD", CONFIG, times=99, call=lambda: files.update({"config.json": other}))
    status, told = ask(command)
    assert status == 1 and "config.json has another hash" in told, told
    files["config.json"] = given
    assert completes(hub, ask, command)


COMMANDS = [
    ["build", "--weights", f"{NAME}@{'a' * 40}", "--out", "built"],
    ["build", "--weights", NAME, "--out", "built"],
    ["verify", NAME],
    ["publish", "build", "--repo", NAME, "--push"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_answer_and_no_server_are_told(command, hub, silent, run, made_up, monkeypatch):
    monkeypatch.chdir(made_up.parent)
    for server, message in {
        silent: f"{silent} did not answer within 0.2 s",
        "http://127.0.0.1:9": r"the connection failed \(.*refused",  # nothing listens there
    }.items():
        redirect_client(server, monkeypatch)
        begun = time.monotonic()
        with waited_for(0.2):
            status, told = run(*command)
        assert status == 1 and time.monotonic() - begun < 30
        assert re.search(message, told) and told.count("\n") == 0, told
        assert "run the same command again" in told and not Path("built").exists()


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_to_a_full_disk_stops_before_anything_is_sent(hub, ask, run, made_up, monkeypatch):
    there = {**hub.repositories}
    for command in (("verify", NAME), ("publish", made_up, "--repo", "our-org/new", "--push")):
        with monkeypatch.context() as patch, open("/dev/full", "w") as disk:
            patch.setattr(sys, "stdout", disk)
            status, told = run(*command)
            assert status == 1 and told.startswith("hub_upload: no space left on a disk")
    assert hub.repositories == there


# Every kind of fault at every request

KINDS = {
    **{str(status): {"status": status} for status in (400, 401, 403, 404, 412, 500)},
    "429": {"status": 429, "headers": {"Retry-After": "0"}},
    "an empty object": {"answer": {}},
    "an empty list": {"answer": []},
    "a cut request": {"cut_request": 1},
    "no answer to what was done": {"cut_response": 0},
    "half an answer": {"cut_response": 10},
    "silence": {"call": lambda: time.sleep(0.4)},
}
# Of a sound run. verify asks for each file in the same way, twice: some of them stand for all.
OF_FILES = 3 + 2 * (len(our_code()) + 8)
REQUESTS = {
    "publish": range(17),
    "verify": [*range(3), *range(3, OF_FILES, 6), *range(OF_FILES, OF_FILES + 12)],
}


def pairs(command: str, *always: int) -> list:
    """At each request some of the faults, always; all others behind the marker."""
    found = []
    for (i, fault), (number, at) in product(enumerate(KINDS), enumerate(REQUESTS[command])):
        marks = () if (i + 3 * number) % len(KINDS) in always else pytest.mark.exhaustive
        found.append(pytest.param(fault, at, id=f"{fault} at {at}", marks=marks))
    return found


@pytest.fixture
def planted(hub):
    """A fault, for as long as a command runs."""

    @contextmanager
    def planted(fault: str, at: int) -> Iterator[None]:
        hub.fail("*", "", after=at, message=f"echo of {hub.token}", **KINDS[fault])
        with waited_for(0.2 if fault == "silence" else 60):
            yield
        hub.faults.clear()

    yield planted
    hub.errors.clear()


@pytest.mark.parametrize(("fault", "at"), pairs("publish", 0, 6))
def test_publish_leaves_nothing_wrong(fault, at, hub, planted, publish, made_up):
    with planted(fault, at):
        status, told = publish(made_up, "--push")
    assert is_published(hub, NAME) if status == 0 else "run the same command again" in told, told
    if repository := hub.repositories.get(NAME):
        initial, *others = repository.commits
        assert len(others) <= 1 and all(is_whole(repository, commit) for commit in others)
        assert repository.tags in ({}, {TAG: repository.head} if others else {})
    assert publish(made_up, "--push")[0] == 0 and is_published(hub, NAME)
    # What has arrived is not sent again.
    sent = [request for request in hub.asked("PUT") if request.status == 200]
    assert len(sent) <= len(SMALL_SHARDS) + ("answer" in KINDS[fault])


@pytest.mark.parametrize(("fault", "at"), pairs("verify", 0))
def test_verify_passes_only_what_it_has_seen(fault, at, hub, planted, run, nothing_runs, made_up):
    hub.add_repository(NAME, as_files(made_up))
    with planted(fault, at):
        status, told = run("verify", NAME)
    passed = f"{len(CHECKS) + 1 + len(STEPS)} passed"
    assert passed in told if status == 0 else "run the same command again" in told, told
    # A header of weights that cannot be read fails its check; all else ends the command.
    assert re.findall(r"(?m)^(\w+) +failed", told) in ([], ["weights"]), told
    status, told = run("verify", NAME)
    assert status == 0 and passed in told, told


def test_the_sweeps_reach_every_request(hub, run, publish, nothing_runs, made_up):
    assert publish(made_up, "--push")[0] == 0
    sent = len(hub.requests)
    assert sent == len(REQUESTS["publish"])
    assert run("verify", NAME)[0] == 0
    assert len(hub.requests) - sent == max(REQUESTS["verify"]) + 1


@pytest.mark.parametrize("copied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_killed_at_any_request_the_next_run_completes(hub, tmp_path, copied):
    """A fork is killed; importing anew for each would take minutes."""
    pinned = add_source(hub, SMALL_SHARDS).pinned if copied else None
    build = write_build(tmp_path / "build", SMALL_SHARDS, pinned, local=not copied)
    output = tmp_path / "output"
    close_session()

    def child() -> None:
        with output.open("a") as file, redirect_stdout(file), redirect_stderr(file):
            sys.exit(main(["publish", str(build), "--repo", NAME, "--push"]))

    def publish(started: queue.Queue | None = None) -> int | None:
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        if started:
            started.put(process)
        process.join()
        return process.exitcode

    assert publish() == 0 and is_published(hub, NAME), output.read_text()
    number = len(hub.requests)
    assert number > 10
    for killed_at in range(number):
        del hub.repositories[NAME]
        started = queue.Queue()
        hub.fail("*", "", after=killed_at, call=lambda q=started: q.get().kill())
        assert publish(started) == -signal.SIGKILL, f"not killed at request {killed_at}"
        there = hub.repositories.get(NAME)
        assert there is None or not there.tags or is_published(hub, NAME)
        assert publish() == 0 and is_published(hub, NAME), f"killed at request {killed_at}"
    assert f"Tagged {TAG}" in output.read_text() and hub.token not in output.read_text()
