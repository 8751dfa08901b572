"""A model is known by what is in it, whatever it is called."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from glm4v_patched.models import base as base_of_models
from glm4v_patched.models.base import Base, digest, identify, pin, time_limit


def model(folder: Path, **changes) -> Path:
    folder.mkdir(parents=True)
    config = {"model_type": "chatglm", "vision_config": {}} | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"w": torch.arange(4.0)}, folder / "model.safetensors")
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
    file, content = tmp_path / "file", bytearray(range(256)) * 100

    def digest_of(content: bytes) -> str:
        file.write_bytes(content)
        return digest(file)

    found = digest_of(content)
    assert found.endswith("(of samples)") and not digest_of(b"0" * 1000).endswith(")")
    for at in (0, len(content) - 1):
        changed = content.copy()
        changed[at] ^= 1
        assert digest_of(changed) != found
    assert digest_of(b"0" * 30_000) != digest_of(b"0" * 30_001)


def test_a_time_limit_leaves_the_clock_as_it_was():
    def mine(*_: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGALRM, mine)
    try:
        with pytest.raises(TimeoutError), time_limit(0.01):
            time.sleep(5)
        with time_limit(60):
            pass
        assert signal.getsignal(signal.SIGALRM) is mine
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    finally:
        signal.signal(signal.SIGALRM, before)


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
