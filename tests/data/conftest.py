"""A processor whose words are those of this room's tests, and a folder with a short name."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from glm4v_patched.demo.tiny_model import build_processor

WORDS = ["Which colour is it? What is 0123456789 in the picture? 007 NA blue, green"]
WORDS += ["a red circle", "a green square", "red it is", "white"]


@pytest.fixture(scope="module")
def processor():
    return build_processor(WORDS)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Messages tell long paths in short, and pytest's own are longer where it has several
    processes."""
    with TemporaryDirectory(prefix="data-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
