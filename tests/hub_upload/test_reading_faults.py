"""What servers, connections and disks do to build and verify by name: one line that says what to
do, without the token; nothing half-written; and the next run completes."""

import json
import os
import re
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from hub_upload import verify as verifying
from hub_upload.__main__ import main
from hub_upload.build import differences
from hub_upload.stranger import NAMES, PASSED
from tests.helpers.local_hub import File, LocalHub
from tests.helpers.publishable import GENERATION, NAME, as_files

UPSTREAM = "zai-org/glm-4v-9b"
AGAIN = "run the same command again"
NO_HUB = "the server's answer is not that of a Hub"
LISTING, CONFIG = "/api/models/", "/resolve/.*/config.json"
by_name = pytest.mark.parametrize("command", ["build", "verify"])


@pytest.fixture
def hub(original, built, monkeypatch, tmp_path):
    """A Hub that has the original and a build of it, and an empty cache."""
    with LocalHub() as hub:
        hub.redirect_client(monkeypatch)
        for name, value in hub.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        hub.add_repository(UPSTREAM, as_files(original))
        hub.add_repository(NAME, as_files(built))
        yield hub


@pytest.fixture
def run(hub, capfd, monkeypatch, tmp_path):
    """Run a command; its status and its line of error. The published code is not run here."""
    checks = [{"name": name, "status": PASSED, "detail": "-"} for name in NAMES]
    told = "".join(json.dumps(check) + "\n" for check in checks)
    script = tmp_path / "script.py"
    script.write_text(
        f"import json, sys\nopen(json.load(open(sys.argv[1]))['results'], 'w').write({told!r})\n"
    )
    monkeypatch.setattr(verifying, "STRANGER", script)
    source = f"{UPSTREAM}@{hub.repositories[UPSTREAM].head}"
    arguments = {
        "build": ["--weights", source, "--out", str(tmp_path / "into" / "out"), "--name", NAME],
        "verify": [NAME],
    }

    def run(command, *more):
        status = main([command, *arguments[command], *more])
        output, errors = capfd.readouterr()
        assert hub.token not in output + errors
        assert "Traceback" not in output + errors
        own = [line for line in errors.splitlines() if line.startswith("hub_upload: ")]
        assert len(own) == ("failed" not in output and status == 1), errors
        return status, "".join(own) or output

    return run


@pytest.fixture
def completes(hub, run, tmp_path):
    """Whether the next run does, and what the one before has left."""

    def completes(command):
        into = tmp_path / "into"
        assert not into.exists() or [*into.iterdir()] == []
        hub.faults.clear()
        status, told = run(command)
        if command == "build":
            source = f"{UPSTREAM}@{hub.repositories[UPSTREAM].head}"
            assert differences(source, into / "out", NAME) == []
            assert [path.name for path in into.iterdir()] == ["out"]
        return status == 0

    return completes


FAULTS = {
    "401": ({"status": 401}, "not without a valid token.*hf auth login.*(401: "),
    "403": ({"status": 403}, "the token may not read this.*(403: "),
    "404": ({"status": 404}, "not there, or not for this token: check its name.*(404: "),
    "429": (
        {"status": 429, "headers": {"ratelimit": '"api";r=0;t=7'}},
        "too many requests: wait 7 seconds (429: ",
    ),
    "500": ({"status": 500}, "the server fails: wait a little (500: "),
    "cut": ({"cut_response": 0}, "the connection failed ("),
    "cut in the answer": ({"cut_response": 10}, "the connection failed ("),
}


def has(told: str, message: str) -> bool:
    return re.search(".*".join(map(re.escape, message.split(".*"))), told) is not None


@by_name
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_the_listing_is_one_line(command, fault, hub, run, completes):
    settings, message = FAULTS[fault]
    hub.fail("GET", LISTING, times=99, message=f"echo of {hub.token}", **settings)
    status, told = run(command)
    assert status == 1 and has(told, message) and AGAIN in told, told
    assert completes(command)


# The client asks again for a file, for up to 23 seconds.
AT_A_FILE = ["401", "403", "404"]
AT_A_FILE += [pytest.param(f, marks=pytest.mark.slow) for f in FAULTS if f not in AT_A_FILE]


@by_name
@pytest.mark.parametrize("fault", AT_A_FILE)
def test_a_fault_at_a_file_is_one_line(command, fault, hub, run, completes):
    settings, message = FAULTS[fault]
    if fault == "429":
        settings, message = {"status": 429}, "too many requests: wait a little (429: "
    hub.fail("GET", CONFIG, times=99, message=f"echo of {hub.token}", **settings)
    status, told = run(command)
    assert status == 1 and has(told, message) and AGAIN in told, told
    assert completes(command)


@by_name
def test_no_server_is_one_line(command, hub, run, completes, monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(hub, "endpoint", "http://127.0.0.1:9")  # nothing listens there
        hub.redirect_client(elsewhere)
        status, told = run(command)
    assert status == 1 and has(told, "the connection failed (.*refused") and AGAIN in told, told
    assert completes(command)


LISTED = {"id": NAME, "sha": "b" * 40}
ANSWERS = [
    ("GET", LISTING, {}),
    ("GET", LISTING, []),
    ("GET", LISTING, {"id": NAME}),
    ("GET", LISTING, LISTED),
    ("GET", LISTING, {"id": NAME, "siblings": []}),
    ("GET", LISTING, LISTED | {"siblings": [{}]}),
    ("GET", LISTING, LISTED | {"siblings": [{"rfilename": "config.json", "size": 1}]}),
    ("GET", LISTING, LISTED | {"siblings": [{"rfilename": "config.json", "blobId": "a"}]}),
    ("*", CONFIG, {}),
    ("*", CONFIG, []),
]


@by_name
@pytest.mark.parametrize("method, path, answer", ANSWERS, ids=str)
def test_an_answer_of_no_hub_is_one_line(command, method, path, answer, hub, run, completes):
    hub.fail(method, path, times=99, answer=answer)
    status, told = run(command)
    assert status == 1 and NO_HUB in told and "HF_ENDPOINT" in told and AGAIN in told, told
    assert completes(command)


@by_name
def test_a_file_of_another_size_is_one_line(command, hub, run, completes):
    hub.fail("GET", CONFIG, times=99, answer={})
    hub.fail("HEAD", CONFIG, times=99, call=lambda: None)  # this answer is as usual
    hub.faults.reverse()
    status, told = run(command)
    assert status == 1 and "a file did not arrive whole" in told and AGAIN in told, told
    assert completes(command)


@by_name
def test_a_file_of_the_right_size_and_other_content_is_one_line(command, hub, run, completes):
    name = UPSTREAM if command == "build" else NAME
    files = hub.repositories[name].files
    given = files["config.json"]
    size = len(given.content)

    def exchange():
        files["config.json"] = File(b" " * size, False)

    hub.fail("*", CONFIG, times=99, call=exchange)
    status, told = run(command)
    assert status == 1 and "config.json has another hash" in told and AGAIN in told, told
    files["config.json"] = given
    assert completes(command)


@pytest.mark.parametrize("fault", [{"answer": {}}, {"answer": []}, {"status": 403}])
def test_a_header_of_weights_that_cannot_be_read_fails_its_check(fault, hub, run, completes):
    hub.fail("GET", r"\d\.safetensors", times=99, message=f"echo of {hub.token}", **fault)
    status, told = run("verify")
    row = next(line for line in told.splitlines() if line.startswith("weight files"))
    assert status == 1 and "failed" in row and "reading the header of" in row and AGAIN in row
    assert completes("verify")


def test_what_a_stopped_run_left_in_the_cache_is_not_taken_for_all(hub, run, completes, tmp_path):
    """An optional file is missing there: without it, the build would be another one."""
    hub.fail("GET", "/resolve/.*/generation_config.json", times=99, status=403)
    assert run("build")[0] == 1
    hub.faults.clear()
    hub.fail("GET", LISTING, times=99, after=1, status=500)
    assert run("build")[0] == 0
    given = json.loads((tmp_path / "into" / "out" / "generation_config.json").read_text())
    assert given == GENERATION


# Disks


@contextmanager
def files_of_at_most(size: int):
    """What this process writes fails beyond that, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@by_name
def test_a_disk_that_is_full_for_the_cache_is_one_line(command, hub, run, completes):
    with files_of_at_most(1000):
        status, told = run(command)
    assert status == 1 and "no space left" in told and "make room" in told, told
    assert completes(command)


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("file", ["tokenizer.json", "modeling_chatglm.py"])
def test_a_disk_that_is_full_for_the_output_is_one_line(
    file, earlier, built, run, completes, tmp_path, monkeypatch
):
    """The one is written by a library in Rust, the other by this program."""
    out = tmp_path / "into" / "out"
    assert run("build")[0] == 0  # the cache is full
    before = as_files(out)
    if not earlier:
        out.rename(tmp_path / "elsewhere")
    limit = (built / file).stat().st_size - 1
    with files_of_at_most(limit):
        status, told = run("build")
    assert status == 1 and "no space left" in told and "make room" in told, told
    if earlier:
        assert as_files(out) == before and [path.name for path in out.parent.iterdir()] == ["out"]
    else:
        assert completes("build")


full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")


@full
def test_a_report_to_a_full_disk_is_one_line(run):
    status, told = run("verify", "--json", "/dev/full")
    assert status == 1 and told.startswith("hub_upload: no space left on a disk"), told


@full
@pytest.mark.slow
def test_output_to_a_full_disk_is_one_line(original, tmp_path):
    command = [sys.executable, "-m", "hub_upload", "build", "--check"]
    command += ["--weights", original, "--out", tmp_path / "missing"]
    with open("/dev/full", "w") as disk:
        # Output waits until the end, whatever the tests run under.
        environment = {name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"}
        pipe = {"stdout": disk, "stderr": subprocess.PIPE, "text": True}
        ended = subprocess.run(command, env=environment, **pipe)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("hub_upload: no space left on a disk")
