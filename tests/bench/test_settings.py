"""What a measurement is asked for, and the processes that make it."""

import json
import sys
import time
from dataclasses import asdict, replace

import pytest
from PIL import Image

from glm4v_patched.bench import training, worker
from glm4v_patched.bench.from_files import recipe_of, write_model, write_rows
from glm4v_patched.bench.roofline import batch_of, supervised
from glm4v_patched.bench.settings import Settings
from glm4v_patched.bench.training import figures
from glm4v_patched.cli import main
from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.data.rows import read_conversations
from glm4v_patched.engine import memory_check
from glm4v_patched.engine.memory_plan import Batch
from glm4v_patched.finetune.recipe.sections import Recipe
from glm4v_patched.remote.loss import IGNORE_INDEX
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.tiny import golden_json, tiny_model


def test_lengths_of_text_fall_evenly():
    asked = Settings(trained="lm", micro_batch=4, text_tokens=100)
    assert asked.text_lengths() == [100] * 4
    assert replace(asked, shortest_text=40).text_lengths() == [100, 80, 60, 40]
    assert replace(asked, shortest_text=40, micro_batch=1).text_lengths() == [100]


def test_qlora_is_not_compiled():
    with pytest.raises(ValueError, match="qlora is not compiled"):
        Settings(trained="qlora")


@pytest.mark.parametrize("shortest", [None, 10])
def test_packed_samples_are_those_of_padded_rows(shortest):
    model = tiny_model()
    padded = Settings(trained="lm", micro_batch=3, text_tokens=20, shortest_text=shortest)
    packed = replace(padded, packed=True)
    batch, in_one_row = (worker._batch(model.config, each) for each in (padded, packed))
    assert len(batch["input_ids"]) == 3 and len(in_one_row["input_ids"]) == 1
    assert ("attention_mask" in batch) == (shortest is not None)
    learned = sum(length - length // 2 for length in padded.text_lengths())
    for rows in (batch, in_one_row):
        assert int((rows["labels"] != IGNORE_INDEX).sum()) == learned
    losses = [model(**rows).loss.item() for rows in (batch, in_one_row)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    # Memory: 6 positions for an image with its begin and end, beside the ids of text.
    assert batch_of(padded, model.config, 2) == Batch(rows=3, row_length=26, processes=2)
    length = sum(6 + text for text in padded.text_lengths())
    assert batch_of(packed, model.config, 1) == Batch(rows=1, row_length=length, images_per_row=3)


def test_what_is_asked_for_reaches_the_engine():
    asked = {"attn_implementation": "eager", "layers_ahead": 1, "loss_chunk_size": 7}
    options = Settings(**asked, all_logits=True).engine_options()
    assert {name: getattr(options, name) for name in asked} == asked and not options.skip_logits
    original = Settings(against="folder", language="none").engine_options()
    assert (original.language, original.compile, original.layers_ahead) == ("full", False, 0)
    assert not original.gathers_whole_layers and not original.norms_in_place


def test_a_failed_measurement_is_a_row_with_its_error_and_the_next_one_is_made(
    monkeypatch, tmp_path, capsys
):
    config, out = tmp_path / "config.json", tmp_path / "rows.json"
    on_cpu = ["bench", "--device", "cpu", "--config", str(config), "--text-tokens", "20"]
    for content, told in (("[]", "holds a list"), ("{}", "is not a glm-4v's")):
        config.write_text(content)
        assert main(on_cpu) == 1 and f"config.json {told}" in capsys.readouterr().err
    config.write_text(json.dumps(golden_json("config.json")))
    with monkeypatch.context() as patch:
        patch.setattr(memory_check, "free_ram", lambda: 1e5)
        assert main(on_cpu) == 1 and "of which 100.0 kB are free" in capsys.readouterr().err
    asked = []

    def run(started, folder, environment, timeout):
        settings, out = started[-2:]
        asked.append(Settings(**json.loads(settings)))
        if len(asked) == 2:
            with open(out, "w") as file:
                json.dump({"samples_per_s_per_gpu": 1.5}, file)
        return "ValueError: no" if len(asked) == 1 else ""

    monkeypatch.setattr(training, "run", run)
    assert main([*on_cpu, "--trained", "lm", "full", "--no-compile", "--out", str(out)]) == 0
    failed, made = json.loads(out.read_text())
    assert [row["settings"] for row in (failed, made)] == [asdict(one) for one in asked]
    assert (failed["error"], failed["device"]) == ("ValueError: no", "cpu")
    assert made["samples_per_s_per_gpu"] == 1.5 and "error" not in made
    assert made["command"].startswith("glm4v-patched bench --trained full --gpus 2 --text-tokens")
    assert made["command"].endswith(" --device cpu")
    assert "ValueError: no" in capsys.readouterr().out


def test_why_processes_failed_is_what_they_printed(tmp_path):
    began = time.monotonic()
    for seconds, code, error in (
        (30, "print('OutOfMemoryError', flush=True); 1 / 0", "OutOfMemoryError"),
        (30, "print('a'); print('b'); exit(1)", "a\nb"),
        (30, "exit(3)", "ended with status 3 and printed nothing"),
        (30, "print('Error')", ""),
        (1, "import time; print('Error', flush=True); time.sleep(60)", "not done after 1 s"),
    ):
        assert training.run([sys.executable, "-c", code], tmp_path, {}, seconds) == error
    assert time.monotonic() - began < 50  # what is late was ended


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "config.json").write_text(json.dumps(golden_json("config.json")))
    asked = {"from_files": "90x70", "config": str(folder / "config.json"), "compile": False}
    settings = Settings(**asked, text_tokens=40, shortest_text=20, micro_batch=2)
    write_model(folder / "model", settings)
    write_rows(folder, settings, 20)
    return folder, settings


def test_rows_are_as_long_as_those_without_files_and_teach_as_much(files):
    folder, settings = files
    processor = ChatGLMProcessor.from_pretrained(folder / "model")
    conversations = read_conversations(folder / "train.jsonl")
    sizes = ConversationCollator(processor).measure(conversations)
    texts = settings.text_lengths() * 10
    assert [size.positions for size in sizes] == [6 + text for text in texts]
    assert [size.learned for size in sizes] == [supervised(text) for text in texts]
    pictures = {messages[0]["image"] for messages in conversations}
    assert len(pictures) == 16
    assert {Image.open(picture).size for picture in pictures} == {(90, 70)}


def test_the_recipe_has_what_is_measured_and_the_engines_defaults_else(files):
    folder, settings = files
    recipe = Recipe.of(recipe_of(settings, folder))
    assert recipe.trainer.max_steps == settings.warm_up + settings.steps
    assert recipe.trainer.per_device_train_batch_size == 2
    engine = asdict(recipe.engine)
    for name in engine.keys() & vars(settings).keys():
        assert engine[name] == getattr(settings, name)
    too_short = {"text_tokens": 2, "shortest_text": None, "model": str(folder / "model")}
    with pytest.raises(ValueError, match="--text-tokens 2 leaves no room"):
        write_rows(folder / "short", replace(settings, **too_short), 1)


def test_the_speed_of_a_gpu_is_its_share_of_that_of_all():
    measured = {"samples_per_s": 8.0, "peak_allocated_gib": 1.5, "predicted_gib": 1.4}
    report = {"measured": measured, "world_size": 2, "history": [{"step": 1, "loss": 3.5}]}
    report["policies"] = {"tower": "full", "language": "none", "gathered": 1e9}
    row = figures(report)  # of one GPU
    assert (row["samples_per_s_per_gpu"], row["peak_allocated_gib"]) == (4, 1.5)
    assert (row["losses"], row["policies"]) == ([3.5], report["policies"])
