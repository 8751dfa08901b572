"""docs/benchmarks: the experiments run at tiny size, and files of results have one format."""

import json
import re
import sys
from fnmatch import fnmatch
from importlib.util import find_spec
from shlex import split

import pytest

from tests.helpers.processes import ROOT, cpu_environment, gpu_environment, run_with_limit

BENCHMARKS = ROOT / "docs" / "benchmarks"
README = BENCHMARKS / "README.md"
SCRIPTS = [
    path for path in sorted(BENCHMARKS.glob("*.py")) if "__main__" in path.read_text("utf-8")
]


QUANTIZES = pytest.mark.skipif(
    find_spec("llmcompressor") is None,
    reason="not installed: llmcompressor; nox -f tests/noxfile.py -s llm_compressor",
)


def smoke(marks, command: str, prints: str, *writes: str):
    """A run of a script in an empty folder: what it prints, and the files of JSON and images that
    it leaves there."""
    return pytest.param(command, prints, writes, id=command.split()[0], marks=marks)


# The exit status is the experiment's own verdict: here blank images must be outside the noise of
# two seeds, and a stopped training goes on.
SMOKES = [
    smoke(
        pytest.mark.slow,
        "loss_curve --size tiny --steps 48 --no-compile --processes 1 --reference fast "
        "--also blank --at-once 2 --timeout 500 --out rows.json --image curves.png",
        "blank, seed 0: .* OUTSIDE of the noise",
        *("rows.json", "curves.png"),
    ),
    smoke(
        pytest.mark.slow,
        "reading_task --device cpu --size tiny --steps 8 --out .",
        "fp32: done",
        *("reading_task.json", "reading_loss.png", "reading_sheet.png"),
    ),
    smoke(
        pytest.mark.slow,
        "serve_clients --device cpu --clients 4 --alone 2 --requests 8 --new-tokens 4 "
        "--out rows.json",
        r'"temperature 1e308": \["400"\].*"slowest": 0',
        "rows.json",
    ),
    smoke(pytest.mark.slow, "time_stream 30 --steps 2", r"30 rows: first step after [\d.]+ s"),
    smoke(
        [pytest.mark.slow, QUANTIZES],
        "export_formats --size tiny --device cpu --out .",
        r"int4: right [\d.]+ before, [\d.]+ after",
        "export_formats.json",
    ),
    smoke(pytest.mark.gpu, "attention_speed --out rows.json", "'backend': 'cudnn'", "rows.json"),
]


@pytest.mark.parametrize(("command", "prints", "writes"), SMOKES)
def test_an_experiment_runs_at_tiny_size(command, prints, writes, tmp_path, request):
    script, *arguments = split(command)
    on_cpu = request.node.get_closest_marker("slow")
    environment = cpu_environment() if on_cpu else gpu_environment()
    program = [sys.executable, str(BENCHMARKS / f"{script}.py")]
    ended = run_with_limit([*program, *arguments], 600, environment, tmp_path)
    assert ended.status == 0, ended.output[-4000:]
    assert re.search(prints, ended.output), ended.output
    for name in writes:
        if name.endswith(".json"):
            assert json.loads((tmp_path / name).read_text())
        else:
            assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


RESULTS = sorted(BENCHMARKS.glob("*.json"))
# Each row or report has versions, a device, or the command that makes it.
SAYS_WHERE_FROM = {"versions", "transformers", "torch", "gpu"}
# Their command and versions stand in docs/fp8.md and docs/numerics.md.
IN_A_PAGE = {"attention_h200.json"}


@pytest.mark.parametrize("file", RESULTS, ids=lambda path: path.name)
def test_a_file_of_results_has_the_format_of_all(file):
    """An array with a row a line, or one report, which say where they are from."""
    text = file.read_text(encoding="utf-8")
    content = json.loads(text)
    assert text.endswith("\n") and not re.search(r"/(?:root|home|work)/|NaN|Infinity", text)
    if isinstance(content, list):
        first, *lines, last = text.splitlines()
        assert (first, last) == ("[", "]")
        assert [json.loads(line.removesuffix(",")) for line in lines] == content != []
    rows = content if isinstance(content, list) else [content]
    if file.name not in IN_A_PAGE:
        successful = [row for row in rows if "error" not in row]
        assert [row for row in successful if not row.keys() & SAYS_WHERE_FROM] == []


def test_every_file_of_results_and_script_is_in_the_pages_table():
    named = re.findall(
        r"`([\w.*]+\.\w+)`", README.read_text("utf-8").partition("## Rows of bench")[0]
    )
    files = [path.name for path in [*RESULTS, *SCRIPTS, *BENCHMARKS.glob("*.png")]]
    assert [name for name in files if not any(fnmatch(name, pattern) for pattern in named)] == []
    names = [path.name for path in BENCHMARKS.iterdir()]
    assert [pattern for pattern in named if not any(fnmatch(n, pattern) for n in names)] == []
