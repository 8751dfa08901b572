"""docs/benchmarks: each experiment runs at tiny size, and files of results have one format."""

import json
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from shlex import split

import pytest
import torch

from tests.helpers.processes import ROOT, cpu_environment, gpu_environment, run_with_limit
from tests.helpers.tiny import golden_json

BENCHMARKS = ROOT / "docs" / "benchmarks"
README = BENCHMARKS / "README.md"
SCRIPTS = [path for path in sorted(BENCHMARKS.glob("*.py")) if "__main__" in path.read_text()]


@dataclass(frozen=True)
class Smoke:
    """A run of a script in an empty folder that has a tiny ``config.json``.

    ``writes`` is what it leaves there, as files of JSON and pictures; ``prints`` what it says.
    """

    script: str
    arguments: str
    writes: tuple[str, ...] = ()
    prints: str = ""
    needs: str = "slow"
    package: str = "torch"

    @property
    def parameter(self):
        missing = pytest.mark.skipif(
            find_spec(self.package) is None,
            reason=f"not installed: {self.package}; nox -f tests/noxfile.py -s llm_compressor",
        )
        return pytest.param(self, id=self.script, marks=[getattr(pytest.mark, self.needs), missing])


# Five trainings or commands at the most. Their exit status is the experiment's own verdict: here
# blank pictures must be outside the noise of two seeds, and a stopped training goes on.
SMOKES = [
    Smoke(
        "loss_curve",
        "--size tiny --steps 40 --no-compile --processes 1 --reference fast --also blank "
        "--at-once 2 --timeout 500 --out rows.json --picture curves.png",
        ("rows.json", "curves.png"),
        "blank, seed 0: .* OUTSIDE of the noise",
    ),
    Smoke(
        "reading_task",
        "--device cpu --size tiny --steps 8 --out .",
        ("reading_task.json", "reading_loss.png", "reading_sheet.png"),
        "fp32: done",
    ),
    Smoke(
        "compare_loops",
        "--device cpu --config config.json --dtype float32 --ways 'not compiled' --batch 1 2 "
        "--new-tokens 4 --prompt-tokens 6 --out rows.json",
        ("rows.json",),
        '"theirs 1, ours 1": true',
    ),
    Smoke("time_data_check", "3 64 48", prints=r"next: [\d.]+ s of CPU"),
    Smoke("memory_for_cards", "--cards 1 2 --gigabytes 24", prints=r"2 x 24 GB \| - \| - \| \d+"),
    Smoke("time_many_rows", "20", prints=r"a training process: [\d.]+ s"),
    Smoke("time_forms", "4", prints=r"\| VQA v2 \| `columns: .*` \| [\d.]+ \|"),
    Smoke("time_stream", "30 --steps 2", prints=r"30 rows: first step after [\d.]+ s"),
    Smoke(
        "export_formats",
        "--size tiny --device cpu --out .",
        ("export_formats.json",),
        r"int4: right [\d.]+ before, [\d.]+ after",
        package="llmcompressor",
    ),
    Smoke("attention_speed", "--out rows.json", ("rows.json",), "'backend': 'cudnn'", "gpu"),
    Smoke(
        "bench_cure",
        "--layers 2 --rounds 1 --warm-up 1 --steps 2 --weights lora_both --out rows.jsonl",
        prints='"cure": false',
        needs="two_gpu",
    ),
]
BY_OTHERS = {"compare_with_vllm"}  # tests/inference/test_vllm_model.py, where vLLM is


@pytest.fixture
def ended(monkeypatch, capsys) -> Callable:
    """The status of a script that ends before it does anything, and what it printed, where no GPU
    is."""

    def run(script: str, *arguments: str) -> tuple[object, str]:
        path = BENCHMARKS / f"{script}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(path), run_name="__main__")
        return end.value.code, "".join(capsys.readouterr())

    return run


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_experiment_says_what_it_does(script, ended):
    """In its first sentence and in ``--help``; and it is tried."""
    status, printed = ended(script.stem, "--help")
    assert status == 0 and "usage: " in printed
    first = script.read_text().partition('"""')[2].splitlines()[0]
    assert first[:50] in " ".join(printed.split())
    assert script.stem in {smoke.script for smoke in SMOKES} | BY_OTHERS


@pytest.mark.parametrize("smoke", [smoke.parameter for smoke in SMOKES])
def test_an_experiment_runs_at_tiny_size(smoke, tmp_path):
    config = golden_json("config.json") | {"initializer_range": 0.3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, str(BENCHMARKS / f"{smoke.script}.py"), *split(smoke.arguments)]
    environment = cpu_environment() if smoke.needs == "slow" else gpu_environment()
    ended = run_with_limit(command, 600, environment, tmp_path)
    assert ended.status == 0, ended.output[-4000:]
    assert re.search(smoke.prints, ended.output), ended.output
    for name in smoke.writes:
        if name.endswith(".json"):
            assert json.loads((tmp_path / name).read_text()) and str(tmp_path) not in name
        else:
            assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("loss_curve --out x --picture y", "takes a GPU for each of 2 processes, and there are 0"),
        ("loss_curve --size tiny --also fp8 --out x --picture y", "--also fp8 takes a GPU"),
        ("loss_curve --size tiny --steps 19 --out x --picture y", "at least 20 are needed"),
        ("reading_task --out x", "--gpus 2, and there are 0"),
        ("reading_task --out x --device cpu", "--size mid takes GPUs"),
        ("bench_cure --out x", "two GPUs, and there are 0"),
        ("attention_speed --out x", "there is none"),
        ("compare_loops --out x --device cpu", "give the --config of a small one"),
    ],
)
def test_what_cannot_run_is_refused_at_once(arguments, told, ended):
    status, printed = ended(*arguments.split())
    assert status == 2 and told in " ".join(printed.split())


RESULTS = sorted(BENCHMARKS.glob("*.json"))
# Of each row or report: which versions, on what, or how it is made again.
SAYS_WHERE_FROM = {"versions", "transformers", "torch", "gpu"}
# Their command and versions stand in docs/fp8.md and docs/numerics.md.
IN_A_PAGE = {"attention_h200.json"}


def no_constant(name: str):
    raise ValueError(f"{name} is no JSON")


@pytest.mark.parametrize("file", RESULTS, ids=lambda path: path.name)
def test_a_file_of_results_has_the_format_of_all(file):
    """An array with a row a line, or one report, which say where they are from."""
    text = file.read_text(encoding="utf-8")
    found = json.loads(text, parse_constant=no_constant)
    assert text.endswith("\n") and not re.search(r"/(?:root|home|work)/", text)
    if isinstance(found, list):
        first, *lines, last = text.splitlines()
        assert (first, last) == ("[", "]")
        assert [json.loads(line.removesuffix(",")) for line in lines] == found != []
    rows = found if isinstance(found, list) else [found]
    if file.name not in IN_A_PAGE:
        made = [row for row in rows if "error" not in row]
        assert [row for row in made if not row.keys() & SAYS_WHERE_FROM] == []


def test_every_file_of_results_and_script_is_in_the_pages_table():
    named = re.findall(r"`([\w.*]+\.\w+)`", README.read_text().partition("## Rows of bench")[0])
    files = [path.name for path in [*RESULTS, *SCRIPTS, *BENCHMARKS.glob("*.png")]]
    assert [name for name in files if not any(fnmatch(name, pattern) for pattern in named)] == []
    there = [path.name for path in BENCHMARKS.iterdir()]
    assert [pattern for pattern in named if not any(fnmatch(n, pattern) for n in there)] == []
