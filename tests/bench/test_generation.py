"""``glm4v-patched bench --generate``: the speed of generation."""

import json
from functools import wraps
from pathlib import Path

import pytest

from glm4v_patched.bench import generation, generation_worker
from glm4v_patched.cli import main
from glm4v_patched.inference.decoding import loop, static_cache
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.tiny import golden_json, tiny_model


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(golden_json("config.json")))
    return path


def generate(*arguments: str) -> int | None:
    return main(["bench", "--generate", "--device", "cpu", *map(str, arguments)])


@pytest.fixture
def one_second_per_forward(monkeypatch):
    """Measure in this process, by a clock that advances by a second in each forward pass."""
    clock, forward = [0.0], GLM4VForCausalLM.forward

    @wraps(forward)
    def step(*args, **kwargs):
        clock[0] += 1
        return forward(*args, **kwargs)

    def now() -> float:
        clock[0] += 1e-6
        return clock[0]

    def run(command: list[str], folder: Path, environment: dict, timeout: float) -> str:
        assert command[-3] == "glm4v_patched.bench.generation_worker" and timeout == 1200
        generation_worker.measure_batches(json.loads(command[-2]), Path(command[-1]))
        return ""

    monkeypatch.setattr(generation, "run_and_log", run)
    monkeypatch.setattr(GLM4VForCausalLM, "forward", step)
    monkeypatch.setattr(generation_worker, "timer", now)


@pytest.mark.usefixtures("one_second_per_forward")
def test_every_batch_size_is_measured_with_the_decoding_loop_of_answer(
    config, tmp_path, monkeypatch
):
    calls = []

    @wraps(static_cache.decode_without_sync)  # generate reads its signature
    def counted(*args, **kwargs):
        calls.append(kwargs)
        return loop.decode_without_sync(*args, **kwargs)

    monkeypatch.setattr(static_cache, "decode_without_sync", counted)
    out, sizes = tmp_path / "generate_cpu.json", ["--new-tokens", "4", "--repeats", 1]
    generate("--config", config, "--batch", 1, 2, *sizes, "--out", out)
    for number, row in enumerate(json.loads(out.read_text()), start=1):
        named = ("batch", "new_tokens", "cache", "device", "weights")
        assert [row[name] for name in named] == [number, 4, "static", "cpu", None]
        assert row["first_token_s"] == pytest.approx(1, abs=1e-3)
        assert row["steps_per_s"] == pytest.approx(1, abs=1e-3)
        seconds = row["weights_gb"] / row["bandwidth_gb_s"]  # for a step at full bandwidth
        assert row["bandwidth_share"] == pytest.approx(seconds * row["steps_per_s"])
        assert row["tokens_per_s"] == pytest.approx(number * row["steps_per_s"])
        assert "bench --generate --batch 1 2 --new-tokens 4" in row["command"]
    # For each batch size: two runs to warm up, the first token alone, and the full answer.
    assert len(calls) == 8


def test_prints_the_table_of_rows(tmp_path, capsys):
    file = tmp_path / "generate.json"
    row = {"workload": "generate", "device": "cpu"}
    fast = {"first_token_s": 0.25, "tokens_per_s": 1234.56, "bandwidth_share": 0.5}
    fast |= {"batch": 8, "weights": "fp8"}
    file.write_text(json.dumps([row | fast, row | {"batch": 1, "error": "a | b"}]))
    assert not generate("--rows", file)
    columns, _, failed, measured, *_ = capsys.readouterr().out.splitlines()
    # Columns without any value are left out.
    assert columns == "| # | device | weights | batch | first token, s | tokens/s | bandwidth |"
    assert failed == r"| 1 | cpu | - | 1 | a \| b | - | - |"
    assert measured == "| 2 | cpu | fp8 | 8 | 0.250 | 1,234.6 | 50% |"


def test_a_step_reads_the_language_model_without_its_embeddings():
    model = tiny_model()
    read = [*model.transformer.encoder.parameters(), *model.transformer.output_layer.parameters()]
    assert generation_worker.weight_bytes_per_step(model) == 4 * sum(
        weight.numel() for weight in read
    )
