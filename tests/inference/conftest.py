"""Fixtures: data files with questions, and models that answer them."""

from pathlib import Path

import pytest

from glm4v_patched.cli import main
from glm4v_patched.inference.answer_worker import Answerer
from glm4v_patched.inference.questions import Generation
from glm4v_patched.inference.serving import connections
from glm4v_patched.models import loading
from glm4v_patched.models.find import find_source
from glm4v_patched.terminal_text import pip_install
from tests.helpers.answering import Files, write_files


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Files:
    return write_files(tmp_path_factory.mktemp("inference"))


@pytest.fixture(scope="session")
def load_answerer():
    """Load a folder's model, with answers of six tokens."""

    def load(folder: Path) -> Answerer:
        loaded = loading.load_with_processor(find_source(str(folder)), "cpu")
        return Answerer(loaded, Generation(max_new_tokens=6))

    return load


@pytest.fixture(scope="module")
def answerer(files, load_answerer) -> Answerer:
    return load_answerer(files.model)


@pytest.fixture(scope="module")
def adapted(files, load_answerer) -> Answerer:
    return load_answerer(files.adapters)


@pytest.fixture(scope="session")
def referenced(files) -> Path:
    """A data file of the rows that have a reference."""
    lines = files.data.read_text().splitlines(keepends=True)
    path = files.data.with_name("referenced.jsonl")
    path.write_text("".join(lines[at] for at in (0, 1, 3, 5)))
    return path


@pytest.fixture
def never_loads(monkeypatch) -> None:
    monkeypatch.setattr(
        loading, "load_with_processor", lambda *_: pytest.fail("the model was loaded")
    )


@pytest.fixture
def refused(never_loads, capsys, words, files):
    """Check that a command fails before a model is loaded, with a message that has these parts."""

    def check(command: list, *named: str, **changing) -> None:
        capsys.readouterr()
        assert main([*map(str, command)]) == 1
        # On a busy machine, progress is printed before the message.
        message = f"\n{capsys.readouterr().err.strip()}".partition("\nglm4v-patched: ")[2]
        for part in named:
            assert part in message, message
        words(message, files=files.model.parent, pip=pip_install(), **changing)

    return check


@pytest.fixture
def served(monkeypatch) -> list:
    """The applications that commands would serve, in place of servers of this process."""
    applications: list = []
    monkeypatch.setattr(connections, "run_server", lambda app, *_, **__: applications.append(app))
    return applications
