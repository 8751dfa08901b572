"""From the original's weights to somebody who loads ours by name: build, publish, load, train."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import local_hub
from tests.helpers.fresh_process import run_without_package
from tests.helpers.local_hub import LocalHub
from tests.helpers.publishable import NAME, TAG, UPSTREAM, as_files, real_files, shards_of
from tests.helpers.tiny import grown_image, pictures, text, tiny_model

LOADS = """
import sys
sys.modules["glm4v_patched"] = None  # cannot be imported
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoProcessor

name, tag = sys.argv[1:]
for revision in (None, tag):
    model = AutoModel.from_pretrained(name, revision=revision, trust_remote_code=True)
    processor = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
with torch.no_grad():
    save_file({"logits": model.eval()(**load_file("inputs.safetensors")).logits}, "logits")
image = Image.new("RGB", (56, 56), "red")
inputs = processor.apply_chat_template(
    [{"role": "user", "image": image, "content": "What is in this picture?"}],
    add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
)
model.train()
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(2):
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[1] < losses[0], losses
answer = model.eval().generate(**inputs, max_new_tokens=3, do_sample=False)
assert answer.shape[1] > inputs["input_ids"].shape[1]
again = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
assert type(again) is type(AutoModel.from_pretrained(name, trust_remote_code=True))
"""


@pytest.mark.parametrize("weights", [pytest.param("local", marks=pytest.mark.slow), "of the Hub"])
def test_a_stranger_loads_trains_and_generates_by_name(weights, original, hub, run, tmp_path):
    source = original
    if weights == "of the Hub":
        source = f"{UPSTREAM}@{hub.add_repository(UPSTREAM, as_files(original)).head}"
    out = tmp_path / "built"
    assert run("build", "--weights", source, "--out", out, "--name", NAME)[0] == 0
    assert bool(shards_of(out)) == (weights == "local")
    assert run("publish", out, "--repo", NAME, "--push")[0] == 0
    assert set(hub.repositories[NAME].tags) == {TAG}
    row = [*text(3, seed=1), *grown_image(), *text(4, seed=2)]
    inputs = {"input_ids": torch.tensor([row]), "pixel_values": pictures(1)}
    save_file(inputs, tmp_path / "inputs.safetensors")
    run_without_package(LOADS, tmp_path, NAME, TAG, **hub.environment, HF_HUB_OFFLINE="0")
    with torch.no_grad():
        want = tiny_model()(**inputs).logits
    assert torch.equal(load_file(tmp_path / "logits")["logits"], want)
    status, output = run("verify", NAME, "--revision", TAG, "--json", "-")
    report = json.loads(output)
    assert status == 0 and report["passed"] and len(report["checks"]) > 10
    assert report["revision"] == hub.repositories[NAME].head


def test_28_gb_are_published_and_no_byte_of_them_passes_through(hub, run, tmp_path):
    files, weights = real_files()
    source = f"{UPSTREAM}@{hub.add_repository(UPSTREAM, files | weights).head}"
    out = tmp_path / "built"
    assert run("build", "--weights", source, "--out", out, "--name", NAME)[0] == 0
    assert run("publish", out, "--repo", NAME, "--push")[0] == 0
    published = hub.repositories[NAME].files
    assert all(published[name].content is weight for name, weight in weights.items())
    assert sum(weight.size for weight in weights.values()) > 27e9
    small = sum(len(content) for content in files.values())
    received, sent = (sum(getattr(r, way) for r in hub.requests) for way in ("received", "sent"))
    print(f"the Hub received {received:,} and sent {sent:,} bytes")
    # The small files come from the original once, and go to ours with code and tokenizer.json.
    assert received + sent < 10 * small + 5e6
    assert not any(name in request.path for name in weights for request in hub.requests)


CODE_OF_ANOTHER = """
import sys
sys.modules["glm4v_patched"] = None  # cannot be imported
import json
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoProcessor
weights, code, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(weights, trust_remote_code=True)
processor = AutoProcessor.from_pretrained(weights, trust_remote_code=True)
assert code.replace("-", "_hyphen_").replace("/", ".") in type(model).__module__, type(model)
model.save_pretrained(out)
assert "--" not in json.dumps(json.loads(Path(out, "config.json").read_text())["auto_map"])
AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
"""


@pytest.mark.slow
def test_weights_without_code_load_by_the_code_of_another_repository(built, hub, run, tmp_path):
    """What --code-only is for: a config's auto_map points at it."""
    code = "our-org/glm-4v-code"
    assert run("publish", built, "--repo", code, "--push", "--code-only")[0] == 0

    def elsewhere(value):
        if isinstance(value, list):
            return [elsewhere(one) for one in value]
        return value and f"{code}--{value}"

    files = {name: c for name, c in as_files(built).items() if not name.endswith(".py")}
    for name in [name for name in files if name.endswith("config.json")]:
        values = json.loads(files[name])
        values["auto_map"] = {k: elsewhere(v) for k, v in values.get("auto_map", {}).items()}
        files[name] = json.dumps(values).encode()
    hub.add_repository("our-org/weights", files)
    more = hub.environment | {"HF_HUB_OFFLINE": "0"}
    run_without_package(
        CODE_OF_ANOTHER, tmp_path, "our-org/weights", code, str(tmp_path / "out"), **more
    )


@pytest.mark.slow
def test_the_pages_walk_through_runs_in_processes_of_its_own(original, cli, tmp_path):
    """On the local Hub from the command line, which ends at Ctrl-C."""
    command = [sys.executable, local_hub.__file__, "our-org"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        try:
            lines = [served.stdout.readline() for _ in range(3)]
            variables = dict(line.removeprefix("export ").rstrip().split("=") for line in lines)
            out = tmp_path / "built"
            for arguments in (
                ("build", "--weights", original, "--out", out, "--name", NAME),
                ("publish", out, "--repo", NAME, "--push"),
                ("verify", NAME),
            ):
                ended = cli(*arguments, HF_HOME=str(tmp_path / "home"), **variables)
                assert ended.returncode == 0, ended.stdout + ended.stderr
                assert variables["HF_TOKEN"] not in ended.stdout + ended.stderr
        finally:
            served.terminate()


@pytest.mark.slow
def test_a_server_without_xet_names_the_variable(cli, built, tmp_path):
    pytest.importorskip("hf_xet")
    with LocalHub() as hub:
        variables = hub.environment | {"HF_HUB_DISABLE_XET": "0", "HF_HOME": str(tmp_path)}
        ended = cli("publish", built, "--repo", NAME, "--push", **variables)
    assert ended.returncode == 1 and "set HF_HUB_DISABLE_XET=1" in ended.stderr


def test_a_client_that_is_too_old_is_told(run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.__version__", "0.36.2")
    status, told = run("verify", str(Path()))
    assert status == 1 and "huggingface_hub 0.36.2 is older than 1.33" in told
    assert "pip install -U huggingface_hub" in told
