"""``glm4v-patched bench`` with two real processes on the CPU, at the size of the golden data."""

import json
from pathlib import Path

import pytest

from glm4v_patched.bench.roofline import useful_flop
from glm4v_patched.bench.settings import Settings
from glm4v_patched.cli import main
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.processes import on_the_cpu
from tests.helpers.tiny import NUM_IMAGE_TOKENS, golden_json


@pytest.fixture
def options(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(golden_json("config.json")))
    out = ["--out", str(tmp_path / "rows.json")]
    return ["bench", "--config", str(config), "--device", "cpu", "--text-tokens", "20", *out]


@pytest.fixture
def bench(options, tmp_path):
    """Run the command in this process; the rows it wrote."""

    def run(*arguments):
        with on_the_cpu(600):
            assert main([*options, *arguments]) == 0
        return json.loads((tmp_path / "rows.json").read_text())

    return run


@pytest.fixture
def original(tmp_path) -> Path:
    """The stand-in for the published code, which notes that it has checkpoints."""
    write_legacy_repository(tmp_path / "original")
    code = tmp_path / "original" / "modeling_chatglm.py"
    # As published it adds labels for an image of the real size.
    labels = f"LABELS_OF_AN_IMAGE = {NUM_IMAGE_TOKENS}"
    asked = "if self.gradient_checkpointing and self.training:"
    mark = f"{asked}\n                open({str(tmp_path / 'checkpointed')!r}, 'w').close()"
    source = code.read_text().replace("LABELS_OF_AN_IMAGE = 1600", labels)
    assert asked in source
    code.write_text(source.replace(asked, mark))
    return tmp_path / "original"


@pytest.mark.slow
def test_a_measurement_is_a_row_with_its_command_and_pictures_beside_that_of_the_published_code(
    bench, original, tmp_path
):
    asked = [
        "--trained",
        "lm",
        "--micro-batch",
        "2",
        "--no-compile",
        "--steps",
        "2",
        "--shortest-text",
        "10",
    ]
    asked += ["--against", str(original), "--pictures", str(tmp_path / "pictures")]
    rows = bench(*asked)
    assert [row["implementation"] for row in rows] == ["ours", "original"]
    assert all(row.get("samples_per_s_per_gpu", 0) > 0 for row in rows), rows
    row, theirs = rows
    assert row["workload"] == "lm" and row["gpus"] == 2 and row["zero_stage"] == 3
    assert row["samples_per_s_per_gpu"] == pytest.approx(2 / row["step_s"]["median"])
    assert row["held_ceiling_tflops"] > 0
    assert row["tokens_per_s_per_gpu"] == pytest.approx(21 * row["samples_per_s_per_gpu"])
    config = ChatGLMConfig(**golden_json("config.json"))
    work = useful_flop(config, Settings(**row["settings"]))
    assert row["useful_tflop_per_sample"] == pytest.approx(work / 1e12)
    assert row["losses"][-1] < row["losses"][0]
    assert row["command"].startswith("glm4v-patched bench --trained lm --gpus 2 --micro-batch 2")
    assert {"torch", "transformers", "deepspeed"} <= set(row["versions"])
    pictures = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert pictures == ["speed.png"]  # memory is measured on GPUs only
    # The published code leaves weights as the memory was: they are drawn, on all processes alike.
    assert theirs["losses"][0] == pytest.approx(row["losses"][0], abs=0.3)
    assert (tmp_path / "checkpointed").exists()  # as who trains the published code has to


@pytest.mark.slow
def test_compiled_layers_gathered_whole_lose_what_plain_ones_do(bench):
    """Of ``full``; test_recipe_choices.py has the adapters of both towers."""
    policies = ["--tower", "attention", "--language", "selective"]
    policies += ["--stage3-max-live-parameters", "0"]
    bench("--trained", "full", *policies)
    compiled, plain = bench("--trained", "full", *policies, "--no-compile")
    assert compiled["settings"]["compile"] and not plain["settings"]["compile"]
    # bf16: rounded to 8 bits, eight steps of training apart; they fall by some 0.03.
    assert compiled["losses"] == pytest.approx(plain["losses"], abs=2e-3)
