"""From the original's weights to somebody who loads ours by name: build, publish, load, train."""

import json
import re
from pathlib import Path

import huggingface_hub
import pytest
import torch
from PIL import Image
from transformers import AutoModel, AutoProcessor

from tests.helpers.legacy_repository import remote_code_under
from tests.helpers.publishable import (
    NAME,
    TAG,
    UPSTREAM,
    as_files,
    is_published,
    python_of_card,
    real_files,
    shards_of,
)
from tests.helpers.tiny import grown_image, pictures, text, tiny_model


def test_a_stranger_trains_by_name(original, hub, run, nothing_runs, tmp_path, monkeypatch):
    """And generates; what is copied on the Hub has the original's numbers; the code is the card's.

    In this process; test_load.py shows that none of it needs the package.
    """
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 30), "red").save("picture.png")
    source = f"{UPSTREAM}@{hub.add_repository(UPSTREAM, as_files(original)).head}"
    out = tmp_path / "built"
    assert run("build", "--weights", source, "--out", out, "--name", NAME)[0] == 0
    assert run("publish", out, "--repo", NAME, "--push")[0] == 0
    assert not shards_of(out) and set(hub.repositories[NAME].tags) == {TAG}
    of_card: dict = {}
    with remote_code_under(tmp_path / "modules"):
        exec(python_of_card(out)[0], of_card)
        again = AutoModel.from_pretrained(NAME, trust_remote_code=True)
    model, inputs = of_card["model"], of_card["inputs"]
    assert of_card["answer"].shape[1] > inputs["input_ids"].shape[1]
    assert type(again).__name__ == type(model).__name__
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    row = [*text(3, seed=1), *grown_image(), *text(4, seed=2)]
    question = {"input_ids": torch.tensor([row]), "pixel_values": pictures(1)}
    with torch.no_grad():
        want = tiny_model()(**question).logits
        assert torch.equal(model.eval()(**question).logits, want)
    model.train()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        losses.append(model(**inputs, labels=inputs["input_ids"]).loss)
        losses[-1].backward()
        optimizer.step()
    assert losses[1] < losses[0], losses
    status, output = run("verify", NAME, "--revision", TAG, "--json")
    report = json.loads(output[output.index('{\n  "target"') :])
    assert status == 0 and report["passed"] and len(report["checks"]) > 8
    assert report["revision"] == hub.repositories[NAME].head


@pytest.mark.slow
def test_the_real_size_needs_no_byte_of_its_weights(hub, run, in_process, tmp_path):
    """28 GB are built, verified, and published by a copy on the Hub."""
    small, shards = real_files()
    commit = hub.add_repository(UPSTREAM, small | shards).head
    out = tmp_path / "out"
    run("build", "--weights", f"{UPSTREAM}@{commit}", "--out", out, "--name", NAME)
    assert shards_of(out) == [] and sum(weight.size for weight in shards.values()) > 27e9
    status, output = run("publish", out, "--repo", NAME, "--push")
    assert status == 0 and "copy 15 (27.8 GB)" in output and is_published(hub, out)
    assert not any(name in request.path for name in shards for request in hub.requests)
    sent = sum(request.received for request in hub.requests)
    assert 13.5e6 < sent < 14.5e6, sent

    for where, weights, by in (
        (out, "left for a server-side copy", "13,906,320,896 parameters, compared with the i"),
        (NAME, "sha256 compared", "13,906,320,896 parameters, compared with the files of weights"),
    ):
        status, output = run("verify", where)
        assert status == 0 and weights in output and by in output, output
        assert "2 + 2 layers of width 64 with random weights" in output


def test_weights_without_code_load_by_the_code_of_another_repository(built, hub, tmp_path):
    """Their config's auto_map points at it; what is saved of them has the code beside it."""
    code = "our-org/glm-4v-code"
    hub.add_repository(code, as_files(built))
    files = {name: c for name, c in as_files(built).items() if not name.endswith(".py")}
    for name in [name for name in files if name.endswith("config.json")]:
        files[name] = re.sub(rb'"(\w+_chatglm\.)', f'"{code}--\\1'.encode(), files[name])
    hub.add_repository("our-org/weights", files)
    with remote_code_under(tmp_path / "modules"):
        model = AutoModel.from_pretrained("our-org/weights", trust_remote_code=True)
        AutoProcessor.from_pretrained("our-org/weights", trust_remote_code=True)
        place = code.replace("-", "_hyphen_").replace("/", ".")
        assert place in type(model).__module__, type(model).__module__
        model.save_pretrained(tmp_path / "out")
        saved = json.loads((tmp_path / "out" / "config.json").read_text())
        assert "--" not in json.dumps(saved["auto_map"])
        AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True)


def test_a_server_without_xet_names_the_variable(hub, run, built, monkeypatch):
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    status, told = run("publish", built, "--repo", NAME, "--push")
    assert status == 1 and "set HF_HUB_DISABLE_XET=1" in told


def test_a_client_that_is_too_old_is_told(run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.__version__", "0.36.2")
    status, told = run("verify", str(Path()))
    assert status == 1 and "huggingface_hub 0.36.2 is older than 1.33" in told
    assert "pip install -U huggingface_hub" in told
