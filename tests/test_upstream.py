"""The reproductions of docs/upstream show what their pages say."""

import importlib.util
import subprocess
import sys

import pytest

from tests.helpers.pages import ROOT

CASES = [
    ("deepspeed", "deepspeed_checkpoints", "checkpoints reentrant: at most 34,304 of 34,304"),
    ("bitsandbytes", "bitsandbytes_strides", "float32: differ by 2.27, of 1.69 at most"),
    (
        "compressed_tensors",
        "compressed_tensors_subclasses",
        "when it is loaded: ['layer', 'output']",
    ),
]


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize(("module", "name", "expected"), CASES, ids=lambda text: text[:20])
def test_a_reproduction_shows_what_its_page_says(module, name, expected):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {module}: pip install {module}")
    command = [sys.executable, str(ROOT / "docs" / "upstream" / f"{name}.py")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert expected in done.stdout
