"""Products in fp8 on a GPU, by kind of layer: against fp64, compiled and not."""

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu

from glm4v_patched.engine.activation_checkpointing import checkpoint_layers, compile_layers
from glm4v_patched.engine.implementations import Use, use_implementations
from glm4v_patched.engine.kernels.fp8_matmul import quantize_rows, gelu_and_quantize_rows
from glm4v_patched.engine.options import EngineOptions
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import GLMBlock, RotaryEmbedding
from tests.helpers.fp8 import apart, layer, passes

pytestmark = pytest.mark.gpu

# Channels in and out of the layers of glm-4v-9b.
KINDS = {
    "language query_key_value": (4096, 4608),
    "language dense": (4096, 4096),
    "language dense_h_to_4h": (4096, 27392),
    "language dense_4h_to_h": (13696, 4096),
    "tower query_key_value": (1792, 5376),
    "tower dense": (1792, 1792),
    "tower fc1": (1792, 15360),
    "tower fc2": (15360, 1792),
}
# Each operand is rounded to 3 bits behind the leading one, a relative error of about 0.026 on
# random data; of a product of two, 0.037 (measured on an H200). bf16's is 0.003.
QUANTIZED = 0.05
BF16 = 0.01


each_kind = pytest.mark.parametrize("held", [False, True], ids=["trained", "held"])


@each_kind
@pytest.mark.parametrize("rows", [66, 300, 1000])  # cuBLAS lacks kernels for few
@pytest.mark.parametrize("kind", KINDS)
def test_products_and_gradients_are_near_those_of_fp64(kind, rows, held):
    into, out = KINDS[kind]
    linear = layer(held, into, out, device="cuda")
    weight = layer(False, into, out, device="cuda").weight.detach().double()
    x = torch.randn(2, rows // 2, into, device="cuda", dtype=torch.bfloat16)
    towards = torch.randn(2, rows // 2, out, device="cuda", dtype=torch.bfloat16)
    found = passes(linear, x, towards)
    wide, back = x.double(), towards.double()
    exact = [wide @ weight.t() + linear.bias.double(), back @ weight]
    exact += [back.flatten(0, 1).t() @ wide.flatten(0, 1), back.sum((0, 1))]
    of = [apart(one, other) for one, other in zip(found, exact, strict=False)]
    print(kind, *(f"{one:.4f}" for one in of))
    assert 0.01 < of[0] < QUANTIZED and 0.01 < of[1] < QUANTIZED
    assert all(one < BF16 for one in of[2:])


@pytest.mark.parametrize("rows", [1, 33, 65, 100, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_products_that_are_only_read_are_near_those_of_fp64(kind, rows):
    into, out = KINDS[kind]
    linear = layer(True, into, out, device="cuda")
    weight = layer(False, into, out, device="cuda").weight.detach().double()
    x = torch.randn(rows, into, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        found = linear(x)
    assert 0.01 < apart(found, x.double() @ weight.t() + linear.bias.double()) < QUANTIZED


@each_kind
@pytest.mark.parametrize("policy", ["none", "selective"])
def test_a_compiled_layer_has_the_gradients_of_bf16(held, policy):
    """A layer of the language model at its real size, with what is trained before it."""
    config = ChatGLMConfig(num_layers=1)
    config._attn_implementation = "sdpa"
    gradients = {}
    for in_fp8 in (False, True):
        torch.manual_seed(0)
        with torch.device("cuda"):
            block = GLMBlock(config, 0).to(torch.bfloat16).train()
        block.requires_grad_(not held)
        options = EngineOptions(
            trained="lora_lm" if held else "full", fp8=in_fp8, compile=True, zero_stage=0
        )
        model = nn.ModuleList([block])
        use_implementations(model, Use.training(options))
        checkpoint_layers(model, "none", policy)
        if in_fp8:
            compile_layers(model)
        x = torch.randn(1, 600, config.hidden_size, device="cuda", dtype=torch.bfloat16)
        x.requires_grad_()
        positions = torch.arange(600, device="cuda")[None]
        out = block(x, *RotaryEmbedding(config)(positions, x.dtype), None, None, None, {})
        out.backward(torch.randn_like(out))
        found = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
        gradients[in_fp8] = found | {"x": x.grad}
    assert gradients[True].keys() == gradients[False].keys()
    for name, exact in gradients[False].items():
        assert 0.001 < apart(gradients[True][name], exact.double()) < 0.2, name


@pytest.mark.parametrize(("rows", "channels"), [(0, 96), (3, 96), (500, 15360)])
def test_the_kernel_of_gelu_does_what_plain_torch_does(rows, channels):
    torch.manual_seed(0)
    x, bias = torch.randn(rows, channels, device="cuda"), torch.randn(channels, device="cuda")
    x, bias = (x * torch.logspace(-4, 2, rows, device="cuda")[:, None]).bfloat16(), bias.bfloat16()
    x[1:2, 3] = float("nan")
    numbers, scale = gelu_and_quantize_rows(x, bias)
    expected, scales = quantize_rows(gelu(x.float() + bias.float()))
    assert torch.allclose(scale, scales, rtol=1e-5, equal_nan=True)
    assert numbers.shape == expected.shape
    if rows:
        # Where a value lies between two numbers, either will do.
        assert (numbers.float() != expected.float()).float().mean() < 0.01 + (rows == 3)
        apart = (numbers.float() - expected.float()).abs() / expected.float().abs().clamp(min=0.02)
        assert not (apart > 0.13).any()
        assert not (numbers.float() * scale)[1].isfinite().any()
