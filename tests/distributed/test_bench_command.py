"""``glm4v-patched bench`` with two real processes on the CPU, at the size of the golden data."""

import json

import pytest

from glm4v_patched.bench.roofline import useful_flop
from glm4v_patched.bench.settings import Settings
from glm4v_patched.cli import main
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.processes import on_the_cpu
from tests.helpers.tiny import golden_json


@pytest.mark.slow
def test_a_measurement_is_a_row_with_its_command_and_pictures_beside_that_of_the_published_code(
    tmp_path,
):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(golden_json("config.json")))
    # The stand-in for the published code, which notes that it has checkpoints.
    original, mark = tmp_path / "original", tmp_path / "checkpointed"
    write_legacy_repository(original)
    code = original / "modeling_chatglm.py"
    source = code.read_text()
    asked = "if self.gradient_checkpointing and self.training:"
    assert asked in source
    noted = f"{asked}\n                open({str(mark)!r}, 'w').close()"
    code.write_text(source.replace(asked, noted))

    command = "bench --trained lm --device cpu --micro-batch 2 --no-compile --steps 2"
    command += f" --text-tokens 20 --shortest-text 10 --config {config} --against {original}"
    command += f" --out {tmp_path}/rows.json --pictures {tmp_path}/pictures"
    with on_the_cpu(600):
        assert main(command.split()) == 0
    row, theirs = rows = json.loads((tmp_path / "rows.json").read_text())
    assert [each["implementation"] for each in rows] == ["ours", "original"]
    assert all(each.get("samples_per_s_per_gpu", 0) > 0 for each in rows), rows
    assert row["workload"] == "lm" and row["gpus"] == 2 and row["zero_stage"] == 3
    assert row["samples_per_s_per_gpu"] == pytest.approx(2 / row["step_s"]["median"])
    assert row["tokens_per_s_per_gpu"] == pytest.approx(21 * row["samples_per_s_per_gpu"])
    work = useful_flop(ChatGLMConfig(**golden_json("config.json")), Settings(**row["settings"]))
    assert row["useful_tflop_per_sample"] == pytest.approx(work / 1e12)
    assert row["losses"][-1] < row["losses"][0]
    assert row["command"].startswith("glm4v-patched bench --trained lm --gpus 2 --micro-batch 2")
    assert {"torch", "transformers", "deepspeed"} <= set(row["versions"])
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["speed.png"]
    # The published code leaves weights as the memory was: they are drawn, on all processes alike.
    assert theirs["losses"][0] == pytest.approx(row["losses"][0], abs=0.3)
    assert mark.exists()  # as who trains the published code has to
