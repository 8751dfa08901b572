"""A row that trains through the recipe from files: the same work as a row of made-up tensors."""

import json
from dataclasses import replace

import pytest
from PIL import Image

from glm4v_patched.bench.command import figures
from glm4v_patched.bench.from_files import recipe_of, write_model, write_rows
from glm4v_patched.bench.roofline import supervised
from glm4v_patched.bench.settings import Settings
from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.data.rows import read_conversations
from glm4v_patched.finetune.recipe import Recipe
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.tiny import golden_json


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
    engine = recipe.engine.model_dump()
    for name in engine.keys() & vars(settings).keys():
        assert engine[name] == getattr(settings, name)
    too_short = {"text_tokens": 2, "shortest_text": None, "model": str(folder / "model")}
    with pytest.raises(ValueError, match="--text-tokens 2 leaves no room"):
        write_rows(folder / "short", replace(settings, **too_short), 1)
    measured = {"samples_per_s": 8.0, "peak_allocated_gib": 1.5, "predicted_gib": 1.4}
    report = {"measured": measured, "world_size": 2, "history": [{"step": 1, "loss": 3.5}]}
    report["policies"] = {"tower": "full", "language": "none", "gathered": 1e9}
    row = figures(report)  # of one GPU
    assert (row["samples_per_s_per_gpu"], row["peak_allocated_gib"]) == (4, 1.5)
    assert (row["losses"], row["policies"]) == ([3.5], report["policies"])
