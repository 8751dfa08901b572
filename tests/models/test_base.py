"""A model is known by what is in it, whatever it is called; on what processes it runs."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import save_file

from glm4v_patched.engine.gpus import Gpu, Gpus
from glm4v_patched.models import base as base_of_models
from glm4v_patched.models import placement
from glm4v_patched.models.base import (
    ModelSource,
    digest_file,
    identify,
    pin_revision,
    require_unchanged_base,
)
from glm4v_patched.models.find import find_model_problem, find_source
from glm4v_patched.models.loading import load_processor
from glm4v_patched.models.placement import Placement, PlacementError, place_processes
from tests.helpers.tiny import update_json


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    config = {"model_type": "chatglm", "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"w": torch.arange(4.0)}, folder / "model.safetensors")
    return folder


def test_a_model_is_known_by_its_contents_and_not_by_its_name(tmp_path):
    one, moved = write_model(tmp_path / "one"), tmp_path / "moved"
    digests = identify(ModelSource(str(one)))
    shutil.copytree(one, moved)
    (moved / "README.md").touch()
    (moved / "training_args.bin").touch()  # the Trainer leaves it beside what it saves
    assert identify(ModelSource(str(moved))) == digests
    for name in ("model.safetensors", "tokenizer.json", "model-2.safetensors"):
        before = identify(ModelSource(str(moved)))
        (moved / name).write_text("others")
        other = identify(ModelSource(str(moved)))
        assert {n for n in other if other[n] != before.get(n)} == {name}
    (moved / "adapter_model.safetensors").touch()
    (moved / "adapter_config.json").touch()
    with_adapters = identify(ModelSource(str(one), adapters=moved))
    (moved / "adapter_model.safetensors").write_text("others")
    assert identify(ModelSource(str(one), adapters=moved)) != with_adapters


def test_large_files_are_known_by_their_size_and_samples_from_the_first_byte_to_the_last(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(base_of_models, "MAX_FULLY_HASHED_BYTES", 1000)
    monkeypatch.setattr(base_of_models, "BLOCK_BYTES", 10)
    file, content = tmp_path / "file", bytearray(range(256)) * 100

    def digest_of(content: bytes) -> str:
        file.write_bytes(content)
        return digest_file(file)

    expected = digest_of(content)
    assert expected.endswith("(of samples)") and not digest_of(b"0" * 1000).endswith(")")
    for at in (0, len(content) - 1):
        changed = content.copy()
        changed[at] ^= 1
        assert digest_of(changed) != expected
    assert digest_of(b"0" * 30_000) != digest_of(b"0" * 30_001)


def test_a_model_of_the_hub_is_known_by_its_commit(tmp_path, monkeypatch):
    write_model(tmp_path / "snapshots" / "c0ffee")
    downloads = []

    def answer(of_config, of_adapters=None):
        def download(repository, name, revision):
            downloads.append((repository, name, revision))
            if error := of_config if name == "config.json" else of_adapters:
                raise error
            return str(tmp_path / "snapshots" / "c0ffee" / name)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)

    answer(None, LocalEntryNotFoundError("offline"))
    pinned = pin_revision(ModelSource("org/name", "main"))
    assert pinned == ModelSource("org/name", "c0ffee")
    names = [("config.json", "main"), ("adapter_config.json", "c0ffee")]
    assert downloads == [("org/name", *name) for name in names]
    assert identify(pinned) == {"model on the Hub": "org/name at c0ffee"}
    assert pin_revision(ModelSource(str(tmp_path))) == ModelSource(str(tmp_path))
    for base, message in (
        (None, "org/name on the Hub contains adapters; .*hf download"),
        (
            EntryNotFoundError("no such file"),
            "org/name is not a local folder, and cannot be loaded",
        ),
    ):
        answer(base)
        with pytest.raises(ValueError, match=message):
            pin_revision(ModelSource("org/name"))


def test_adapters_on_a_model_of_the_hub_that_is_no_glm4v_are_refused(tmp_path, monkeypatch):
    config = write_model(tmp_path / "snapshots" / "c0ffee") / "config.json"
    update_json(config, model_type="llama")

    def download(repository, name, revision):
        if name != "config.json":
            raise EntryNotFoundError("no such file")
        return str(config)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(
        ValueError, match="adapters of .* not belong to a glm-4v: model_type is 'llama'"
    ):
        pin_revision(ModelSource("org/name", adapters=tmp_path / "adapters"))


def test_a_file_that_the_base_model_has_lost_is_named(tmp_path):
    base = ModelSource(str(write_model(tmp_path / "model")), adapters=tmp_path)
    recorded = identify(ModelSource(base.model)) | {"gone.safetensors": "abc"}
    (tmp_path / "training.json").write_text(json.dumps({"base": recorded}))
    with pytest.raises(ValueError, match="\n  gone.safetensors: abc recorded, None now$"):
        require_unchanged_base(base)
    (Path(base.model) / "gone.safetensors").touch()
    with pytest.raises(ValueError, match="\n  gone.safetensors: abc recorded, [0-9a-f]{64} now$"):
        require_unchanged_base(base)


def test_adapters_bring_their_own_processor_or_have_the_models(files, adapters):
    model = str(files.model)
    processor = load_processor(ModelSource(model))
    shared = load_processor(ModelSource(model, adapters=files.adapters))
    assert shared.chat_template == processor.chat_template
    processor.chat_template = processor.tokenizer.chat_template = "hello"
    processor.save_pretrained(adapters)
    assert load_processor(ModelSource(model, adapters=adapters)).chat_template == "hello"


@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        (4, {"processes": 4}, Placement(4)),
        (4, {"processes": None, "zero_stage": 0}, Placement(1)),
        (0, {"processes": None, "device": "cpu"}, Placement(1, on_cpu=True)),
        (4, {"processes": 5}, "--processes"),
        (0, {"processes": None}, "--device"),
        (4, {"processes": 2, "zero_stage": 0}, "engine.zero_stage"),
    ],
)
def test_each_process_has_a_gpu_or_all_are_on_the_cpu(monkeypatch, gpus, options, expected):
    machine = Gpus((Gpu("a GPU", 80, (9, 0)),) * gpus, "" if gpus else "none is here")
    monkeypatch.setattr(placement, "find_gpus", lambda: machine)
    if isinstance(expected, Placement):
        assert place_processes(**options) == expected and expected.local_process_share == 1
        return
    with pytest.raises(PlacementError) as refused:
        place_processes(**options)
    assert refused.value.field == expected
    assert Placement(8, local_processes=2).local_process_share == 1 / 4


def test_a_name_that_is_neither_a_folder_nor_a_hub_id_is_refused(monkeypatch):
    """Without a look at the Hub."""
    for name in (f"our-org/{'a' * 88}", "o/n_a.me"):
        assert find_model_problem(name) is None
    odd = ["our-org", "our--org/a", "a/b/c", "our-org/a.git", "our-org/ä", f"our-org/{'a' * 97}"]
    for name in [*odd, "/no/such", "./org/name", "-a/b", "~/model"]:
        problem = find_model_problem(name)
        assert problem.startswith("there is no such folder; expected a folder, or an id of the Hub")
    # Older releases of huggingface_hub take letters beyond ASCII.
    monkeypatch.setattr("huggingface_hub.utils.validate_repo_id", lambda name: None)
    assert "there is no such folder" in find_model_problem("our-org/ä")


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e308"])
def test_settings_that_are_not_finite_are_refused_where_they_are_read(adapters, model, text):
    def refused(file: Path, changed: dict, named: str) -> None:
        before = file.read_text()
        file.write_text(json.dumps(json.loads(before) | changed))
        with pytest.raises(ValueError) as error:
            find_source(str(file.parent))
        file.write_text(before)
        assert named in str(error.value) and file.name in str(error.value), str(error.value)
        assert len(str(error.value).splitlines()) == 1

    value = json.loads(text)
    refused(adapters / "adapter_config.json", {"lora_alpha": value}, f"lora_alpha is {value}")
    patterns = {"alpha_pattern": {"query_key_value": value}}
    refused(adapters / "adapter_config.json", patterns, f"alpha_pattern.query_key_value is {value}")
    vision = json.loads((model / "config.json").read_text())["vision_config"]
    refused(model / "config.json", {"rope_ratio": value}, "rope_ratio")
    named = "vision_config: layer_norm_eps"
    refused(model / "config.json", {"vision_config": vision | {"layer_norm_eps": value}}, named)
    refused(model / "generation_config.json", {"temperature": value}, "temperature")
    assert find_source(str(adapters)).adapters and find_source(str(model)).adapters is None
