"""The model equals a plain reference on configurations that the golden data does not have."""

import pytest
import torch
import torch.nn.functional as F

from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.tiny import (
    BOI,
    EOI,
    PAD,
    golden_case,
    golden_json,
    golden_weights,
    random_pixels,
    text,
    tiny_config,
)
from tests.parity.reference import encode_image, forward_row

# Both in fp64, ours with fp32 rotary tables and variances. Relative to the largest value; measured
# 5.7e-7 for logits, 3.2e-6 for gradients. What must fail: a field that is not read.
RTOL = 5e-6
GRADIENT_RTOL = 2e-5


def vision(**changes) -> dict:
    values = golden_json("config.json")["vision_config"] | changes
    side = values["image_size"] // values["patch_size"]
    return {"vision_config": values | {"num_positions": side * side + 1}}


CONFIGURATIONS = {
    "as golden": {},
    "a group for every head": {"num_attention_heads": 5, "multi_query_group_num": 5},
    "one group": {"multi_query_group_num": 1},
    "rope_ratio": {"rope_ratio": 50},
    "rotation by halves": {"original_rope": False},
    "scaling_factor": vision(scaling_factor=3),
    "one image token": vision(image_size=28),
    "odd grid": vision(image_size=70),
    "pixels beside the grid": vision(image_size=60),
    "tower": vision(hidden_size=40, num_heads=5, intermediate_size=24, num_hidden_layers=3),
    "several": {
        "num_attention_heads": 6,
        "multi_query_group_num": 3,
        "kv_channels": 20,
        "rope_ratio": 3,
        "original_rope": False,
        "ffn_hidden_size": 96,
        "num_layers": 3,
    }
    | vision(image_size=70, scaling_factor=0.5, num_heads=2),
}


def random_model(changes: dict) -> GLM4VForCausalLM:
    """A model in fp64 whose weights are large enough that no layer vanishes in the residual."""
    torch.manual_seed(0)
    model = GLM4VForCausalLM(tiny_config(rope_in_fp32=True, **changes)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name and name.endswith("weight")
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1 if is_norm else 0))
    return model


def relative_difference(actual: torch.Tensor, want: torch.Tensor) -> float:
    return ((actual - want).abs().max() / want.abs().max()).item()


def test_reference_gives_the_golden_logits_and_features():
    config = golden_json("config.json")
    weights = golden_weights()
    inputs, want, _ = golden_case("vision.fp32")
    for image, features in zip(inputs["images"], want["features"], strict=True):
        actual = encode_image(weights, config["vision_config"], image)
        assert (actual - features).abs().max() <= 4e-5
    for case in ("text_single", "image_single", "image_batch2_labels"):
        inputs, want, _ = golden_case(f"{case}.fp32")
        images = inputs.get("images", torch.zeros(len(inputs["input_ids"]), 0))
        for row, ids in enumerate(inputs["input_ids"].tolist()):
            of_row = [images[row]] if "images" in inputs else []
            actual = forward_row(weights, config, ids, of_row)
            assert (actual - want["logits"][row]).abs().max() <= 4e-5


@pytest.mark.parametrize(
    ("name", "implementation"), [*((name, "sdpa") for name in CONFIGURATIONS), ("several", "eager")]
)
def test_logits_and_gradients_equal_the_reference(name, implementation):
    model = random_model(CONFIGURATIONS[name]).train()
    model.set_attn_implementation(implementation)
    # A row with an image at its start, two adjacent ones, and text between and after.
    image, side = [BOI, PAD, EOI], model.config.vision.image_size
    row = [*image, *text(5, seed=1), *image, *image, *text(6, seed=2)]
    pixels = random_pixels(3, seed=3, side=side).double()
    labels = torch.tensor([[-100] * (len(row) - 5) + row[-5:]])
    output = model(input_ids=torch.tensor([row]), labels=labels, pixel_values=pixels)
    output.loss.backward()
    weights = dict(model.named_parameters())
    want = forward_row(weights, model.config.to_dict(), row, list(pixels))
    tokens = model.config.vision.num_image_tokens
    assert len(want) == len(row) + 3 * (tokens - 1)
    assert relative_difference(output.logits[0], want) <= RTOL
    loss = F.cross_entropy(want[-6:-1], torch.tensor(row[-5:]))
    gradients = torch.autograd.grad(loss, list(weights.values()))
    for (name, parameter), gradient in zip(weights.items(), gradients, strict=True):
        assert gradient.abs().max() > 0, name
        assert relative_difference(parameter.grad, gradient) <= GRADIENT_RTOL, name
