"""A model and adapters on it, and copies of them that a test may change."""

import shutil
from pathlib import Path

import pytest

from tests.helpers.answering import Files, write_files


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Files:
    return write_files(tmp_path_factory.mktemp("models"))


@pytest.fixture
def model(files, tmp_path) -> Path:
    return Path(shutil.copytree(files.model, tmp_path / "model"))


@pytest.fixture
def adapters(files, tmp_path) -> Path:
    return Path(shutil.copytree(files.adapters, tmp_path / "adapters"))
