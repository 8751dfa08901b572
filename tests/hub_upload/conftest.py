"""The published repository, and what is built from it."""

from pathlib import Path

import pytest

from hub_upload.build import build
from tests.helpers.publishable import NAME, write_original


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return write_original(tmp_path_factory.mktemp("original") / "source")


@pytest.fixture(scope="module")
def built(original, tmp_path_factory) -> Path:
    """Read only."""
    out = tmp_path_factory.mktemp("built") / "out"
    build(str(original), out, NAME)
    return out
