"""From the original's weights to somebody who loads ours by name: build, publish, load, train."""

import json
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationCopy

import glm4v_patched
from tests.helpers.fresh_process import run_without_package
from tests.helpers.local_hub import LocalHub, Sparse
from tests.helpers.publishable import NAME, as_files, real_files, run_cli, shards_of, write_original

ORIGINAL = "zai-org/glm-4v-9b"
TAG = f"v{glm4v_patched.__version__}"
copies_across = pytest.mark.skipif(
    "src_repo_id" not in CommitOperationCopy.__dataclass_fields__,
    reason="this huggingface_hub cannot copy between repositories: pip install -U huggingface_hub",
)

STRANGER = """
import sys
sys.modules["glm4v_patched"] = None  # cannot be imported
import torch
from PIL import Image
from transformers import AutoModel, AutoModelForCausalLM, AutoProcessor

name, tag = sys.argv[1:]
for revision in (None, tag):
    model = AutoModel.from_pretrained(name, revision=revision, trust_remote_code=True)
    processor = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
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


@pytest.fixture
def hub():
    with LocalHub() as hub:
        yield hub


def succeed(hub: LocalHub, folder: Path, *arguments: object) -> str:
    process = run_cli(*arguments, HF_HOME=str(folder / "home"), **hub.environment)
    assert process.returncode == 0, process.stdout + process.stderr[-4000:]
    return process.stdout


@pytest.mark.parametrize(
    "weights", ["local", pytest.param("of the Hub", marks=copies_across)], ids=str
)
def test_a_stranger_loads_trains_and_generates_by_name(weights, hub, tmp_path):
    original = write_original(tmp_path / "original")
    source = original
    if weights == "of the Hub":
        source = f"{ORIGINAL}@{hub.add_repository(ORIGINAL, as_files(original)).head}"
    folder = tmp_path / "built"
    succeed(hub, tmp_path, "build", "--weights", source, "--out", folder, "--name", NAME)
    assert bool(shards_of(folder)) == (weights == "local")
    succeed(hub, tmp_path, "publish", folder, "--repo", NAME, "--push")
    assert set(hub.repositories[NAME].tags) == {TAG}
    run_without_package(STRANGER, tmp_path, NAME, TAG, **hub.environment, HF_HUB_OFFLINE="0")

    report = json.loads(succeed(hub, tmp_path, "verify", NAME, "--revision", TAG, "--json", "-"))
    assert report["passed"] and len(report["checks"]) > 10


@copies_across
def test_28_gb_are_published_and_no_byte_of_them_passes_through(hub, tmp_path):
    files, shards = real_files()
    weights = {
        name: Sparse(size, f"{number:064x}", head)
        for number, (name, (head, size)) in enumerate(shards.items(), start=1)
    }
    original = hub.add_repository(ORIGINAL, files | weights)
    folder = tmp_path / "built"
    source = f"{ORIGINAL}@{original.head}"
    succeed(hub, tmp_path, "build", "--weights", source, "--out", folder, "--name", NAME)
    printed = succeed(hub, tmp_path, "publish", folder, "--repo", NAME, "--push")
    assert "15" in printed

    published = hub.repositories[NAME].files
    for name, weight in weights.items():
        assert published[name].content is weight
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
def test_weights_without_code_load_by_the_code_of_another_repository(hub, tmp_path):
    """What --code-only is for: a config's auto_map points at it."""
    folder = tmp_path / "built"
    source = write_original(tmp_path / "original")
    succeed(hub, tmp_path, "build", "--weights", source, "--out", folder, "--name", NAME)
    code = "our-org/glm-4v-code"
    succeed(hub, tmp_path, "publish", folder, "--repo", code, "--push", "--code-only")

    def elsewhere(value):
        if isinstance(value, list):
            return [elsewhere(one) for one in value]
        return value and f"{code}--{value}"

    files = {name: c for name, c in as_files(folder).items() if not name.endswith(".py")}
    for name in [name for name in files if name.endswith("config.json")]:
        values = json.loads(files[name])
        if "auto_map" in values:
            values["auto_map"] = {key: elsewhere(v) for key, v in values["auto_map"].items()}
            files[name] = json.dumps(values).encode()
    hub.add_repository("our-org/weights", files)
    out = str(tmp_path / "out")
    more = hub.environment | {"HF_HUB_OFFLINE": "0"}
    run_without_package(CODE_OF_ANOTHER, tmp_path, "our-org/weights", code, out, **more)


@pytest.mark.parametrize("command", ["build", "verify"])
@pytest.mark.parametrize("status", [401, pytest.param(403, marks=pytest.mark.slow)])
def test_a_token_that_the_server_repeats_is_not_printed(command, status, hub, tmp_path):
    hub.fail("*", ".", times=99, status=status, message=f"no entry with {hub.token}")
    source = f"{ORIGINAL}@{'a' * 40}"
    arguments = {
        "build": ["build", "--weights", source, "--out", tmp_path / "built"],
        "verify": ["verify", NAME],
    }
    environment = hub.environment | {"HF_HOME": str(tmp_path / "home")}
    process = run_cli(*arguments[command], **environment)
    assert process.returncode == 1
    assert hub.token not in process.stdout + process.stderr
    assert "Traceback" not in process.stderr
