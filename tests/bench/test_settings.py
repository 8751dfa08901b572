"""What a measurement is asked for, and the useful work that its figures are shares of."""

import json
import re
import subprocess
from dataclasses import fields, replace

import pytest
import torch

from glm4v_patched.bench import machine, worker
from glm4v_patched.bench.ablation import MEASURES, ablation
from glm4v_patched.bench.settings import Settings
from glm4v_patched.bench.sizes import batch_of, options_of
from glm4v_patched.cli import main
from glm4v_patched.engine.gpus import Gpu, Gpus
from glm4v_patched.engine.memory_plan import Batch
from glm4v_patched.engine.options import TRAINED
from glm4v_patched.remote.loss import IGNORE_INDEX
from tests.helpers.tiny import golden_json, tiny_model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trained": "lora"}, "trained is 'lora'; expected one of full, lm"),
        ({"zero_stage": 4}, "zero_stage is 4; expected one of 0, 1, 2, 3"),
        ({"micro_batch": 0}, "micro_batch is 0; expected at least 1"),
        ({"steps": 0}, "steps is 0; expected at least 1"),
        ({"tower": "most"}, "tower's policy is 'most'; expected auto, none"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd'; expected one of adamw, adamw_8bit"),
        ({"zero_options": "no"}, "zero_options 'no' is not JSON"),
        ({"zero_options": "[1]"}, "zero_options is '\\[1]'; expected an object"),
        (
            {"zero_options": '{"stage3_allgather_sequential": true}'},
            "zero_options has stage3_allgather_sequential.*add --copy-gathered",
        ),
        ({"shortest_text": 513}, "shortest_text is 513; expected from 1 to text_tokens, .* is 512"),
        ({"shortest_text": 0}, "shortest_text is 0; expected from 1"),
        ({"packed": True, "against": "original"}, "takes no packed rows"),
        ({"offload": True, "optimizer": "adamw_8bit"}, "offload with adamw_8bit"),
        ({"memory_limit": 0.0}, "memory_limit is 0.0; expected at least 1"),
        ({"memory_limit": float("nan")}, "memory_limit is nan; expected at least 1"),
        ({"stage3_max_live_parameters": -1.0}, "parameters is -1.0; expected at least 0"),
        ({"steps": 0, "zero_stage": 4}, "(?s)zero_stage is 4.*\nsteps is 0"),
        ({"layers_ahead": -1}, "layers_ahead is -1; expected at least 0"),
        ({"trained": "qlora"}, "qlora with ZeRO stage 3.*use stage 0"),
        ({"offload": True, "zero_stage": 0}, "offload with ZeRO stage 0"),
        ({"trained": "full", "reuse_features": True}, "full trains the vision tower"),
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
    batch = worker._batch(model.config, padded, "cpu")
    in_one_row = worker._batch(model.config, replace(padded, packed=True), "cpu")
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
    options = options_of(Settings(**asked, all_logits=True, loss_chunk_size=7))
    assert {name: getattr(options, name) for name in asked} == asked
    assert (options.skip_logits, options.loss_chunk_size) == (False, 7)
    assert options_of(Settings()).skip_logits


def test_the_original_is_left_as_it_is():
    options = options_of(Settings(trained="lora_lm", against="folder", language="none"))
    assert (options.tower, options.language, options.compile) == ("full", "full", False)
    assert not options.gathers_whole_layers
    assert (options.norms_in_place, options.layers_ahead) == (False, 0)


def test_ligers_kernels_are_taken_where_they_are_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(worker, "apply", lambda **options: asked.append(options))
    settings = Settings(trained="lm", compile=False)
    for liger in (False, True):
        worker._build(replace(settings, liger=liger), tiny_model().config, dtype=torch.bfloat16)
    assert asked == [{"rms_norm": True, "swiglu": True}]


def test_settings_survive_the_way_to_the_processes():
    settings = Settings(trained="lm", tower="every 2", memory_limit=22.5)
    assert Settings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("number", "arguments", "message"),
    [
        (0, [], "there is no GPU: none here; .* --device cpu --config FILE"),
        (1, [], "--gpus 2 on a machine with 1: expected --gpus 1$"),
        (2, ["--gpus", "4"], "--gpus 4 on a machine with 2: expected --gpus 2 or fewer"),
        (2, ["--gpus", "0"], "--gpus 0: expected at least 1"),
        (2, ["--timeout", "nan"], "--timeout nan: expected a number above 0"),
        (2, ["--config", "none.json"], "--config none.json cannot be read: No such file"),
        (0, ["--device", "cpu"], "--device cpu with the real model, .*: expected --config"),
        (
            1,
            ["--trained", "full", "lora_lm", "--gpus", "1"],
            "^glm4v-patched: full, micro-batch 1, on 1 processes: weights, gradients and optimizer "
            "take 222.5 GB of each GPU, which has 150.0 GB; expected more --gpus with --zero-stage "
            "3, --offload, --optimizer adamw_8bit, or another --trained$",
        ),
        (
            2,
            ["--trained", "lora_lm", "--memory-limit", "10"],
            "take 13.9 GB of each GPU, which has 10.7 GB",
        ),
        (
            2,
            ["--trained", "full", "--offload"],
            "full, .*: takes 166.9 GB of the machine's memory, of which 100.0 GB are free; "
            "expected no --offload",
        ),
    ],
)
def test_a_machine_that_cannot_measure_is_refused_before_anything_is_built(
    number, arguments, message, monkeypatch, capsys
):
    found = Gpus((Gpu("NVIDIA H200", 150 * 10**9),) * number, "none here")
    monkeypatch.setattr(machine, "find_gpus", lambda: found)
    monkeypatch.setattr(machine, "free_ram", lambda: 100e9)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("processes were started"))
    assert main(["bench", *arguments]) == 1
    told = capsys.readouterr().err.strip()
    assert "\n" not in told and re.search(message, told)


def test_on_a_cpu_the_estimated_peak_must_fit(tmp_path, monkeypatch, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(golden_json("config.json") | {"num_layers": 400}))
    monkeypatch.setattr(machine, "free_ram", lambda: 1e6)
    arguments = ["bench", "--device", "cpu", "--config", str(config)]
    assert main([*arguments, "--text-tokens", "20"]) == 1
    assert "GB of the machine's memory, of which 0.0 GB are free" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"model_type": "llama", "vision_config": {}}', "{}"]
)
def test_a_config_of_another_model_is_refused(content, tmp_path, capsys):
    (tmp_path / "config.json").write_text(content)
    assert main(["bench", "--device", "cpu", "--config", str(tmp_path / "config.json")]) == 1
    told = capsys.readouterr().err
    assert re.search("config.json (is not of a glm-4v; expected|cannot be read: Expecting)", told)


def test_a_machine_that_may_do_it_is_tried(monkeypatch):
    found = Gpus((Gpu("NVIDIA H200", 150 * 10**9),) * 2)
    monkeypatch.setattr(machine, "find_gpus", lambda: found)
    monkeypatch.setattr(machine, "free_ram", lambda: 200e9)
    asked = [Settings(trained=name) for name in TRAINED if name != "qlora"]
    machine.require_machine([*asked, replace(asked[0], offload=True)], 2, on_cpu=False)
    # These were measured on two H200s.
    row = Settings(trained="full", micro_batch=2, optimizer="adamw_8bit", memory_limit=139)
    machine.require_machine([row], 2, on_cpu=False)


def test_several_processes_without_zero_are_refused_before_anything_runs(capsys):
    assert main(["bench", "--zero-stage", "0", "--gpus", "2"]) == 1
    assert "2 GPUs with ZeRO stage 0" in capsys.readouterr().err


def test_an_ablation_goes_from_plain_training_to_what_was_asked_for():
    asked = Settings(
        trained="lora_lm",
        micro_batch=4,
        packed=True,
        optimizer="adamw_8bit",
        liger=True,
        reuse_features=True,
        memory_limit=40,
    )
    steps = ablation(asked)
    assert len(steps) == 1 + len(MEASURES)
    settings = list(steps.values())
    plain = settings[0]
    assert plain.all_logits and not plain.compile and not plain.reuse_features
    assert plain.attn_implementation == "eager" and not plain.liger and plain.optimizer == "adamw"
    assert (plain.tower, plain.language, plain.micro_batch, plain.memory_limit) == (
        *("full", "full"),
        *(4, 40),
    )
    assert settings[-1] == asked
    changes = [
        {field.name for field in fields(Settings) if before_after_differ(pair, field.name)}
        for pair in zip(settings, settings[1:], strict=False)
    ]
    assert changes == [set(names) for names in MEASURES.values()]


def before_after_differ(pair: tuple[Settings, Settings], name: str) -> bool:
    return getattr(pair[0], name) != getattr(pair[1], name)


def test_what_was_not_asked_for_is_no_step():
    asked = Settings(trained="full", compile=False, layers_ahead=0)
    names = [
        "(nothing)",
        "fused attention",
        "logits only where a token is learned, in chunks",
        "activations kept",
        "weights kept gathered",
    ]
    assert list(ablation(asked)) == names
    assert "weights gathered without copies" in ablation(replace(asked, compile=True))
    assert list(ablation(replace(asked, zero_stage=0))) == names[:-1]
