"""What cannot be measured is refused before anything runs."""

import pytest

from glm4v_patched.cli import main

TRAINING = (
    (0, "", "no GPU"),
    (1, "", "2 processes on 1 GPUs"),
    (0, "--device cpu", "--device cpu"),
    (1, "--trained full lora_lm --gpus 1", "222.5 GB"),
    (2, "--trained lora_lm --memory-limit 10", "10.7 GB"),
    (2, "--trained full --offload", "100.0 GB"),
    (0, "--zero-stage 0 --gpus 2", "zero_stage 0 on 2 processes"),
    (0, "--into README.md", "--into"),
    (0, "--rows rows.json --out new.json", "--rows"),
    (0, "--rows none.json", "none.json"),
    (0, "--out none/rows.json", "none"),
    (0, "--pictures config.json", "config.json"),
    (0, "--trained qlora", "qlora needs not_there"),
    (0, """--zero-options '{"stage3_allgather_sequential": true}'""", "allgather_sequential"),
    (0, "--shortest-text 513", "shortest_text is 513"),
    (0, "--packed --against original", "packed"),
    (0, "--model folder", "model is folder"),
    (0, "--from-files 9x9 --packed --profile", "packed, profile"),
)
ANSWERS = (
    ("--answer-rows 15", "expected at least 16"),
    ("--trained lm", "--trained is not of answers"),
    ("--repeats 2", "--repeats is not of answers"),
    ("--weights fp8", "--weights fp8 needs a GPU"),
)
GENERATION = (
    ("--gpus 1", "--gpus"),
    ("--against none", "--against none"),
    ("--weights 8bit", "--weights 8bit needs a GPU"),
    ("--device cuda", "no GPU"),
    ("--device cuda --weights 4bit", "--weights 4bit needs not_there"),
    ("--device cuda --weights 8bit --cache static", "--cache static"),
    ("--device cuda --weights fp8 --against original", "--weights fp8 is not"),
)
CASES = [
    *((gpus, f"bench {typed}", named) for gpus, typed, named in TRAINING),
    *((0, f"bench --answers 56x56 --device cpu --batch 8 {t}", named) for t, named in ANSWERS),
    *((0, f"bench --generate --device cpu --config config.json {t}", n) for t, n in GENERATION),
]


@pytest.mark.parametrize(
    ("gpus", "command", "named"), CASES, ids=[command for _, command, _ in CASES]
)
def test_what_cannot_be_measured_is_refused(refused, gpus, command, named):
    refused(command, named, gpus)


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("--micro-batch 0", "--micro-batch: 0; expected at least 1"),
        ("--memory-limit nan", "--memory-limit: nan; expected at least 1"),
        ("--timeout nan", "--timeout: nan"),
        ("--zero-options [1]", "'[1]'; expected a JSON object"),
        ("--tower some", "'some'; expected auto, none, linear"),
        ("--from-files 4000x0", "'4000x0'; expected pixels"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_option(typed, named, capsys):
    with pytest.raises(SystemExit):
        main(["bench", *typed.split()])
    assert named in capsys.readouterr().err


def test_a_file_that_holds_no_rows_is_refused(tmp_path, refused):
    path = tmp_path / "rows.json"
    entries = (b'[{"gpus": 2, "settings": {}}]', b'[{"workload": "lora_lm"}]', b'["workload"]')
    for text in (b"", b"{}", b"\xff\xfe", *entries, b'[{"workload": "answers", "batch": 8}]'):
        path.write_bytes(text)
        refused("bench --out rows.json", "rows.json is no file of rows")
        assert path.read_bytes() == text
