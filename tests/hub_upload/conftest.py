"""The original repository, what is built from it, and the command line in this process.

hub_upload needs huggingface_hub 1.33. Where an older one is installed, all of this is skipped.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http

ROOT = Path(__file__).parents[2]
OLD = tuple(map(int, huggingface_hub.__version__.split(".")[:2])) < (1, 33)


class SkippedModule(pytest.Module):
    def collect(self):
        pytest.skip(
            f"huggingface_hub {huggingface_hub.__version__} is too old for hub_upload, which needs "
            "1.33: pip install -U huggingface_hub 'transformers>=5'",
            allow_module_level=True,
        )


def pytest_pycollect_makemodule(module_path, parent):
    return SkippedModule.from_parent(parent, path=module_path) if OLD else None


@pytest.fixture(scope="session")
def original(tmp_path_factory) -> Path:
    """Read only."""
    from tests.helpers.publishable import write_original

    return write_original(tmp_path_factory.mktemp("original") / "source")


@pytest.fixture(scope="session")
def built(original, tmp_path_factory) -> Path:
    """Read only."""
    from hub_upload.build import build, read_source
    from tests.helpers.publishable import NAME

    out = tmp_path_factory.mktemp("built") / "out"
    build(read_source(str(original)), out, NAME)
    return out


@pytest.fixture
def changed(original, tmp_path) -> Path:
    """A source of one's own to change."""
    return shutil.copytree(original, tmp_path / "source")


@pytest.fixture
def copy(built, tmp_path) -> Path:
    """A build of one's own to damage."""
    return shutil.copytree(built, tmp_path / "copy")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """An empty Hub for this process, whose client does not wait before it tries again."""
    from hub_upload.errors import limit_silence
    from tests.helpers.local_hub import LocalHub

    with LocalHub() as hub:
        hub.redirect_client(monkeypatch)
        for name, value in hub.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: None))
        yield hub
    monkeypatch.undo()
    limit_silence()


@pytest.fixture
def run(monkeypatch, capfd):
    """Run a command; its status and what it printed, which holds no token and no traceback."""
    from hub_upload.__main__ import main

    def run(*arguments: object) -> tuple[int, str]:
        status = main(list(map(str, arguments)))
        output, errors = capfd.readouterr()
        assert "hf_localhub" not in output + errors and "hf_secret" not in output + errors
        assert "Traceback" not in output + errors
        own = [line for line in errors.splitlines() if line.startswith(("hub_upload: ", "--run"))]
        assert len(own) <= 1, errors
        return status, output + "".join(own)

    return run


@pytest.fixture
def load_check(monkeypatch, tmp_path):
    """Replace the process that runs the published code; what it prints is its last error."""
    from hub_upload import verify

    def replace(code: str) -> None:
        script = tmp_path / "load_check.py"
        script.write_text(f"import json, os, sys\nrequest = json.load(open(sys.argv[1]))\n{code}\n")
        monkeypatch.setattr(verify, "LOAD_CHECK", script)

    return replace


@pytest.fixture
def nothing_runs(load_check):
    """The process that would run the published code says that all is well."""
    from hub_upload.load_check import STEPS

    said = "".join(json.dumps([name, "passed", "-"]) + "\n" for name in STEPS)
    load_check(f"open(request['results'], 'w').write({said!r})")


@pytest.fixture
def cli():
    """Run a command in a process of its own."""

    def cli(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "hub_upload", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.run(command, cwd=ROOT, env=os.environ | environment, timeout=600, **pipes)

    return cli
