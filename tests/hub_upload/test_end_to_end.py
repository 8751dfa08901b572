"""From the original's weights to a user who loads ours by name: build, publish, load, train."""

import json

import torch
from PIL import Image
from transformers import AutoModel

from tests.helpers.legacy_repository import remote_code_under
from tests.helpers.pages import blocks
from tests.helpers.publishable import NAME, TAG, UPSTREAM, as_files, shards_of
from tests.helpers.tiny import expanded_image, random_pixels, text, tiny_model


def test_a_stranger_trains_by_name(original, hub, run, nothing_runs, tmp_path, monkeypatch):
    """With the card's code, the user also generates, and the copied weights give the original's
    logits.

    It runs in this process; test_load.py shows that nothing needs the package.
    """
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 30), "red").save("image.png")
    source = f"{UPSTREAM}@{hub.add_repository(UPSTREAM, as_files(original)).head}"
    out = tmp_path / "built"
    assert run("build", "--weights", source, "--out", out, "--name", NAME)[0] == 0
    hub.add_repository(NAME)
    assert run("publish", out, "--repo", NAME, "--push")[0] == 0
    assert not shards_of(out) and set(hub.repositories[NAME].tags) == {TAG}
    card_variables: dict = {}
    with remote_code_under(tmp_path / "modules"):
        exec(blocks(out / "README.md", "python")[0], card_variables)
        again = AutoModel.from_pretrained(NAME, trust_remote_code=True)
    model, inputs = card_variables["model"], card_variables["inputs"]
    assert card_variables["output_ids"].shape[1] > inputs["input_ids"].shape[1]
    assert type(again).__name__ == type(model).__name__
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    row = [*text(3, seed=1), *expanded_image(), *text(4, seed=2)]
    question = {"input_ids": torch.tensor([row]), "pixel_values": random_pixels(1)}
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
    assert status == 0 and report["passed"]
    assert report["revision"] == hub.repositories[NAME].head
