"""A server that takes connections and never answers: everybody gives up, and names it."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants

from hub_upload.__main__ import main
from hub_upload.faults import end_silence
from tests.helpers.fake_build import SMALL_SHARDS, write_build
from tests.helpers.local_hub import redirect_client

ROOT = Path(__file__).parents[2]
ID = "our-org/model"
COMMANDS = {
    "build": ["build", "--weights", f"{ID}@{'a' * 40}", "--out", "built"],
    "build of no commit": ["build", "--weights", ID, "--out", "built"],
    "verify": ["verify", ID],
    "publish": ["publish", "build", "--repo", ID],
    "publish --push": ["publish", "build", "--repo", ID, "--push"],
}


@pytest.fixture
def silent():
    """The address of a server that accepts whoever comes, and says nothing."""
    listening = socket.create_server(("127.0.0.1", 0))
    kept = []

    def accept():
        while True:
            try:
                kept.append(listening.accept()[0])
            except OSError:
                return

    thread = threading.Thread(target=accept)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join()
    for connection in kept:
        connection.close()


@pytest.fixture
def patient(monkeypatch):
    """Wait for a second only; afterwards as long as always."""
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "1")
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    yield
    monkeypatch.undo()
    end_silence()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_server_that_never_answers_is_named(name, silent, patient, tmp_path, monkeypatch, capfd):
    write_build(tmp_path / "build", SMALL_SHARDS, local=True)
    monkeypatch.chdir(tmp_path)
    redirect_client(silent, monkeypatch)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    ended = []
    thread = threading.Thread(target=lambda: ended.append(main(COMMANDS[name])), daemon=True)
    thread.start()
    thread.join(30)
    output, errors = capfd.readouterr()
    assert ended == [1], "it still waits"
    assert f"{silent} did not answer within 1 s" in errors and errors.count("\n") == 1, errors
    assert "hf_secret" not in output + errors
    assert not (tmp_path / "built").exists()


PATCHED = """
import time, transformers, glm4v_patched
glm4v_patched.apply()
names = ["AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor"]
for auto, model in [(name, "our-org/model") for name in names] + [("AutoConfig", "our-org/cached")]:
    begun = time.monotonic()
    try:
        print(auto, type(getattr(transformers, auto).from_pretrained(model)).__name__)
    except TimeoutError as error:
        print(auto, error)
    assert time.monotonic() - begun < 10
"""


def test_patched_auto_classes_name_a_server_that_never_answers_or_take_the_cache(
    silent, built, tmp_path
):
    commit = "a" * 40
    cache = tmp_path / "home" / "hub" / "models--our-org--cached"
    (cache / "snapshots" / commit).mkdir(parents=True)
    config = (built / "config.json").read_bytes()
    (cache / "snapshots" / commit / "config.json").write_bytes(config)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    environment = os.environ | {
        "HF_ENDPOINT": silent,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_ETAG_TIMEOUT": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", PATCHED]
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    ended = subprocess.run(command, timeout=120, **options)
    assert ended.returncode == 0, ended.stderr
    *refused, loaded = ended.stdout.splitlines()
    assert len(refused) == 4 and loaded == "AutoConfig ChatGLMConfig"
    for line in refused:
        assert f"{silent} did not answer within 1 s" in line, line
        assert line.endswith(f"and {ID} is not in the cache")
    assert "did not answer within 1 s" in ended.stderr and "the cache is loaded" in ended.stderr
