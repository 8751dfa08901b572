"""What a measurement is asked for, what refuses it, and the processes that make it."""

import json
import re
import sys
import time
from dataclasses import asdict, replace

import pytest
import torch

from glm4v_patched.bench import command, machine, worker
from glm4v_patched.bench.roofline import batch_of
from glm4v_patched.bench.settings import Settings
from glm4v_patched.cli import main
from glm4v_patched.engine import memory_check
from glm4v_patched.engine.gpus import Gpu, Gpus
from glm4v_patched.engine.memory_plan import Batch
from glm4v_patched.engine.options import TRAINED
from glm4v_patched.models import placement
from glm4v_patched.remote.loss import IGNORE_INDEX
from tests.helpers.tiny import golden_json, tiny_model


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"trained": "lora"}, "--trained is 'lora'"),
        ({"micro_batch": 0}, "--micro-batch is 0"),
        ({"tower": "most"}, "policy is 'most'"),
        ({"zero_options": "[1]"}, "--zero-options is '[1]'"),
        ({"zero_options": '{"stage3_allgather_sequential": true}'}, "allgather_sequential"),
        ({"shortest_text": 513}, "shortest_text is 513"),
        ({"shortest_text": 0}, "shortest_text is 0"),
        ({"packed": True, "against": "original"}, "packed"),
        ({"memory_limit": float("nan")}, "--memory-limit is nan"),
        ({"steps": 0, "zero_stage": 4}, "--zero-stage is 4"),
        ({"trained": "qlora"}, "qlora with zero_stage 3"),
        ({"trained": "qlora", "zero_stage": 0}, "qlora is not compiled"),
        ({"offload": True, "zero_stage": 0}, "offload with zero_stage 0"),
        ({"trained": "full", "reuse_features": True}, "reuse_features with trained full"),
        ({"fp8": True, "zero_options": '{"zero_quantized_weights": true}'}, "fp8 with"),
        ({"from_files": "4000x0"}, "--from-files is '4000x0'"),
        ({"from_files": "9x9", "packed": True, "liger": True}, "liger, packed"),
        ({"model": "folder"}, "model is folder"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ", ".join(value),
)
def test_settings_that_cannot_work_are_refused(options, named, words):
    with words.refused(ValueError, named):
        Settings(**({"trained": "lm"} | options))


def test_lengths_of_text_fall_evenly():
    asked = Settings(trained="lm", micro_batch=4, text_tokens=100)
    assert asked.text_lengths() == [100] * 4
    assert replace(asked, shortest_text=40).text_lengths() == [100, 80, 60, 40]
    assert replace(asked, shortest_text=40, micro_batch=1).text_lengths() == [100]


@pytest.mark.parametrize("shortest", [None, 4])
def test_packed_samples_are_those_of_padded_rows(shortest):
    model = tiny_model()
    padded = Settings(trained="lm", micro_batch=3, text_tokens=20, shortest_text=shortest)
    batch = worker._batch(model.config, padded)
    in_one_row = worker._batch(model.config, replace(padded, packed=True))
    assert len(batch["input_ids"]) == 3 and len(in_one_row["input_ids"]) == 1
    assert ("attention_mask" in batch) == (shortest is not None)
    learned = sum(length - length // 2 for length in padded.text_lengths())
    for rows in (batch, in_one_row):
        assert int((rows["labels"] != IGNORE_INDEX).sum()) == learned
    losses = [model(**rows).loss.item() for rows in (batch, in_one_row)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_memory_is_that_of_the_rows():
    config = tiny_model().config
    settings = Settings(trained="lm", micro_batch=3, text_tokens=20, shortest_text=10)
    # 6 positions for an image with its begin and end; 20, 15 and 10 ids of text.
    assert batch_of(settings, config, 2) == Batch(rows=3, row_length=26, processes=2)
    packed = batch_of(replace(settings, packed=True), config, 1)
    assert packed == Batch(rows=1, row_length=63, images_per_row=3)


def test_what_is_asked_for_reaches_the_engine():
    asked = {"attn_implementation": "eager", "compile": False, "layers_ahead": 1}
    options = Settings(**asked, all_logits=True, loss_chunk_size=7).engine_options()
    asked |= {"skip_logits": False, "loss_chunk_size": 7}
    assert {name: getattr(options, name) for name in asked} == asked
    assert Settings().engine_options().skip_logits
    original = Settings(against="folder", language="none").engine_options()
    nothing_of_ours = {"tower": "full", "language": "full", "compile": False}
    nothing_of_ours |= {"gathers_whole_layers": False, "norms_in_place": False, "layers_ahead": 0}
    assert {name: getattr(original, name) for name in nothing_of_ours} == nothing_of_ours


def test_ligers_kernels_are_taken_where_they_are_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(worker, "apply", lambda **options: asked.append(options))
    settings = Settings(trained="lm", compile=False)
    for liger, expected in ((False, []), (True, [{"rms_norm": True, "swiglu": True}])):
        worker._build(replace(settings, liger=liger), tiny_model().config, dtype=torch.bfloat16)
        assert asked == expected


def give_machine(monkeypatch, gpus: Gpus, ram: float) -> None:
    for module in (machine, placement):
        monkeypatch.setattr(module, "find_gpus", lambda: gpus)
    monkeypatch.setattr(memory_check, "free_ram", lambda: ram)


@pytest.mark.parametrize(
    ("number", "arguments", "named"),
    [
        (0, [], "no GPU"),
        (1, [], "2 processes on 1 GPUs"),
        (2, ["--gpus", "4"], "4 processes on 2 GPUs"),
        (2, ["--gpus", "0"], "--gpus 0"),
        (2, ["--timeout", "nan"], "--timeout nan"),
        (2, ["--config", "none.json"], "none.json"),
        (0, ["--device", "cpu"], "--device cpu"),
        (1, ["--trained", "full", "lora_lm", "--gpus", "1"], "222.5 GB"),
        (2, ["--trained", "lora_lm", "--memory-limit", "10"], "10.7 GB"),
        (2, ["--trained", "full", "--offload"], "100.0 GB"),
    ],
)
def test_a_machine_that_cannot_measure_is_refused_before_anything_is_built(
    number, arguments, named, monkeypatch, refused
):
    found = Gpus((Gpu("NVIDIA H200", 150 * 10**9, (9, 0)),) * number, "none here")
    give_machine(monkeypatch, found, 100e9)
    monkeypatch.setattr(command, "_run", lambda *_: pytest.fail("processes were started"))
    refused(["bench", *arguments], named)


@pytest.fixture
def on_cpu(tmp_path):
    """The command for the CPU, with the golden data's config, or a text in place of it."""

    def on_cpu(*arguments, config=None):
        text = json.dumps(golden_json("config.json")) if config is None else config
        (tmp_path / "config.json").write_text(text)
        config = ["--config", str(tmp_path / "config.json"), "--text-tokens", "20"]
        return main(["bench", "--device", "cpu", *config, *arguments])

    return on_cpu


def test_on_a_cpu_the_estimated_peak_must_fit(on_cpu, monkeypatch, capsys):
    monkeypatch.setattr(memory_check, "free_ram", lambda: 1e6)
    assert on_cpu(config=json.dumps(golden_json("config.json") | {"num_layers": 400})) == 1
    assert "MB of the machine's memory, of which 1.0 MB are free" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", '{"model_type": "a", "vision_config": {}}', "{}"])
def test_a_config_of_another_model_is_refused(text, on_cpu, capsys):
    assert on_cpu(config=text) == 1
    assert re.search("config.json (is not of a glm-4v|holds a list)", capsys.readouterr().err)


def test_a_failed_measurement_is_a_row_with_its_error_and_the_next_one_is_made(
    on_cpu, monkeypatch, tmp_path, capsys
):
    asked = []

    def run(started, printed, environment, timeout):
        settings, out = started[-2:]
        asked.append(Settings(**json.loads(settings)))
        if len(asked) == 2:
            with open(out, "w") as file:
                json.dump({"samples_per_s_per_gpu": 1.5}, file)
        return "ValueError: no" if len(asked) == 1 else ""

    monkeypatch.setattr(command, "_run", run)
    out = tmp_path / "rows.json"
    assert on_cpu("--trained", "lm", "full", "--no-compile", "--out", str(out)) == 0
    failed, made = json.loads(out.read_text())
    assert [row["settings"] for row in (failed, made)] == [asdict(one) for one in asked]
    assert (failed["error"], failed["device"]) == ("ValueError: no", "cpu")
    assert made["samples_per_s_per_gpu"] == 1.5 and "error" not in made
    assert made["command"].startswith("glm4v-patched bench --trained full --gpus 2 --text-tokens")
    assert made["command"].endswith(" --device cpu")
    assert "ValueError: no" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("print('OutOfMemoryError', flush=True); 1 / 0", "OutOfMemoryError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("print('a'); print('b'); exit(1)", "a\nb"),
        ("exit(3)", "ended with status 3 and printed nothing"),
        ("print('Error')", ""),
        ("import time; print('Error', flush=True); time.sleep(60)", "not done after 3 s"),
    ],
)
def test_why_processes_failed_is_what_they_printed(code, error, tmp_path):
    began = time.monotonic()
    assert command._run([sys.executable, "-c", code], tmp_path / "printed", {}, 3) == error
    assert time.monotonic() - began < 40  # what is late was ended


def test_a_machine_that_may_do_it_is_tried(monkeypatch):
    found = Gpus((Gpu("NVIDIA H200", 150 * 10**9, (9, 0)),) * 2)
    give_machine(monkeypatch, found, 270e9)
    asked = [Settings(trained=name) for name in TRAINED if name != "qlora"]
    machine.require_machine([*asked, replace(asked[0], offload=True)], 2, on_cpu=False)
    # These were measured on two H200s.
    row = Settings(trained="full", micro_batch=2, optimizer="adamw_8bit", memory_limit=139)
    machine.require_machine([row], 2, on_cpu=False)
