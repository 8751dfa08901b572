"""``glm4v-patched bench`` with two real processes on the CPU, at the size of the golden data."""

import json

import pytest

from glm4v_patched.bench.roofline import useful_flop
from glm4v_patched.bench.settings import TrainingSettings
from glm4v_patched.cli import main
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from tests.helpers.processes import on_the_cpu
from tests.helpers.tiny import golden_json


@pytest.mark.slow
@pytest.mark.parametrize("read", ["", " --from-files 90x70"], ids=["in memory", "from files"])
def test_a_measurement_is_a_row_with_its_command(read, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(golden_json("config.json")))
    command = "bench --trained lm --device cpu --micro-batch 2 --steps 2 --text-tokens 40"
    command += f" --shortest-text 20 --config {config} --out {tmp_path}/rows.json{read}"
    with on_the_cpu(600):
        assert main(command.split()) == 0
    [row] = json.loads((tmp_path / "rows.json").read_text())
    assert row["workload"] == "lm" and row["gpus"] == 2 and row["zero_stage"] == 3
    assert row["samples_per_s_per_gpu"] == pytest.approx(2 / row["step_s"]["median"])
    assert row["tokens_per_s_per_gpu"] == pytest.approx(36 * row["samples_per_s_per_gpu"])
    texts = TrainingSettings(trained="lm", micro_batch=2, text_tokens=40, shortest_text=20)
    work = useful_flop(ChatGLMConfig(**golden_json("config.json")), texts)
    assert row["useful_tflop_per_sample"] == pytest.approx(work / 1e12)
    assert len(row["losses"]) == 5
    # Without a GPU everything is recomputed, and nothing is compiled.
    assert (row["policies"]["tower"], row["policies"]["language"]) == ("full", "full")
    assert row["command"].startswith("glm4v-patched bench --trained lm --gpus 2 --micro-batch 2")
    assert {"torch", "transformers", "deepspeed"} <= set(row["versions"])
