"""A processor whose words are those of this room's tests, a folder with a short name that has the
caches, and the check."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from glm4v_patched.data.check import check_sources
from glm4v_patched.data.checked_data import CheckedData
from glm4v_patched.data.rows import as_source
from glm4v_patched.data.source import DataSource
from glm4v_patched.demo.tiny_model import build_processor

WORDS = ["Which color is it? What is 0123456789 in the image? 007 NA blue, green"]
WORDS += ["a red circle", "a green square", "red it is", "white"]


@pytest.fixture(scope="module")
def processor():
    return build_processor(WORDS)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder whose path is short whatever TMPDIR is: messages shorten long paths."""
    with TemporaryDirectory(prefix="data-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder).resolve()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """Where images without a file are written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return tmp_path / "cache" / "glm4v-patched" / "images"


@pytest.fixture
def check(tmp_path, processor):
    """The check of files or sets, with a memory of this test alone."""

    def check_them(*paths: Path | DataSource, max_positions: int = 1024, **options) -> CheckedData:
        sources = [as_source(path) for path in paths]
        memory = tmp_path / "memory" / "m.sqlite"
        return check_sources(sources, processor, max_positions, image_cache=memory, **options)

    return check_them
