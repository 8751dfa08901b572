"""One process trains and generates with a model that ``device_map`` splits at any layer.

The tests on two GPUs (``pytest -m two_gpu``) compare with one GPU.
"""

from itertools import product

import pytest
import torch
from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights
from accelerate.utils import compute_module_sizes
from torch import nn

from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.tiny import padded, random_pixels, text, tiny_config, unexpanded_image
from tests.remote.inputs import assert_close, gradients

NUM_LAYERS = 4
MODES = {"plain": None, "reentrant": True, "non-reentrant": False}
# fp32, relative to the largest gradient. A missing gradient would differ by more than 1.
RTOL = 1e-5
SHARES = [0.35, 0.5, 0.8]


def deep_config():
    vision = tiny_config().vision_config | {"num_hidden_layers": NUM_LAYERS}
    return tiny_config(num_layers=NUM_LAYERS, vision_config=vision, initializer_range=0.1)


def deep_model() -> GLM4VForCausalLM:
    torch.manual_seed(0)
    return GLM4VForCausalLM._from_config(deep_config(), attn_implementation="sdpa").eval()


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    classes = model._no_split_modules
    return {n: module for n, module in model.named_modules() if type(module).__name__ in classes}


def split_at(model: nn.Module, share: float, first, second) -> dict:
    """Return accelerate's device map if the first device has memory for a share of the model."""
    sizes = compute_module_sizes(model)
    # accelerate keeps this much free on the first device, for the largest layer.
    spare = max(sizes[name] for name in layers_of(model))
    max_memory = {0: int(share * sizes[""]) + spare, 1: 2 * sizes[""]}
    classes = model._no_split_modules
    device_map = infer_auto_device_map(model, max_memory, no_split_module_classes=classes)
    assert set(device_map.values()) == {0, 1}
    return {name: (first, second)[device] for name, device in device_map.items()}


def batch(device: str = "cpu", labels_device: str | None = None) -> dict[str, torch.Tensor]:
    """Return sequences with two images, one image and none, padded on the left."""
    image = unexpanded_image()
    sequences = [[*image, *text(4, 1), *image, *text(5, 2)], [7, *image, *text(6, 3)], text(9, 4)]
    inputs = padded(sequences, "left") | {"pixel_values": random_pixels(3)}
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] >= 500, -100)
    moved = {name: value.to(device) for name, value in inputs.items()}
    return moved | {"labels": labels.to(labels_device or device)}


def answer(model: nn.Module, device: str = "cpu"):
    inputs = {name: value for name, value in batch(device).items() if name != "labels"}
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 500}
    return model.generate(**inputs, **options, return_dict_in_generate=True)


def gradients_of(model: nn.Module, inputs: dict, mode: str = "plain") -> dict[str, torch.Tensor]:
    model.gradient_checkpointing_disable()
    if MODES[mode] is not None:
        model.gradient_checkpointing_enable({"use_reentrant": MODES[mode]})
    return {name: value.cpu() for name, value in gradients(model.train(), **inputs).items()}


@pytest.mark.parametrize("share", SHARES)
def test_an_automatic_split_cuts_no_layer(share):
    with init_empty_weights(include_buffers=True):
        model = GLM4VForCausalLM(deep_config())
    layers = layers_of(model)
    assert len(layers) >= 2 * NUM_LAYERS
    placed = split_at(model, share, 0, 1)
    assert [part for part in placed for name in layers if part.startswith(f"{name}.")] == []


@pytest.mark.parametrize("mode", MODES)
def test_training_passes_through_the_hooks_of_a_split(mode):
    """Both halves are on one device, as there is only one on a CPU."""
    expected = gradients_of(deep_model(), batch())
    for share in SHARES:
        model = deep_model()
        model = dispatch_model(model, split_at(model, share, "cpu", "cpu"), force_hooks=True)
        assert_close(gradients_of(model, batch(), mode), expected)


@pytest.mark.parametrize("share", SHARES)
def test_generation_works_with_a_part_on_disk(share, tmp_path):
    """Each module's weights are loaded for its own forward only, so no other may read them."""
    model = deep_model()
    model = dispatch_model(model, split_at(model, share, "cpu", "disk"), offload_dir=tmp_path)
    assert any(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(answer(model).sequences, answer(deep_model()).sequences)


@pytest.mark.two_gpu
@pytest.mark.parametrize("share", SHARES)
def test_a_split_model_trains_and_generates_as_one_gpu_does(share):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs on one machine, found {torch.cuda.device_count()}")
    one, split = deep_model().to("cuda:0"), deep_model()
    split = dispatch_model(split, split_at(split, share, 0, 1))
    devices = [{p.device.index for p in layer.parameters()} for layer in layers_of(split).values()]
    assert all(len(device) == 1 for device in devices) and set.union(*devices) == {0, 1}

    expected, actual = answer(one, "cuda:0"), answer(split, "cuda:0")
    assert torch.equal(actual.sequences.cpu(), expected.sequences.cpu())
    decoder = split.transformer.encoder.layers
    for layer, cached in zip(decoder, actual.past_key_values.layers, strict=True):
        assert cached.keys.device == layer.mlp.dense_4h_to_h.weight.device

    expected = gradients_of(one, batch("cuda:0"))
    atol = RTOL * max(value.abs().max() for name, value in expected.items() if name != "loss")
    for labels_on in ("cpu", "cuda:1"):
        assert_close(gradients_of(split, batch("cuda:0", labels_on)), expected, atol)
    for mode, skip_logits in product(MODES, (False, True)):
        inputs = batch("cuda:0") | {"skip_logits": skip_logits}
        print(mode, skip_logits)  # pytest shows it with a failure
        assert_close(gradients_of(split, inputs, mode), gradients_of(one, inputs), atol)
