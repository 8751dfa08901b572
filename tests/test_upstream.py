"""The reproductions of docs/upstream show what their pages say."""

import importlib.util
import subprocess
import sys

import pytest

from tests.helpers.pages import ROOT

FOLDER = ROOT / "docs" / "upstream"


def printed(name: str) -> str:
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def needs(module: str, package: str):
    is_missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(is_missing, reason=f"needs {package}: pip install {package}")


@pytest.mark.slow
@pytest.mark.newest
def test_deepspeed_keeps_all_frozen_weights_under_reentrant_checkpoints():
    told = printed("deepspeed_checkpoints")
    assert "non-reentrant: at most 4,288 of 34,304" in told
    assert "checkpoints reentrant: at most 34,304 of 34,304" in told


@needs("bitsandbytes", "bitsandbytes")
def test_bitsandbytes_ignores_strides_on_a_cpu():
    assert "float32: differ by 2.27, of 1.69 at most" in printed("bitsandbytes_strides")


@needs("compressed_tensors", "compressed-tensors")
def test_compressed_tensors_quantises_what_was_ignored():
    told = printed("compressed_tensors_subclasses")
    assert "when it is loaded: ['layer', 'output']" in told


def test_every_reproduction_has_a_page_that_names_it():
    pages = "".join(page.read_text() for page in FOLDER.glob("*.md") if page.name != "README.md")
    assert all(f"({script.name})" in pages for script in FOLDER.glob("*.py"))
