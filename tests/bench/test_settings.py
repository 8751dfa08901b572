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
    ("options", "message"),
    [
        ({"trained": "lora"}, "--trained is 'lora'; expected one of full, lm"),
        ({"zero_stage": 4}, "--zero-stage is 4; expected one of 0, 1, 2, 3"),
        ({"micro_batch": 0}, "--micro-batch is 0; expected at least 1"),
        ({"steps": 0}, "--steps is 0; expected at least 1"),
        ({"tower": "most"}, "--tower's policy is 'most'; expected auto, none"),
        ({"optimizer": "sgd"}, "--optimizer is 'sgd'; expected one of adamw, adamw_8bit"),
        ({"zero_options": "no"}, "--zero-options is 'no'; expected a JSON object"),
        ({"zero_options": "[1]"}, "--zero-options is '\\[1]'; expected a JSON object"),
        (
            {"zero_options": '{"stage3_allgather_sequential": true}'},
            "zero_options has allgather_sequential.*add --copy-gathered",
        ),
        ({"shortest_text": 513}, "shortest_text is 513; expected from 1 to text_tokens, .* is 512"),
        ({"shortest_text": 0}, "shortest_text is 0; expected from 1"),
        ({"packed": True, "against": "original"}, "knows no packed: leave out one"),
        ({"offload": True, "optimizer": "adamw_8bit"}, "offload with adamw_8bit"),
        ({"memory_limit": 0.0}, "--memory-limit is 0.0; expected at least 1"),
        ({"memory_limit": float("nan")}, "--memory-limit is nan; expected at least 1"),
        ({"stage3_max_live_parameters": -1.0}, "live-parameters is -1.0; expected at least 0"),
        ({"steps": 0, "zero_stage": 4}, "(?s)--zero-stage is 4.*\n--steps is 0"),
        ({"layers_ahead": -1}, "--layers-ahead is -1; expected at least 0"),
        ({"trained": "qlora"}, "^qlora with zero_stage 3.*expected zero_stage 0"),
        ({"trained": "qlora", "zero_stage": 0}, "qlora is not compiled.*add --no-compile"),
        ({"offload": True, "zero_stage": 0}, "^offload with zero_stage 0: .* zero_stage 1, 2 or 3"),
        (
            {"trained": "full", "reuse_features": True},
            "^reuse_features with trained full, which ",
        ),
        ({"fp8": True, "trained": "qlora"}, "fp8 with trained qlora, whose weights have 4 bits"),
        ({"fp8": True, "against": "original"}, "the original's code, of against, knows no fp8"),
        (
            {"fp8": True, "zero_options": '{"zero_quantized_weights": true}'},
            "fp8 with zero_quantized_weights, which quantises .* one of them to be false",
        ),
        ({"from_files": "big"}, "--from-files is 'big'; expected pixels as 4000x3000"),
        ({"from_files": "4000x0"}, "--from-files is '4000x0'; expected pixels"),
        ({"from_files": "9x9", "packed": True, "liger": True}, "recipe's own liger, packed: leave"),
        ({"model": "folder"}, "model is folder, without from_files"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
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
    asked = {"trained": "lm", "attn_implementation": "eager", "compile": False, "layers_ahead": 1}
    options = Settings(**asked, all_logits=True, loss_chunk_size=7).engine_options()
    assert {name: getattr(options, name) for name in asked} == asked
    assert (options.skip_logits, options.loss_chunk_size) == (False, 7)
    assert Settings().engine_options().skip_logits
    original = Settings(against="folder", language="none").engine_options()
    assert (original.tower, original.language, original.compile) == ("full", "full", False)
    assert not original.gathers_whole_layers
    assert (original.norms_in_place, original.layers_ahead) == (False, 0)


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
    ("number", "arguments", "message"),
    [
        (0, [], "there is no GPU: none here; .* --device cpu --config FILE$"),
        (1, [], "2 processes on 1 GPUs: .* expected --gpus 1, or --device cpu --config FILE$"),
        (2, ["--gpus", "4"], "4 processes on 2 GPUs: .* expected --gpus 2 or fewer"),
        (2, ["--gpus", "0"], "--gpus 0: expected at least 1"),
        (2, ["--timeout", "nan"], "--timeout nan: expected a number above 0"),
        (2, ["--config", "none.json"], "none.json cannot be read: .*No such file"),
        (0, ["--device", "cpu"], "--device cpu with the real model, .*: expected --config"),
        (
            1,
            ["--trained", "full", "lora_lm", "--gpus", "1"],
            "^glm4v-patched: full, micro-batch 1, on 1 processes: weights, gradients and optimizer "
            "take 222.5 GB of each GPU, which has 147.9 GB; expected more GPUs with zero_stage 3, "
            "offload true, optimizer adamw_8bit, or another trained$",
        ),
        (
            2,
            ["--trained", "lora_lm", "--memory-limit", "10"],
            "take 13.9 GB of each GPU, which has 10.7 GB",
        ),
        (
            2,
            ["--trained", "full", "--offload"],
            "full, .*: offload is true, and the optimizer takes 222.5 GB of the machine's memory, "
            "of which 100.0 GB are free; expected a machine with more, or another trained",
        ),
    ],
)
def test_a_machine_that_cannot_measure_is_refused_before_anything_is_built(
    number, arguments, message, monkeypatch, capsys
):
    found = Gpus((Gpu("NVIDIA H200", 150 * 10**9, (9, 0)),) * number, "none here")
    give_machine(monkeypatch, found, 100e9)
    monkeypatch.setattr(command, "_run", lambda *_: pytest.fail("processes were started"))
    assert main(["bench", *arguments]) == 1
    told = capsys.readouterr().err.strip()
    assert "\n" not in told and re.search(message, told)


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


@pytest.mark.parametrize("text", ["[]", "{", '{"model_type": "a", "vision_config": {}}', "{}"])
def test_a_config_of_another_model_is_refused(text, on_cpu, capsys):
    assert on_cpu(config=text) == 1
    told = capsys.readouterr().err
    wrong = "is not of a glm-4v; expected|holds a list; expected|cannot be read: Expecting"
    assert re.search(f"config.json ({wrong})", told)


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
    assert made["command"].startswith(
        "glm4v-patched bench --trained full --gpus 2 --text-tokens 20"
    )
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
