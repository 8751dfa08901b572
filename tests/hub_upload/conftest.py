"""Fixtures: the original repository, a build of it, and the command line in this process."""

import contextlib
import io
import shutil
import ssl
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import file_download
from huggingface_hub.utils import _http

from tests.helpers.legacy_repository import remote_code_under

# The local Hub uses plain HTTP, and creating a TLS context takes longer than all its requests.
CERTIFICATES = ssl.create_default_context()
# hub_upload needs huggingface_hub 1.33. Beside an older one, only test_load.py runs.
OLD = tuple(map(int, huggingface_hub.__version__.split(".")[:2])) < (1, 33)
collect_ignore_glob = ["test_[!l]*.py"] if OLD else []


@pytest.fixture(scope="session")
def original(tmp_path_factory) -> Path:
    """The original's folder; tests must not change it."""
    from tests.helpers.publishable import write_original

    return write_original(tmp_path_factory.mktemp("original") / "source")


@pytest.fixture(scope="session")
def built(original, tmp_path_factory) -> Path:
    """A build of the original; tests must not change it."""
    from hub_upload.build import build_model_repository, read_source
    from tests.helpers.publishable import NAME

    out = tmp_path_factory.mktemp("built") / "out"
    build_model_repository(read_source(str(original)), out, NAME)
    return out


@pytest.fixture
def copy(built, tmp_path) -> Path:
    """A copy of the build that a test may change."""
    return shutil.copytree(built, tmp_path / "copy")


@pytest.fixture
def hub(hub, monkeypatch):
    """An empty local Hub; this process's client has its token and retries without waiting."""
    from hub_upload.hub import limit_request_time

    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    for module in (_http, file_download):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(ssl, "create_default_context", lambda *_, **__: CERTIFICATES)
    yield hub
    monkeypatch.undo()
    limit_request_time()


@pytest.fixture
def run(capfd):
    """Run a command; return its status and output, after checking it for tokens and tracebacks."""
    from hub_upload.__main__ import main

    def run(*arguments: object) -> tuple[int, str]:
        status = main(list(map(str, arguments)))
        output, errors = capfd.readouterr()
        for unwanted in ("hf_localhub", "hf_secret", "Traceback"):
            assert unwanted not in output + errors
        messages = [line for line in errors.splitlines() if line.startswith("hub_upload: ")]
        assert len(messages) <= 1, errors
        return status, output + "".join(messages)

    return run


@pytest.fixture
def publish(hub, run):
    """Publish to a repository, which is created empty if it does not exist."""
    from tests.helpers.publishable import NAME

    def publish(folder: Path, *arguments: str, repo: str = NAME) -> tuple[int, str]:
        if repo not in hub.repositories:
            hub.add_repository(repo)
        return run("publish", folder, "--repo", repo, *arguments)

    return publish


@pytest.fixture
def load_check(monkeypatch, tmp_path, in_a_process):
    """Replace load_check.py by the given code."""
    from hub_upload import checks

    def replace(code: str) -> None:
        script = tmp_path / "load_check.py"
        script.write_text(f"import json, os, sys\n{code}\n")
        monkeypatch.setattr(checks, "LOAD_CHECK", script)

    return replace


@pytest.fixture
def nothing_runs(monkeypatch):
    """Skip the checks that are not about files: weights and rebuilding."""
    from hub_upload import checks, verify

    monkeypatch.setattr(checks, "require_complete_weights", lambda *_: 0)
    monkeypatch.setattr(verify, "check_files", lambda target: "not compared")


@pytest.fixture(scope="session", autouse=True)
def published_code():
    """Skip running the published code in all tests; yield the real function."""
    from hub_upload import checks

    real = checks.run_published_code
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "run_published_code", lambda *_: "it was not run")
        yield real


@pytest.fixture
def in_a_process(monkeypatch, published_code):
    """Run the published code in a process, as for users."""
    from hub_upload import checks

    monkeypatch.setattr(checks, "run_published_code", published_code)


@pytest.fixture
def in_process(monkeypatch):
    """Run the published code in this process, which has imported torch already."""
    from hub_upload import checks, load_check

    def run(python: str, source: Path, home: Path) -> str:
        with remote_code_under(home / "modules"), contextlib.redirect_stdout(io.StringIO()):
            try:
                return load_check.run(str(source))
            except Exception as error:
                raise ValueError(f"{type(error).__name__}: {error}") from None

    monkeypatch.setattr(checks, "run_published_code", run)
