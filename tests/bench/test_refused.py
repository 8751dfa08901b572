"""Options that cannot be measured are refused before anything runs."""

import json
import shlex

import pytest

from glm4v_patched.bench import answers, generation, training
from glm4v_patched.bench.settings import TrainingSettings
from glm4v_patched.cli import main
from glm4v_patched.engine import memory_check
from glm4v_patched.engine.gpus import Gpu, Gpus
from glm4v_patched.engine.options import REQUIRED_PACKAGES
from glm4v_patched.models import placement
from tests.helpers.tiny import golden_json

H200 = Gpu("NVIDIA H200", 150 * 10**9, (9, 0))

TRAINING = (
    (0, "", "there is no GPU: none here; to use the CPU: --device cpu --config FILE"),
    (1, "", "2 processes on 1 GPUs: each process needs its own GPU; expected --gpus 1, or"),
    (0, "--device cpu", "would measure the full-size model, of 13.9 billion weights; expected"),
    (1, "--trained full lora_lm --gpus 1", "222.5 GB on each GPU, which has 147.9 GB"),
    (2, "--trained lora_lm --memory-limit 10", "13.9 GB on each GPU, which has 10.7 GB"),
    (2, "--trained full --offload true", "222.5 GB of the machine's memory, of which 100.0 GB"),
    (0, "--zero-stage 0 --gpus 2", "zero_stage is 0 with 2 processes, but training without ZeRO"),
    (0, "--into README.md", "name their files with --rows"),
    (0, "--rows rows.json --out new.json", "--rows measures nothing: drop one"),
    (0, "--rows none.json", "none.json: No such file"),
    (0, "--out none/rows.json", "none does not exist; make it"),
    (0, "--trained qlora", "qlora needs not_there"),
    (0, "--shortest-text 0", "shortest_text is 0; expected from 1 to text_tokens, which is"),
    (0, "--shortest-text 513", "shortest_text is 513; expected from 1 to text_tokens, which is"),
    (0, "--from-files 9x9 --packed", "packed does not work with from_files"),
)
ANSWERS = (
    ("--answer-rows 15", "expected at least 16"),
    ("--trained lm", "--trained has no effect on measurements of answers: leave it out"),
    ("--repeats 2", "--repeats has no effect on measurements of answers"),
    ("--weights fp8", "--weights fp8 needs a GPU"),
)
GENERATION = (
    ("--gpus 1", "--gpus has no effect on measurements of generate"),
    ("--weights 8bit", "--weights 8bit needs a GPU"),
    ("--device cuda", "no GPU"),
    ("--device cuda --weights 4bit", "--weights 4bit needs not_there"),
    ("--device cuda --weights 8bit --cache static", "--cache static with --weights 8bit"),
)
FOR_ANSWERS = "bench --answers 56x56 --device cpu --batch 8"
FOR_GENERATION = "bench --generate --device cpu --config config.json"
CASES = [(f"bench {options}", message, gpus) for gpus, options, message in TRAINING]
CASES += [(f"{FOR_ANSWERS} {options}", message, 0) for options, message in ANSWERS]
CASES += [(f"{FOR_GENERATION} {options}", message, 0) for options, message in GENERATION]


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Check that a command ends with an error before anything runs or is printed, on a machine
    where nothing can be measured."""
    for module in (answers, generation, training):
        monkeypatch.setattr(module, "run_and_log", lambda *_: pytest.fail("a process was started"))
    monkeypatch.setattr(memory_check, "free_ram", lambda: 100e9)
    for package in ("qlora", "4bit"):
        monkeypatch.setitem(REQUIRED_PACKAGES, package, ["not_there"])
    (tmp_path / "config.json").write_text(json.dumps(golden_json("config.json")))
    monkeypatch.chdir(tmp_path)

    def check(command: str, message: str, num_gpus: int = 0) -> None:
        gpus = Gpus((H200,) * num_gpus, "none here")
        for module in (training, placement):
            monkeypatch.setattr(module, "find_gpus", lambda: gpus)
        assert main(shlex.split(command)) == 1
        printed = capsys.readouterr()
        # On a busy machine, progress is printed before the error.
        error = f"\n{printed.err.strip()}".partition("\nglm4v-patched: ")[2]
        assert message in error, error
        assert printed.out == ""

    return check


@pytest.mark.parametrize(("command", "message", "gpus"), CASES)
def test_options_that_cannot_be_measured_are_refused(refused, command, message, gpus):
    refused(command, message, gpus)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--micro-batch 0", "--micro-batch: '0'; expected a number from 1"),
        ("--timeout nan", "--timeout: 'nan'"),
        ("--tower some", "'some'; expected auto"),
        ("--from-files 4000x0", "'4000x0'; expected width and height"),
    ],
)
def test_an_invalid_value_is_refused_with_its_option(options, message, capsys):
    with pytest.raises(SystemExit):
        main(["bench", *options.split()])
    assert message in capsys.readouterr().err


def test_a_file_without_rows_is_refused(tmp_path, refused):
    path = tmp_path / "rows.json"
    entries = (b'[{"gpus": 2, "settings": {}}]', b'[{"workload": "lora_lm"}]', b'["workload"]')
    for text in (b"", b"{}", b"\xff\xfe", *entries, b'[{"workload": "answers", "batch": 8}]'):
        path.write_bytes(text)
        refused("bench --out rows.json", "rows.json has no rows of bench")
        assert path.read_bytes() == text


def test_the_smallest_gpu_of_those_that_are_used_decides(monkeypatch):
    gpus = Gpus(tuple(Gpu("a GPU", gb * 10**9, (9, 0)) for gb in (150, 10, 150)), "")
    monkeypatch.setattr(training, "find_gpus", lambda: gpus)
    settings = TrainingSettings(trained="lora_lm")
    problems = [training._memory_problem(settings, number, on_cpu=False) for number in (1, 2, 3)]
    assert [*map(bool, problems)] == [False, True, True]
