"""A checkpoint belongs to one model and its rows, whatever they are called."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from glm4v_patched.finetune.origin import Rows, base_of
from glm4v_patched.models import base as base_of_models
from glm4v_patched.models.base import Base, digest, identify, pin
from tests.helpers.recipes import recipe

LANGUAGE = "base_model.model.transformer.encoder.layers.0.self_attention.query_key_value"
TOWER = "base_model.model.transformer.vision.transformer.layers.0.attention.query_key_value"


def model(folder: Path, **changes) -> Path:
    folder.mkdir(parents=True)
    config = {"model_type": "chatglm", "vision_config": {}} | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"w": torch.arange(4.0)}, folder / "model.safetensors")
    return folder


def adapters(folder: Path, base: Path | str, *modules: str, **changes) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 8} | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {f"{module}.lora_A.weight": torch.ones(2) for module in modules or [LANGUAGE]}
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def test_a_model_is_known_by_its_contents_and_not_by_its_name(tmp_path):
    one = model(tmp_path / "one")
    found = identify(Base(str(one)))
    shutil.copytree(one, tmp_path / "moved")
    (tmp_path / "moved" / "README.md").touch()
    assert identify(Base(str(tmp_path / "moved"))) == found
    save_file({"w": torch.tensor([0.0, 1, 2, 4])}, tmp_path / "moved" / "model.safetensors")
    other = identify(Base(str(tmp_path / "moved")))
    assert {name for name in found if found[name] != other[name]} == {"model.safetensors"}
    (tmp_path / "moved" / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in identify(Base(str(tmp_path / "moved")))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "part1.bin"])
def test_a_model_is_known_by_its_pickled_weights(tmp_path, name):
    folder = model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / name).write_text("weights")
    found = identify(Base(str(folder)))
    (folder / name).write_text("others")
    other = identify(Base(str(folder)))
    assert found.keys() == other.keys() and found[name] != other[name]
    # The Trainer leaves it beside what it saves.
    (folder / "training_args.bin").touch()
    assert identify(Base(str(folder))) == other


def test_large_files_are_known_by_their_size_and_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(base_of_models, "WHOLE_UP_TO", 1000)
    monkeypatch.setattr(base_of_models, "BLOCK", 10)
    file = tmp_path / "file"
    content = bytearray(torch.arange(256).repeat(100).to(torch.uint8).numpy().tobytes())
    file.write_bytes(content)
    found = digest(file)
    assert found.endswith("(of samples)")
    for at in (0, len(content) - 1):
        changed = content.copy()
        changed[at] ^= 1
        file.write_bytes(changed)
        assert digest(file) != found
    file.write_bytes(b"0" * 30_000)
    zeros = digest(file)
    file.write_bytes(b"0" * 30_001)
    assert digest(file) != zeros
    file.write_bytes(bytes(x ^ 1 for x in content))
    assert digest(file) != found


def test_a_folder_of_adapters_leads_to_their_model(tmp_path):
    base = model(tmp_path / "base")
    folder = adapters(tmp_path / "lora", base)
    found = base_of(recipe({"model": str(folder), "trained": "lora_lm"}))
    assert found == Base(str(base), None, folder)
    names = {"adapters: adapter_config.json", "adapters: adapter_model.safetensors"}
    assert identify(found).keys() == identify(Base(str(base))).keys() | names
    assert base_of(recipe({"model": str(base)})) == Base(str(base))
    on_both = adapters(tmp_path / "both", "org/name", LANGUAGE, TOWER, revision="abc", r=4)
    found = base_of(recipe({"model": str(on_both), "trained": "lora_all", "lora.rank": 4}))
    assert found == Base("org/name", "abc", on_both)


@pytest.mark.parametrize(
    ("made", "asked", "message"),
    [
        ({}, {"trained": "full"}, "trained is 'full'; .*glm4v-patched merge"),
        ({}, {"trained": "lm"}, "trained is 'lm'; .*glm4v-patched merge"),
        ({}, {"trained": "lora_all"}, "on the language model, and trained is 'lora_all'"),
        ({}, {"lora.rank": 4}, "have rank 8, and lora.rank is 4"),
        ({"peft_type": "IA3"}, {}, "peft_type is 'IA3'"),
        ({"base_model_name_or_path": None}, {}, "base_model_name_or_path is None"),
    ],
)
def test_adapters_that_a_recipe_cannot_continue_are_refused(tmp_path, made, asked, message):
    folder = adapters(tmp_path / "lora", model(tmp_path / "base"), **made)
    with pytest.raises(ValueError, match=message):
        base_of(recipe({"model": str(folder), "trained": "lora_lm"} | asked))


def test_a_revision_beside_adapters_is_that_of_their_base_on_the_hub(tmp_path):
    folder = adapters(tmp_path / "lora", "org/name", revision="main")
    asked = {"model": str(folder), "trained": "lora_lm", "revision": "v2"}
    assert base_of(recipe(asked)) == Base("org/name", "v2", folder)
    here = adapters(tmp_path / "here", model(tmp_path / "base"))
    with pytest.raises(ValueError, match="revision is 'v2', and .* of .*base, a folder; expected"):
        base_of(recipe(asked | {"model": str(here)}))


def test_adapters_on_both_towers_are_continued_on_both(tmp_path):
    folder = adapters(tmp_path / "lora", model(tmp_path / "base"), LANGUAGE, TOWER)
    with pytest.raises(ValueError, match="on tower and language model, and trained is 'lora_lm'"):
        base_of(recipe({"model": str(folder), "trained": "lora_lm"}))


def test_adapters_of_what_is_no_glm4v_are_refused(tmp_path):
    text = model(tmp_path / "text", vision_config=None)
    chained = adapters(tmp_path / "chained", text)
    mixed = model(tmp_path / "mixed")
    shutil.copy(chained / "adapter_config.json", mixed)
    for folder, message in (
        (chained, "which is no glm-4v: its model_type is 'chatglm', and its vision_config None"),
        (adapters(tmp_path / "second", chained), "which holds adapters itself"),
        (mixed, "holds both a model and adapters"),
    ):
        with pytest.raises(ValueError, match=message):
            base_of(recipe({"model": str(folder), "trained": "lora_lm"}))


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("target_modules", "(.*)*x!", "for more than 1 s"),
        ("exclude_modules", r"((\w+\.?)+)+!", "for more than 1 s"),
        ("rank_pattern", {"(.*?){20}!": 4}, "for more than 1 s"),
        ("target_modules", "(", "is no regular expression"),
        ("alpha_pattern", {"*": 4}, "is no regular expression"),
    ],
)
def test_patterns_of_adapters_that_would_keep_peft_for_ever_are_refused(
    tmp_path, monkeypatch, field, value, told
):
    monkeypatch.setattr(base_of_models, "SECONDS_FOR_A_PATTERN", 1)
    folder = adapters(tmp_path / "lora", model(tmp_path / "base"), **{field: value})
    with pytest.raises(ValueError, match=rf"adapter_config.json: {field}.* {told}"):
        base_of(recipe({"model": str(folder), "trained": "lora_lm"}))


@pytest.mark.parametrize("damage", ["", "[]", "[" * 99_999, "{"])
def test_a_damaged_config_of_adapters_is_named(tmp_path, damage):
    folder = adapters(tmp_path / "lora", model(tmp_path / "base"))
    (folder / "adapter_config.json").write_text(damage)
    with pytest.raises(ValueError, match="adapter_config.json"):
        base_of(recipe({"model": str(folder), "trained": "lora_lm"}))


def test_weights_of_adapters_that_are_missing_or_damaged_are_named(tmp_path):
    folder = adapters(tmp_path / "lora", model(tmp_path / "base"))
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:20])
    with pytest.raises(ValueError, match="adapter_model.safetensors cannot be read"):
        base_of(recipe({"model": str(folder), "trained": "lora_lm"}))
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match="adapter_model.safetensors is missing"):
        base_of(recipe({"model": str(folder), "trained": "lora_lm"}))


def test_a_model_of_the_hub_is_known_by_its_commit(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    asked = []

    def download(repository, name, revision):
        asked.append((repository, name, revision))
        if name == "adapter_config.json":
            raise LocalEntryNotFoundError("offline")
        folder = tmp_path / "snapshots" / "c0ffee"
        if not folder.is_dir():
            model(folder)
        return str(folder / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    pinned = pin(Base("org/name", "main"))
    assert pinned == Base("org/name", "c0ffee")
    assert asked == [
        ("org/name", "config.json", "main"),
        ("org/name", "adapter_config.json", "c0ffee"),
    ]
    assert identify(pinned) == {"model on the Hub": "org/name at c0ffee"}
    assert pin(Base(str(tmp_path))) == Base(str(tmp_path))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: f"{tmp_path}/c/x")
    with pytest.raises(ValueError, match="org/name of the Hub holds adapters; .*hf download"):
        pin(Base("org/name"))

    def refuse(*args, **kwargs):
        raise EntryNotFoundError("no such file")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(ValueError, match="org/name is no folder here, and cannot be had"):
        pin(Base("org/name"))


def rows(*digests: str) -> Rows:
    return Rows(digests, tuple(range(10, 10 + len(digests))))


def test_what_changes_in_rows_is_said_with_their_lines():
    assert rows(*"abc").changes_to(Rows(("a", "b", "c"), (1, 5, 6))) == []
    assert rows(*"abc").changes_to(rows(*"axc")) == ["rows: 3 there and now, 1 differ (line 11)"]
    assert rows(*"abc").changes_to(rows(*"acb")) == [
        "rows: the same 3, in another order from line 11 on"
    ]
    assert rows(*"abc").changes_to(rows(*"abcde")) == [
        "rows: 3 there, 5 now; 0 are gone; 2 are new (lines 13, 14)"
    ]
    assert rows(*"aabc").changes_to(rows(*"abc")) == [
        "rows: 4 there, 3 now; 1 are gone (line 11); 0 are new"
    ]
    (change,) = rows(*"abcdefgh").changes_to(rows(*"ABCDEFGH"))
    assert change == "rows: 8 there and now, 8 differ (lines 10, 11, 12, 13, 14, ...)"


@settings(derandomize=True, deadline=None, max_examples=200, database=None)
@given(st.lists(st.sampled_from("abc"), max_size=6), st.lists(st.sampled_from("abc"), max_size=6))
def test_rows_change_exactly_when_their_digests_do(there, now):
    assert (rows(*there).changes_to(rows(*now)) == []) == (there == now)
