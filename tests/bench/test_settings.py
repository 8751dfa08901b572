"""Settings of a measurement, its samples, and the processes that measure."""

import json
import sys
import time
from dataclasses import replace

import pytest
from PIL import Image

from glm4v_patched.bench import training
from glm4v_patched.bench.roofline import benchmark_batch, num_supervised
from glm4v_patched.bench.samples import (
    ConstantBatchCollator,
    config_and_processor,
    make_conversations,
)
from glm4v_patched.bench.settings import TrainingSettings
from glm4v_patched.cli import main
from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.engine import memory_check
from glm4v_patched.engine.memory_plan import BatchShape
from glm4v_patched.engine.options import EngineSection
from glm4v_patched.remote.loss import IGNORE_INDEX
from tests.helpers.tiny import golden_json, tiny_model


def test_text_lengths_fall_evenly():
    settings = TrainingSettings(trained="lm", micro_batch=4, text_tokens=100)
    assert settings.text_lengths() == [100] * 4
    assert replace(settings, shortest_text=40).text_lengths() == [100, 80, 60, 40]
    assert replace(settings, shortest_text=40, micro_batch=1).text_lengths() == [100]


def test_settings_reach_a_process_unchanged():
    engine = EngineSection(zero_stage=0, tower="every 2", memory_limit=22.5)
    settings = TrainingSettings(trained="lm", packed=True, engine=engine)
    assert TrainingSettings.from_json(settings.to_json()) == settings
    options = settings.engine_options()
    assert (options.trained, options.tower, options.memory_limit) == ("lm", "every 2", 22.5)
    changed = {"trained": "lm", "packed": True, "zero_stage": 0, "tower": "every 2"}
    assert settings.changed_values() == changed | {"memory_limit": 22.5}


@pytest.mark.parametrize("shortest", [None, 10])
def test_half_of_a_text_is_supervised_and_packing_changes_no_loss(shortest):
    model = tiny_model()
    padded = TrainingSettings(trained="lm", micro_batch=3, text_tokens=20, shortest_text=shortest)
    packed = replace(padded, packed=True)
    batches = [ConstantBatchCollator(model.config, x, seed=0)([]) for x in (padded, packed)]
    assert [len(batch["input_ids"]) for batch in batches] == [3, 1]
    assert ("attention_mask" in batches[0]) == (shortest is not None)
    supervised = sum(length - length // 2 for length in padded.text_lengths())
    for batch in batches:
        assert int((batch["labels"] != IGNORE_INDEX).sum()) == supervised
    losses = [model(**batch).loss.item() for batch in batches]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("shortest", [None, 10])
def test_a_batch_is_planned_as_long_as_its_longest_text_or_packed_as_all_together(shortest):
    config = tiny_model().config
    padded = TrainingSettings(trained="lm", micro_batch=3, text_tokens=20, shortest_text=shortest)
    # An image with its begin and end takes 6 tokens, besides the text tokens.
    assert benchmark_batch(padded, config, 2) == BatchShape(
        num_sequences=3, sequence_length=26, processes=2
    )
    length = sum(6 + text for text in padded.text_lengths())
    assert benchmark_batch(replace(padded, packed=True), config, 1) == BatchShape(
        num_sequences=1, sequence_length=length, images_per_sequence=3
    )


def test_a_failed_measurement_is_a_row_with_its_error_and_the_next_one_runs(
    monkeypatch, tmp_path, capsys
):
    config, out = tmp_path / "config.json", tmp_path / "rows.json"
    on_cpu = ["bench", "--device", "cpu", "--config", str(config), "--text-tokens", "20"]
    for content, message in (("[]", "holds a list"), ("{}", "does not belong to a glm-4v")):
        config.write_text(content)
        assert main(on_cpu) == 1 and f"config.json {message}" in capsys.readouterr().err
    config.write_text(json.dumps(golden_json("config.json")))
    with monkeypatch.context() as patch:
        patch.setattr(memory_check, "free_ram", lambda: 1e5)
        assert main(on_cpu) == 1 and "of which 100.0 kB are free" in capsys.readouterr().err
    measured = []

    def run(command, folder, environment, timeout):
        settings, out = command[-2:]
        measured.append(TrainingSettings.from_json(settings))
        if len(measured) == 2:
            with open(out, "w") as file:
                json.dump({"samples_per_s_per_gpu": 1.5}, file)
        return "ValueError: no" if len(measured) == 1 else ""

    monkeypatch.setattr(training, "run_and_log", run)
    assert main([*on_cpu, "--trained", "lm", "full", "--compile", "true", "--out", str(out)]) == 0
    failed, succeeded = json.loads(out.read_text())
    expected = {"trained": "full", "text_tokens": 20, "compile": True, "config": str(config)}
    assert succeeded["settings"] == expected
    assert [settings.trained for settings in measured] == ["lm", "full"]
    assert (failed["error"], failed["device"]) == ("ValueError: no", "cpu")
    assert succeeded["samples_per_s_per_gpu"] == 1.5 and "error" not in succeeded
    assert "bench --trained full --gpus 2 --text-tokens 20" in succeeded["command"]
    assert succeeded["command"].endswith(" --device cpu")
    assert "ValueError: no" in capsys.readouterr().out


@pytest.mark.parametrize(("stage", "launched", "seen"), [(0, False, "3"), (2, True, "3,1")])
def test_a_process_without_zero_is_alone_with_one_gpu(stage, launched, seen, monkeypatch):
    started = []
    monkeypatch.setattr(training, "run_and_log", lambda *args: started.append(args) or "no")
    monkeypatch.setattr(training, "device_name", lambda on_cpu: "GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    settings = TrainingSettings(engine=EngineSection(zero_stage=stage))
    assert training.measure_in_processes(settings, 1, 5, on_cpu=False)["error"] == "no"
    [(command, _, environment, limit)] = started
    assert ("torch.distributed.run" in command) == launched and limit == 5
    assert environment["CUDA_VISIBLE_DEVICES"] == seen


def test_the_error_of_a_process_is_taken_from_its_output(tmp_path):
    began = time.monotonic()
    for seconds, code, error in (
        (30, "print('OutOfMemoryError', flush=True); 1 / 0", "OutOfMemoryError"),
        (30, "print('a'); print('b'); exit(1)", "a\nb"),
        (30, "exit(3)", "ended with status 3 and printed nothing"),
        (30, "print('Error')", ""),
        (1, "import time; time.sleep(60)", "not done after 1 s"),
    ):
        assert training.run_and_log([sys.executable, "-c", code], tmp_path, {}, seconds) == error
    assert time.monotonic() - began < 50  # the process that timed out was ended


def test_samples_from_files_have_the_tokens_and_labels_of_those_in_memory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(golden_json("config.json")))
    options = {"from_files": "90x70", "config": str(tmp_path / "config.json"), "micro_batch": 2}
    settings = TrainingSettings(**options, text_tokens=40, shortest_text=20)
    config, processor = config_and_processor(settings)
    dialogs = make_conversations(processor, settings, tmp_path, 20)
    sizes = ConversationCollator(processor).measure(dialogs)
    texts = settings.text_lengths() * 10
    assert [size.tokens for size in sizes] == [6 + text for text in texts]
    assert [size.supervised for size in sizes] == [num_supervised(text) for text in texts]
    images = {messages[0]["image"] for messages in dialogs}
    assert len(images) == 16
    assert {Image.open(image).size for image in images} == {(90, 70)}
    assert config.image_token_id == processor.image_token_id
    with pytest.raises(ValueError, match="--text-tokens 2 is too small"):
        make_conversations(processor, TrainingSettings(**options, text_tokens=2), tmp_path, 1)
