"""Products in fp8 on a GPU, by name of layer: against fp64, compiled and not."""

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu

from glm4v_patched.engine.activation_checkpointing import checkpoint_layers, compile_layers
from glm4v_patched.engine.implementations import ModelUsage, use_implementations
from glm4v_patched.engine.kernels.fp8_matmul import gelu_and_quantize_rows, quantize_rows
from glm4v_patched.engine.options import EngineOptions
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import GLMBlock, RotaryEmbedding
from tests.helpers.fp8 import apart, layer, passes

pytestmark = pytest.mark.gpu

# Channels in and out of the layers of glm-4v-9b.
LAYER_SHAPES = {
    "language query_key_value": (4096, 4608),
    "language dense": (4096, 4096),
    "language dense_h_to_4h": (4096, 27392),
    "language dense_4h_to_h": (13696, 4096),
    "tower query_key_value": (1792, 5376),
    "tower dense": (1792, 1792),
    "tower fc1": (1792, 15360),
    "tower fc2": (15360, 1792),
}
# Largest relative errors. Quantizing random data has an error of about 0.026 (e4m3 has 3 mantissa
# bits), a product of two quantized operands 0.037 (measured on an H200), one in bf16 0.003.
MAX_FP8_ERROR = 0.05
MAX_BF16_ERROR = 0.01


both_kinds = pytest.mark.parametrize("stored", [False, True], ids=["dynamic", "stored"])


@both_kinds
@pytest.mark.parametrize("rows", [66, 300, 1000])  # cuBLAS has no kernels for few
@pytest.mark.parametrize("name", LAYER_SHAPES)
def test_products_and_gradients_are_near_those_of_fp64(name, rows, stored):
    into, out = LAYER_SHAPES[name]
    linear = layer(stored, into, out, device="cuda")
    weight = layer(False, into, out, device="cuda").weight.detach().double()
    x = torch.randn(2, rows // 2, into, device="cuda", dtype=torch.bfloat16)
    out_grad = torch.randn(2, rows // 2, out, device="cuda", dtype=torch.bfloat16)
    results = passes(linear, x, out_grad)
    x64, out_grad64 = x.double(), out_grad.double()
    exact = [x64 @ weight.t() + linear.bias.double(), out_grad64 @ weight]
    exact += [out_grad64.flatten(0, 1).t() @ x64.flatten(0, 1), out_grad64.sum((0, 1))]
    errors = [apart(result, expected) for result, expected in zip(results, exact, strict=False)]
    print(name, *(f"{error:.4f}" for error in errors))
    assert 0.01 < errors[0] < MAX_FP8_ERROR and 0.01 < errors[1] < MAX_FP8_ERROR
    assert all(error < MAX_BF16_ERROR for error in errors[2:])
    for few in (1, 33, 65, 100, rows):  # without gradients, few rows are products of other kernels
        with torch.no_grad():
            result = linear(x.flatten(0, 1)[:few])
        assert 0.01 < apart(result, exact[0].flatten(0, 1)[:few]) < MAX_FP8_ERROR


@both_kinds
@pytest.mark.parametrize("policy", ["none", "selective"])
def test_a_compiled_layer_has_gradients_near_those_of_bf16(stored, policy):
    """A block at its real size, with gradients for its input."""
    config = ChatGLMConfig(num_layers=1)
    config._attn_implementation = "sdpa"
    gradients = {}
    for in_fp8 in (False, True):
        torch.manual_seed(0)
        with torch.device("cuda"):
            block = GLMBlock(config, 0).to(torch.bfloat16).train()
        block.requires_grad_(not stored)
        options = EngineOptions(
            trained="lora_lm" if stored else "full", fp8=in_fp8, compile=True, zero_stage=0
        )
        model = nn.ModuleList([block])
        use_implementations(model, ModelUsage.training(options))
        checkpoint_layers(model, "none", policy)
        if in_fp8:
            compile_layers(model)
        x = torch.randn(1, 600, config.hidden_size, device="cuda", dtype=torch.bfloat16)
        x.requires_grad_()
        positions = torch.arange(600, device="cuda")[None]
        out = block(x, *RotaryEmbedding(config)(positions, x.dtype), None, None, None, {})
        out.backward(torch.randn_like(out))
        trained = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
        gradients[in_fp8] = trained | {"x": x.grad}
    assert gradients[True].keys() == gradients[False].keys()
    for name, exact in gradients[False].items():
        assert 0.001 < apart(gradients[True][name], exact.double()) < 0.2, name


@pytest.mark.parametrize(("rows", "channels"), [(0, 96), (3, 96), (500, 15360)])
def test_the_gelu_kernel_matches_plain_torch(rows, channels):
    torch.manual_seed(0)
    x, bias = torch.randn(rows, channels, device="cuda"), torch.randn(channels, device="cuda")
    x, bias = (x * torch.logspace(-4, 2, rows, device="cuda")[:, None]).bfloat16(), bias.bfloat16()
    x[1:2, 3] = float("nan")
    quantized, scale = gelu_and_quantize_rows(x, bias)
    expected, expected_scale = quantize_rows(gelu(x.float() + bias.float()))
    assert torch.allclose(scale, expected_scale, rtol=1e-5, equal_nan=True)
    assert quantized.shape == expected.shape
    if rows:
        # A value between two e4m3 numbers may be rounded to either.
        actual, wanted = quantized.float(), expected.float()
        assert (actual != wanted).float().mean() < 0.01 + (rows == 3)
        errors = (actual - wanted).abs() / wanted.abs().clamp(min=0.02)
        assert not (errors > 0.13).any()
        assert not (actual * scale)[1].isfinite().any()
