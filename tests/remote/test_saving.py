"""Saved models load unchanged, here and from the folder alone."""

import json
import shutil
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers
import transformers.integrations.peft
from safetensors.torch import load_file, save_file
from torch.distributed import destroy_process_group, init_device_mesh, init_process_group
from torch.distributed.fsdp import fully_shard

from glm4v_patched.remote.configuration_chatglm import AUTO_MAP
from glm4v_patched.remote.image_processing_chatglm import ChatGLMImageProcessor
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from glm4v_patched.remote.tokenization_chatglm import ChatGLM4Tokenizer
from tests.helpers.processes import run_without_package
from tests.helpers.tiny import (
    expanded_image,
    golden_bytes,
    golden_weights,
    random_pixels,
    text,
    tiny_model,
    update_json,
)
from tests.remote.inputs import pil_image, user
from tests.remote.test_remote_rules import closure

REMOTE = Path(sys.modules[GLM4VForCausalLM.__module__].__file__).parent
INV_FREQ = "transformer.rotary_pos_emb.inv_freq"
CODE = sorted({"modeling_chatglm.py", *closure(REMOTE / "modeling_chatglm.py")})
KINDS_OF_KEYS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def inputs() -> dict[str, torch.Tensor]:
    row = [*text(3, seed=1), *expanded_image(), *text(4, seed=2)]
    return {"input_ids": torch.tensor([row]), "pixel_values": random_pixels(1)}


@torch.no_grad()
def logits(model) -> torch.Tensor:
    images = inputs()["pixel_values"].to(model.dtype)
    return model.eval()(**inputs() | {"pixel_values": images}).logits


def write_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_checkpoint(folder: Path) -> Path:
    """The golden weights as published: config and weights, without code."""
    folder.mkdir()
    (folder / "config.json").write_bytes(golden_bytes("config.json"))
    write_weights(folder, golden_weights())
    return folder


def assert_is_ours(folder: Path) -> None:
    saved = json.loads((folder / "config.json").read_text())
    assert saved["auto_map"] == AUTO_MAP
    assert saved["architectures"] == ["GLM4VForCausalLM"]
    assert sorted(path.name for path in folder.glob("*.py")) == CODE
    for name in CODE:
        assert (folder / name).read_bytes() == (REMOTE / name).read_bytes(), name


PUBLISHED = {
    "architectures": ["ChatGLMModel"],
    "auto_map": AUTO_MAP
    | dict.fromkeys(
        ("AutoModel", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"),
        "modeling_chatglm.ChatGLMForConditionalGeneration",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_loading_and_saving_again_writes_the_same_bytes(dtype, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    model = tiny_model(dtype)
    model.save_pretrained(first)
    assert_is_ours(first)
    loaded, report = GLM4VForCausalLM.from_pretrained(first, dtype=dtype, output_loading_info=True)
    assert not any(report[kind] for kind in KINDS_OF_KEYS)
    loaded.save_pretrained(second)
    names = sorted(path.name for path in first.iterdir() if path.is_file())
    assert names == sorted(path.name for path in second.iterdir() if path.is_file())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(("with_buffer", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_checkpoints_load_in_silence_with_and_without_the_rotary_buffer(
    with_buffer, dtype, warned, tmp_path
):
    checkpoint = write_checkpoint(tmp_path / "published")
    buffer = tiny_model().transformer.rotary_pos_emb.inv_freq.to(dtype).clone()
    weights = {name: w.to(dtype) for name, w in golden_weights().items() if name != INV_FREQ}
    write_weights(checkpoint, weights | ({INV_FREQ: buffer} if with_buffer else {}))
    dtype_name = str(dtype).removeprefix("torch.")
    update_json(checkpoint / "config.json", torch_dtype=dtype_name, **PUBLISHED)
    model, report = GLM4VForCausalLM.from_pretrained(
        checkpoint, dtype="auto", output_loading_info=True
    )
    assert model.dtype == dtype
    assert not any(report[kind] for kind in KINDS_OF_KEYS)
    assert not warned.records, warned.text
    state = model.state_dict()
    assert set(state) == {*weights, INV_FREQ}
    assert all(torch.equal(state[name], value) for name, value in weights.items())
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(load_file(tmp_path / "saved" / "model.safetensors")[INV_FREQ], buffer)
    assert_is_ours(tmp_path / "saved")


@pytest.mark.skipif(
    transformers.__version__.startswith("5.2."),
    reason="transformers 5.2 leaves a bias as memory was where the weight beside it is there",
)
def test_weights_that_a_checkpoint_lacks_are_initialized_and_only_those(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "published")
    ends = ("boi", "cls_embedding", "conv.bias", "position_embedding.weight")
    weights = golden_weights()
    lacking = [n for n in weights if "vision.transformer.layers.1" in n or n.endswith(ends)]
    weights = {name: value for name, value in weights.items() if name not in lacking}
    write_weights(checkpoint, weights)
    torch.manual_seed(0)
    model, report = GLM4VForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert set(report["missing_keys"]) == set(lacking)
    state = model.state_dict()
    for name, value in weights.items():
        assert torch.equal(state[name], value), name
    for name in lacking:
        constant = "norm" in name or name.endswith("bias")
        want = 0 if constant else pytest.approx(0.02, rel=0.5)
        assert state[name].std(correction=0).item() == want, name


def test_a_model_sharded_by_fsdp2_is_saved_as_the_class_it_was(tmp_path):
    """FSDP2 derives a class in a file of torch."""
    init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        model = fully_shard(tiny_model(), mesh=init_device_mesh("cpu", (1,)))
        assert type(model) is not GLM4VForCausalLM
        state = model.state_dict().items()
        weights = {n: value.full_tensor() for n, value in state if hasattr(value, "full_tensor")}
        model.save_pretrained(tmp_path / "sharded", state_dict=weights)
    finally:
        destroy_process_group()
    assert_is_ours(tmp_path / "sharded")


def test_adapters_that_this_transformers_cannot_load_are_refused_before_weights_are_read(
    tmp_path, monkeypatch
):
    """One error, with an alternative that works."""
    tiny_model().save_pretrained(tmp_path / "base")
    base = GLM4VForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(target_modules=["query_key_value"])
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapters")
    monkeypatch.setattr(transformers.integrations.peft, "MIN_PEFT_VERSION", "99.0")
    model = GLM4VForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "adapters")
    assert loaded.peft_config["default"].r == 8
    monkeypatch.setattr(GLM4VForCausalLM, "__init__", None)  # called before weights are read
    with pytest.raises(ImportError, match=r"wants peft 99.0 or newer.*PeftModel.from_pretrained"):
        GLM4VForCausalLM.from_pretrained(tmp_path / "adapters")


# From the folder alone, without our package: one fresh process does all of it.
SCRIPT = """
import json, sys
sys.modules["glm4v_patched"] = None  # cannot be imported
import torch, transformers
from PIL import Image
from safetensors.torch import load_file
from transformers.models.auto import modeling_auto

inputs = load_file("inputs.safetensors")
want = inputs.pop("logits")
with open("rows.json") as file:
    rows = json.load(file)

def load(auto, folder, **options):
    part = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True, **options)
    assert type(part).__module__.startswith("transformers_modules."), (auto, type(part))
    return part

model = load("AutoModel", "model", attn_implementation="eager")
assert model.config._attn_implementation == "eager"
for auto in "AutoModel", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM":
    folder = "published" if auto == "AutoModel" else "model"
    model = load(auto, folder).eval()
    assert model.config._attn_implementation == "sdpa", auto
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, want), (folder, auto)
    model.save_pretrained(folder + "-again")
# By its class name, a Trainer knows whether to shift smoothed labels.
assert type(model).__name__ in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
assert type(load("AutoConfig", "model")).__name__ == "ChatGLMConfig"

messages = [{"role": "user", "content": "say <|user|>", "image": Image.new("RGB", (30, 20))}]

def asked(auto, folder, kind=None):
    part = load(auto, folder)
    row = part.apply_chat_template(messages, tokenize=True, return_dict=True)
    (images,) = {"images", "pixel_values"} & {*row}
    summary = [type(part).__name__, images, list(row[images].shape), row["input_ids"][0]]
    assert summary == rows[kind or auto], (folder, summary)
    return part

for auto in "AutoTokenizer", "AutoProcessor":
    asked(auto, "processor").save_pretrained(auto)
    asked(auto, auto)
asked("AutoProcessor", "trained")
# The tokenizer's code was loaded without the processor's.
load("AutoTokenizer", "trained-copy").save_pretrained("alone")
asked("AutoProcessor", "alone", "AutoTokenizer")
try:
    transformers.AutoImageProcessor.from_pretrained
except ImportError as error:  # where torchvision is missing
    assert "AutoImageProcessor" in str(error)
else:
    assert load("AutoImageProcessor", "processor").size["height"] == 56
"""


def test_a_saved_model_and_processor_work_and_save_without_the_package(tmp_path, small_backend):
    model = tiny_model()
    save_file(inputs() | {"logits": logits(model)}, tmp_path / "inputs.safetensors")
    model.save_pretrained(tmp_path / "model")
    published = write_checkpoint(tmp_path / "published")
    update_json(published / "config.json", **PUBLISHED)
    for name in CODE:
        shutil.copy(REMOTE / name, published)
    tokenizer = ChatGLM4Tokenizer(tokenizer_object=small_backend, image_size=56)
    processor = ChatGLMProcessor(ChatGLMImageProcessor(size=56), tokenizer)
    processor.save_pretrained(tmp_path / "processor")
    chat, shape = user("say <|user|>", image=pil_image()), [1, 3, 56, 56]
    rows = {}
    for auto, part, images in (
        ("AutoTokenizer", tokenizer, "images"),
        ("AutoProcessor", processor, "pixel_values"),
    ):
        (row,) = part.apply_chat_template(chat, tokenize=True)
        rows[auto] = [type(part).__name__, images, shape, row]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    # As a trainer on texts saves a tokenizer that came with a processor.
    trained = tmp_path / "trained"
    ChatGLMProcessor.from_pretrained(tmp_path / "processor").tokenizer.save_pretrained(trained)
    assert not (trained / "preprocessor_config.json").exists()
    shutil.copytree(trained, tmp_path / "trained-copy")
    run_without_package(SCRIPT, tmp_path)
    saved, again = tmp_path / "model", tmp_path / "model-again"
    assert_is_ours(again)
    assert_is_ours(tmp_path / "published-again")
    for path in saved.iterdir():
        if path.is_file() and path.name != "generation_config.json":
            assert (again / path.name).read_bytes() == path.read_bytes(), path.name
