"""What is saved loads as it was, here and where there is only the folder."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed import destroy_process_group, init_device_mesh, init_process_group
from torch.distributed.fsdp import fully_shard

from glm4v_patched.remote.configuration_chatglm import AUTO_MAP
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.fresh_process import run_without_package
from tests.helpers.tiny import golden_bytes, golden_weights, grown_image, pictures, text, tiny_model

REMOTE = Path(sys.modules[GLM4VForCausalLM.__module__].__file__).parent
INV_FREQ = "transformer.rotary_pos_emb.inv_freq"
CODE = [
    "attention.py",
    "cached_rows.py",
    "checkpointing.py",
    "classification_chatglm.py",
    "configuration_chatglm.py",
    "generation_chatglm.py",
    "image_checks.py",
    "image_layout.py",
    "keywords.py",
    "loss.py",
    "masks.py",
    "modeling_chatglm.py",
    "sharding.py",
    "visual.py",
]


def inputs() -> dict[str, torch.Tensor]:
    row = [*text(3, seed=1), *grown_image(), *text(4, seed=2)]
    return {"input_ids": torch.tensor([row]), "pixel_values": pictures(1)}


@torch.no_grad()
def logits(model) -> torch.Tensor:
    images = inputs()["pixel_values"].to(model.dtype)
    return model.eval()(**inputs() | {"pixel_values": images}).logits


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """The golden weights as published: config and weights, without code."""
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_bytes(golden_bytes("config.json"))
    save_file(golden_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_loading_and_saving_again_writes_the_same_bytes(dtype, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    model = tiny_model(dtype)
    model.save_pretrained(first)
    loaded, report = GLM4VForCausalLM.from_pretrained(first, dtype=dtype, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded.save_pretrained(second)
    names = sorted(path.name for path in first.iterdir() if path.is_file())
    assert names == sorted(path.name for path in second.iterdir() if path.is_file())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert torch.equal(logits(loaded), logits(model))


IMPLEMENTATIONS = """
import sys
sys.modules["glm4v_patched"] = None
from transformers import AutoModel, AutoModelForCausalLM
for auto in AutoModel, AutoModelForCausalLM:
    for wanted in "eager", "sdpa", None:
        options = {} if wanted is None else {"attn_implementation": wanted}
        model = auto.from_pretrained(sys.argv[1], trust_remote_code=True, **options)
        assert model.config._attn_implementation == (wanted or "sdpa"), (auto, wanted)
"""


def test_without_the_package_a_folder_gets_the_attention_that_was_asked_for(tmp_path):
    """Each Auto class loads a copy of the config's class of its own."""
    tiny_model().save_pretrained(tmp_path / "saved")
    run_without_package(IMPLEMENTATIONS, tmp_path, str(tmp_path / "saved"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_weights_equal_the_file(dtype, checkpoint):
    weights = load_file(checkpoint / "model.safetensors")
    model = GLM4VForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    state = model.state_dict()
    assert set(state) == {*weights, INV_FREQ}
    for name, value in weights.items():
        assert torch.equal(state[name], value.to(dtype)), name


def test_the_dtype_of_the_config_is_taken(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    assert GLM4VForCausalLM.from_pretrained(checkpoint, dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize("with_buffer", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_load_in_silence_with_and_without_the_rotary_buffer(
    with_buffer, dtype, checkpoint, warned, tmp_path
):
    weights = {name: w.to(dtype) for name, w in golden_weights().items() if name != INV_FREQ}
    if with_buffer:
        weights[INV_FREQ] = tiny_model().transformer.rotary_pos_emb.inv_freq.to(dtype).clone()
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    model, report = GLM4VForCausalLM.from_pretrained(
        checkpoint, dtype=dtype, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not warned.records, warned.text
    assert torch.equal(logits(model), logits(tiny_model(dtype)))

    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    want = tiny_model().transformer.rotary_pos_emb.inv_freq.to(dtype)
    assert torch.equal(saved[INV_FREQ], want)


def test_saved_names_are_the_published_ones(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    published = json.loads(golden_bytes("param_shapes.json"))
    saved = load_file(tmp_path / "model.safetensors")
    assert {name: list(value.shape) for name, value in saved.items()} == published


def test_the_saved_folder_says_it_is_ours_and_holds_the_code(checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    config["architectures"] = ["ChatGLMModel"]
    config["auto_map"] = {
        "AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration",
        "AutoModelForSequenceClassification": "modeling_chatglm.ChatGLMForSequenceClassification",
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    folder = tmp_path / "saved"
    GLM4VForCausalLM.from_pretrained(checkpoint).save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["auto_map"] == AUTO_MAP
    assert saved["architectures"] == ["GLM4VForCausalLM"]
    assert sorted(path.name for path in folder.glob("*.py")) == CODE
    for name in CODE:
        assert (folder / name).read_bytes() == (REMOTE / name).read_bytes(), name


@pytest.mark.skipif(
    transformers.__version__.startswith("5.2."),
    reason="transformers 5.2 leaves a bias as memory was where the weight beside it is there",
)
def test_weights_that_a_checkpoint_lacks_are_initialised_and_only_those(checkpoint):
    weights = golden_weights()
    lacking = {
        name: weights.pop(name)
        for name in list(weights)
        if "vision.transformer.layers.1" in name
        or name.endswith(("boi", "cls_embedding", "conv.bias", "position_embedding.weight"))
    }
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    torch.manual_seed(0)
    model, report = GLM4VForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert set(report["missing_keys"]) == set(lacking)
    state = model.state_dict()
    for name, value in weights.items():
        assert torch.equal(state[name], value), name
    for name in lacking:
        value = state[name]
        if "norm" in name or name.endswith("bias"):
            assert (value == (1 if name.endswith("norm.weight") else 0)).all(), name
        else:
            assert value.std().item() == pytest.approx(0.02, rel=0.5), name
    assert logits(model).isfinite().all()


@pytest.fixture
def one_process(tmp_path):
    init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    destroy_process_group()


def test_a_model_sharded_by_fsdp2_is_saved_as_the_class_it_was(one_process, tmp_path):
    """FSDP2 derives a class of its own, in a file of torch's."""
    model = fully_shard(tiny_model(), mesh=one_process)
    assert type(model) is not GLM4VForCausalLM
    weights = {
        name: value.full_tensor()
        for name, value in model.state_dict().items()
        if hasattr(value, "full_tensor")
    }
    model.save_pretrained(tmp_path / "sharded", state_dict=weights)
    saved = json.loads((tmp_path / "sharded" / "config.json").read_text())
    assert saved["auto_map"] == AUTO_MAP and saved["architectures"] == ["GLM4VForCausalLM"]
    assert sorted(path.name for path in (tmp_path / "sharded").glob("*.py")) == CODE


SCRIPT = """
import sys
sys.modules["glm4v_patched"] = None  # cannot be imported
import torch, transformers
from safetensors.torch import load_file, save_file
folder, out = sys.argv[1:]
inputs = load_file(out + "/inputs.safetensors")
found = {}
for name in ("AutoModel", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"):
    model = getattr(transformers, name).from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules"), type(model).__module__
    with torch.no_grad():
        found[name] = model(**inputs).logits.float().contiguous()
config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
assert type(config).__name__ == "ChatGLMConfig"
model.save_pretrained(out + "/again")
save_file(found, out + "/logits.safetensors")
"""


def load_without_package(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Logits by every Auto class, in a process that has the folder and not our package."""
    out.mkdir()
    save_file(inputs(), out / "inputs.safetensors")
    run_without_package(SCRIPT, out, str(folder), str(out))
    return load_file(out / "logits.safetensors")


def test_a_saved_folder_loads_without_the_package_and_is_saved_whole(tmp_path):
    model = tiny_model()
    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    for name, got in load_without_package(folder, tmp_path / "out").items():
        assert torch.equal(got, logits(model)), name
    again = tmp_path / "out" / "again"
    assert sorted(path.name for path in again.glob("*.py")) == CODE
    for path in folder.iterdir():
        if path.is_file() and path.name != "generation_config.json":
            assert (again / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_published_config_loads_with_our_code_beside_it(checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    upstream = "modeling_chatglm.ChatGLMForConditionalGeneration"
    config["architectures"] = ["ChatGLMModel"]
    config["auto_map"] = {
        "AutoConfig": "configuration_chatglm.ChatGLMConfig",
        "AutoModel": upstream,
        "AutoModelForCausalLM": upstream,
        "AutoModelForSeq2SeqLM": upstream,
        "AutoModelForSequenceClassification": "modeling_chatglm.ChatGLMForSequenceClassification",
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    for name in CODE:
        shutil.copy(REMOTE / name, checkpoint)
    for name, got in load_without_package(checkpoint, tmp_path / "out").items():
        assert torch.equal(got, logits(tiny_model())), name
