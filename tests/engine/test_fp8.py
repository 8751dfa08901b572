"""Layers that multiply in fp8, on a CPU: against a plain emulation, and in a model."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu
from torch.utils._python_dispatch import TorchDispatchMode

from glm4v_patched.engine import fp8, implementations
from glm4v_patched.engine.activation_checkpointing import transformer_layers
from glm4v_patched.engine.implementations import ModelUsage, use_implementations
from glm4v_patched.engine.kernels import flash_attention_3, skinny_gemm
from glm4v_patched.engine.kernels.fp8_linear import (
    Fp8DynamicLinear,
    Fp8StoredLinear,
    FrozenTowerMLP,
)
from glm4v_patched.engine.kernels.fp8_matmul import (
    gelu_and_quantize_rows,
    quantize_rows,
    scaled_matmul,
)
from glm4v_patched.engine.options import EngineOptions
from glm4v_patched.engine.prepare import prepare_model
from glm4v_patched.remote import visual
from tests.helpers.fp8 import PLAIN, apart, build, layer, passes
from tests.helpers.tiny import expanded_image, random_pixels, text, tiny_config

# Outputs are rounded to bf16: a relative error of 0.0017 on random data. With other operands it
# would be 0.03.
MAX_ERROR = 0.004


pytestmark = pytest.mark.newest  # torch._scaled_mm


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(fp8, "_allow_cpu", True)


def gradient_error(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The relative error of all gradients of a model together."""
    assert gradients.keys() == expected.keys()
    actual, exact = (
        torch.cat([gradient.double().flatten() for gradient in named.values()])
        for named in (gradients, expected)
    )
    return apart(actual, exact)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Quantize the rows of a tensor to e4m3, each with its scale, and dequantize them to fp64."""
    largest = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-30)
    numbers = (x.float() * (448 / largest)).to(torch.float8_e4m3fn)
    return numbers.double() * (largest / 448).double()


def emulated(
    linear: nn.Linear, x: torch.Tensor, towards: torch.Tensor, stored: bool
) -> list[torch.Tensor]:
    """Output and gradients of input, weight and bias, in fp64 from quantized operands.

    Args:
        linear: bf16.
        x, towards: ``(T, I)`` and ``(T, O)``.
        stored: The gradient of the input is made with the weight of forward, whose scales are
            multiplied into ``towards``; otherwise the weight is quantized by its input channels.
    """
    weight, wide = linear.weight.detach(), towards.double()
    out = rounded(x) @ rounded(weight).t()
    if stored:
        scale = weight.float().abs().amax(-1, keepdim=True) / 448
        of_input = rounded(towards.float() * scale.t()) @ (rounded(weight) / scale.double())
    else:
        of_input = rounded(towards) @ rounded(weight.t()).t()
    bias = 0 if linear.bias is None else linear.bias.detach().double()
    return [out + bias, of_input, wide.t() @ x.double(), wide.sum(0)]


both_kinds = pytest.mark.parametrize("stored", [False, True], ids=["dynamic", "stored"])


@pytest.mark.parametrize("bias", [True, False])
@both_kinds
def test_a_layer_and_its_gradients_match_the_emulation(stored, bias):
    torch.manual_seed(1)
    # Rows of very different magnitudes: one scale for all would lose the small ones.
    x = (torch.randn(40, 96) * torch.logspace(-6, 6, 40)[:, None]).bfloat16()
    out_grad = (torch.randn(40, 64) * torch.logspace(3, -9, 40)[:, None]).bfloat16()
    x[5], out_grad[6], x[7] = 0, 0, x[7] * 1e37
    reference, linear = layer(False, bias=bias), layer(stored, bias=bias)
    results = passes(linear, x, out_grad)
    expected = emulated(reference, x, out_grad, stored)
    assert len(results) == (2 if stored else 3 + bias)
    assert all(result.dtype is torch.bfloat16 for result in results)
    for rows, expected_rows in zip(results[:2], expected, strict=False):
        for row, expected_row in zip(rows, expected_rows, strict=True):
            assert apart(row, expected_row) < MAX_ERROR
    for result, exact in zip(results[2:], expected[2:], strict=False):
        assert apart(result, exact) < MAX_ERROR
    exact = torch.nn.functional.linear(x.double(), reference.weight.detach().double())
    row = x.shape[0] // 2
    if not bias:
        assert 0.01 < apart(results[0][row], exact[row]) < 0.06  # it is quantized


def test_nan_and_infinity_affect_their_own_row_only():
    linear = layer(True, bias=False)
    for value in (float("nan"), -float("inf")):
        x, out_grad = torch.randn(3, 96).bfloat16(), torch.ones(3, 64, dtype=torch.bfloat16)
        x[1, 5] = out_grad[2, 0] = value
        out, gradient = passes(linear, x, out_grad)
        assert not out[1].isfinite().any() and out[[0, 2]].isfinite().all()
        assert not gradient[2].isfinite().any() and gradient[:2].isfinite().all()


@both_kinds
def test_empty_batches_strided_inputs_and_more_dimensions_work(stored):
    linear = layer(stored)
    empty = passes(linear, torch.zeros(0, 96).bfloat16(), torch.zeros(0, 64).bfloat16())
    assert empty[0].shape == (0, 64) and empty[1].shape == (0, 96)
    assert all((gradient == 0).all() for gradient in empty[2:])
    x = torch.randn(96, 5, 2).bfloat16().permute(2, 1, 0)  # (2, 5, 96), strided
    out_grad = torch.randn(64, 5, 2).bfloat16().permute(2, 1, 0)
    results = passes(linear, x, out_grad)
    flat_results = passes(linear, x.reshape(10, 96), out_grad.reshape(10, 64))
    assert results[0].shape == (2, 5, 64)
    for result, flat in zip(results, flat_results, strict=True):
        assert torch.equal(result.reshape(flat.shape), flat)


def test_a_stored_layer_saves_no_input_and_a_trained_one_saves_it_unquantized():
    saved = []
    x = torch.randn(4, 96, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        stored = layer(True, bias=False)
        stored(x)
        assert {id(t) for t in saved} == {id(stored.weight), id(stored.weight_scale)}
        saved.clear()
        dynamic = layer(False, bias=False)
        dynamic(x)
    # The parameters themselves, and no copies: ZeRO-3 releases the parameters' memory.
    assert len(saved) == 2 and saved[1] is dynamic.weight and saved[0].data_ptr() == x.data_ptr()


@both_kinds
@torch._functorch.config.patch(treat_parameters_as_free_to_save=False)
def test_compiled_code_saves_no_quantized_weight_for_backward(stored):
    """The compiler would prefer it, as it is smaller than the weight. By default it takes
    parameters as saved at no cost, which would hide the problem."""
    torch._dynamo.reset()
    linear = layer(stored, bias=False, into=128, out=256)
    if stored:
        linear.transposed = None
    norm = nn.LayerNorm(128, dtype=torch.bfloat16, elementwise_affine=False)
    compiled = torch.compile(lambda x: linear(norm(x)), backend="aot_eager_decomp_partition")
    x = torch.randn(4, 128, dtype=torch.bfloat16, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = compiled(x)
    own = {linear.weight.data_ptr(), *(b.data_ptr() for b in linear.buffers())}
    others = [t for t in saved if t.data_ptr() not in own]
    assert saved and all(t.numel() <= x.numel() for t in others)
    out.backward(torch.ones_like(out))
    gradient = x.grad.clone()
    x.grad = None
    linear(norm(x)).backward(torch.ones_like(out))
    assert apart(gradient, x.grad.double()) < 0.02


@both_kinds
def test_compiled_code_loses_no_gradient(stored):
    """torch 2.11's compiler loses it if a Function's output is cast to the dtype that it has."""
    torch._dynamo.reset()
    linear = layer(stored)
    x, out_grad = torch.randn(8, 96).bfloat16(), torch.randn(8, 64).bfloat16()
    expected = passes(linear, x, out_grad)
    linear.forward = torch.compile(linear.forward, backend="aot_eager")
    results = passes(linear, x, out_grad)
    assert all(result.any() for result in results)
    for result, exact in zip(results, expected, strict=True):
        assert result.dtype is exact.dtype and apart(result, exact.double()) < MAX_ERROR


@both_kinds
def test_inputs_are_cast_under_autocast(stored):
    linear, x = layer(stored), torch.randn(4, 96)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = linear(x), linear(x.bfloat16())
    assert out.dtype is torch.bfloat16 and torch.equal(out, expected)
    assert linear(x).dtype is torch.float32, "without autocast the output has the input's dtype"
    assert linear(x).dtype is torch.float32, "without autocast the output has the input's dtype"


def batch() -> dict[str, torch.Tensor]:
    ids = torch.tensor([text(5) + expanded_image() + text(9)])
    return {"input_ids": ids, "labels": ids, "pixel_values": random_pixels(1).bfloat16()}


def step(options: EngineOptions) -> tuple[torch.Tensor, dict[str, torch.Tensor], nn.Module]:
    torch.manual_seed(0)
    model = prepare_model(options, build)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    loss = model(**batch()).loss
    loss.backward()
    return loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, model


def linear_classes(model: nn.Module) -> dict[str, type]:
    """The classes of the linear layers in the first tower layer and the first block."""
    classes = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".0." in name:
            classes[name.split(".0.", 1)[1].removesuffix(".base_layer")] = type(module)
    return classes


@pytest.mark.parametrize("compiled", [False, True])
def test_which_layers_multiply_in_fp8(compiled):
    model = build().requires_grad_(False)
    use_implementations(model, ModelUsage.training(replace(PLAIN, fp8=False)))
    assert {*linear_classes(model).values()} == {nn.Linear}
    options = replace(PLAIN, trained="full", compile=compiled)
    use_implementations(model, ModelUsage.training(options))
    assert linear_classes(model) == {
        "self_attention.query_key_value": Fp8DynamicLinear,
        "self_attention.dense": Fp8DynamicLinear,
        "mlp.dense_h_to_4h": Fp8DynamicLinear,
        "mlp.dense_4h_to_h": Fp8DynamicLinear,
        "attention.query_key_value": Fp8DynamicLinear,
        "attention.dense": nn.Linear,
        "mlp.fc1": Fp8DynamicLinear,
        "mlp.fc2": Fp8DynamicLinear if compiled else nn.Linear,
    }
    layers = [*transformer_layers(model)]
    inside = {id(m) for transformer_layer in layers for m in transformer_layer.modules()}
    outside = [m for m in model.modules() if isinstance(m, nn.Linear) and id(m) not in inside]
    assert len(outside) == 5  # the projector's, and the output layer
    assert not any(isinstance(m, (Fp8DynamicLinear, Fp8StoredLinear)) for m in outside)


def test_lora_stores_frozen_weights_in_fp8_and_leaves_its_factors_alone():
    _, gradients, model = step(PLAIN)
    classes = linear_classes(model)
    assert all(cls is nn.Linear for name, cls in classes.items() if "lora_" in name)
    stored = [m for m in model.modules() if type(m) is Fp8StoredLinear]
    assert len(stored) == 2 * 4 + 2 * 2
    plain = prepare_model(replace(PLAIN, fp8=False), build)
    names = {name: p.shape for name, p in plain.named_parameters()}
    assert {name: p.shape for name, p in model.named_parameters()} == names
    assert model.state_dict().keys() == plain.state_dict().keys()
    # Casts, as frameworks do them, leave the quantized weights alone.
    model.bfloat16().half().bfloat16()
    assert all(m.weight.dtype is torch.uint8 for m in stored)
    assert all(m.weight_scale.dtype is torch.int32 for m in stored)
    assert gradients and all("lora_" in name for name in gradients)


@pytest.mark.parametrize("trained", ["lora_all", "full"])
def test_the_gradients_of_a_model_are_near_those_of_bf16(trained):
    loss, gradients, _ = step(replace(PLAIN, trained=trained, fp8=False))
    fp8_loss, fp8_gradients, _ = step(replace(PLAIN, trained=trained))
    assert 1e-4 < abs(fp8_loss - loss) / loss < 0.01
    assert 0.01 < gradient_error(fp8_gradients, gradients) < 0.2


class ProductCounter(TorchDispatchMode):
    products = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.products += operator is torch.ops.aten._scaled_mm.default
        return operator(*arguments, **(options or {}))


@pytest.mark.parametrize("trained", ["lora_all", "full"])
def test_policies_give_the_same_gradients_and_save_fp8_products_like_others(trained):
    results = {}
    for policy in ("none", "linear", "selective", "full"):
        options = replace(PLAIN, trained=trained, tower=policy, language=policy)
        with ProductCounter() as counter:
            loss, gradients, _ = step(options)
        results[policy] = loss, gradients, counter.products
    plain_loss, plain, products = results["none"]
    for loss, gradients, _ in results.values():
        assert torch.equal(loss, plain_loss) and gradients.keys() == plain.keys()
        assert all(torch.equal(gradients[name], plain[name]) for name in gradients)
    recomputed = {policy: count - products for policy, (_, _, count) in results.items()}
    assert recomputed == {"none": 0, "linear": 0, "selective": 8, "full": 12}


def test_gradients_are_the_same_with_and_without_stored_transposed_weights():
    _, both, model = step(PLAIN)
    assert any(m.transposed is not None for m in model.modules() if type(m) is Fp8StoredLinear)
    _, one, model = step(replace(PLAIN, may_store_transposed_fp8=False))
    assert all(m.transposed is None for m in model.modules() if type(m) is Fp8StoredLinear)
    assert all(torch.equal(both[name], one[name]) for name in both)
    lm = prepare_model(replace(PLAIN, trained="lora_lm"), build)
    stored = [m for m in lm.modules() if type(m) is Fp8StoredLinear]
    # Nothing flows back through the tower, which is 32 wide.
    assert {m.in_features == 32 for m in stored if m.transposed is None} == {True}
    assert not any(m.in_features == 32 for m in stored if m.transposed is not None)


@pytest.mark.parametrize(
    ("size", "language", "tower"),
    [
        ("hidden_size is 72", {"hidden_size": 72}, {}),
        ("ffn_hidden_size is 104", {"ffn_hidden_size": 104}, {}),
        (
            "num_attention_heads * kv_channels is 40",
            {"kv_channels": 4, "num_attention_heads": 10},
            {},
        ),
        ("multi_query_group_num * kv_channels is 40", {"kv_channels": 20}, {}),
        ("vision_config.hidden_size is 24", {}, {"hidden_size": 24}),
        ("vision_config.intermediate_size is 104", {}, {"intermediate_size": 104}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_size_that_fp8_cannot_multiply_is_named(size, language, tower):
    config = tiny_config(**language, vision_config=tiny_config().vision_config | tower)
    with pytest.raises(ValueError, match=f"^{re.escape(size)}, and fp8 needs multiples of 16"):
        fp8.require_fp8(PLAIN, config)


def test_missing_requirements_of_fp8_are_reported_before_a_model_is_built(monkeypatch, words):
    config, odd = tiny_config(), tiny_config(ffn_hidden_size=104)
    fp8.require_fp8(PLAIN, config)
    fp8.require_fp8(replace(PLAIN, fp8=False), odd)
    with words.refused(ValueError, "ffn_hidden_size is 104", "16"):
        fp8.require_fp8(PLAIN, odd)
    monkeypatch.setattr(fp8, "_allow_cpu", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with words.refused(RuntimeError, "GPU"):
        fp8.require_fp8(PLAIN, config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with words.refused(RuntimeError, "8.9", "NVIDIA A100 has 8.0"):
        fp8.require_fp8(PLAIN, config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    fp8.require_fp8(PLAIN, config)
    monkeypatch.delattr(torch, "_scaled_mm")
    with words.refused(RuntimeError, "torch._scaled_mm", version=torch.__version__):
        fp8.require_fp8(PLAIN, config)


def test_gelu_rows_are_quantized():
    torch.manual_seed(0)
    x = (torch.randn(6, 96) * torch.logspace(-4, 2, 6)[:, None]).bfloat16()
    bias = torch.randn(96).bfloat16()
    x[2, 7] = float("nan")
    quantized, scale = gelu_and_quantize_rows(x, bias)
    out, exact = quantized.double() * scale.double(), gelu(x.double() + bias.double())
    assert not out[2].isfinite().any()
    out, exact = out[[0, 1, 3, 4, 5]], exact[[0, 1, 3, 4, 5]]
    amax = exact.abs().amax(-1, keepdim=True)
    assert ((out - exact).abs() <= (exact.abs() / 16).clamp(min=amax / 2e5)).all()


def test_a_frozen_tower_quantizes_in_gelu_and_computes_the_same(monkeypatch):
    for trained, compiled in (("lora_all", True), ("lora_lm", False), ("lm", True)):
        model = prepare_model(replace(PLAIN, trained=trained, compile=compiled), build)
        fuses = any(isinstance(m, FrozenTowerMLP) for m in model.modules())
        assert fuses == (trained == "lm")
    outputs = []
    for fused in (True, False):
        with monkeypatch.context() as patch:
            if not fused:
                entries = implementations.IMPLEMENTATIONS
                others = [entry for entry in entries if entry.replaces is not visual.VisionMLP]
                patch.setattr(implementations, "IMPLEMENTATIONS", others)
            model = prepare_model(replace(PLAIN, trained="lora_lm", compile=True), build)
        mlps = [m for m in model.modules() if isinstance(m, visual.VisionMLP)]
        assert mlps and all(isinstance(m, FrozenTowerMLP) is fused for m in mlps)
        with torch.no_grad():
            mlps[0].fc1.bias.fill_(0.5)
            x = torch.randn(1, 5, mlps[0].fc1.in_features, generator=torch.manual_seed(0))
            outputs.append(mlps[0](x.bfloat16()).float())
            if fused:
                compiled = torch.compile(mlps[0].forward, backend="aot_eager", fullgraph=True)
                assert torch.equal(compiled(x.bfloat16()).float(), outputs[-1])
    # fc2's input is not rounded to bf16 before it is quantized.
    assert outputs[1].norm() > 0 and (outputs[0] - outputs[1]).norm() / outputs[1].norm() < 0.03


@pytest.mark.parametrize(
    ("m", "k", "padded_m"),
    [(33, 3072, 33), (33, 9216, 272), (256, 9216, 272), (272, 9216, 272), (300, 9216, 300)],
)
def test_rows_are_padded_where_cublas_has_no_kernel_for_so_few(monkeypatch, m, k, padded_m):
    torch.manual_seed(0)
    scaled_mm, seen = torch._scaled_mm, []

    def recorded_scaled_mm(x, *args, **kwargs):
        seen.append(len(x))
        return scaled_mm(x, *args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", recorded_scaled_mm)
    x, weight = quantize_rows(torch.randn(m, k)), quantize_rows(torch.randn(16, k))
    out = scaled_matmul(*x, *weight, bias=torch.arange(16.0))
    exact = (x[0].float() * x[1]) @ (weight[0].float() * weight[1]).t() + torch.arange(16.0)
    assert seen == [padded_m] and out.shape == (m, 16)
    torch.testing.assert_close(out.float(), exact, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(("n", "k"), [(4608, 4096), (27392, 4096), (4096, 13696), (64, 128)])
def test_the_splits_of_a_product_fill_the_gpu_and_none_is_empty(n, k):
    splits = skinny_gemm.num_splits(n, k, sms=132)
    split_blocks, blocks = skinny_gemm.k_blocks_per_split(k, splits), k // skinny_gemm.BLOCK_K
    assert (splits - 1) * split_blocks < blocks <= splits * split_blocks
    at_once = 2 * 132 // (n // skinny_gemm.BLOCK_N)
    assert splits == min(max(at_once, 1), blocks)


def test_a_frozen_tower_uses_torchs_attention_where_flash_attention_3_cannot_run(monkeypatch):
    model, usage = build(), ModelUsage.training(replace(PLAIN, fp8=False, trained="lora_lm"))

    def is_used(**changes) -> bool:
        use_implementations(model, replace(usage, **changes))
        return {type(module) for module in model.modules()}.isdisjoint({visual.Attention})

    with torch.no_grad():
        expected = model(**batch()).logits
    for problem in ("fa3-fwd is not installed", "FlashAttention-3 needs a Hopper GPU"):
        monkeypatch.setattr(flash_attention_3, "find_fa3_problem", lambda head_dim, p=problem: p)
        assert not is_used()
    monkeypatch.setattr(flash_attention_3, "find_fa3_problem", lambda head_dim: None)
    model.config._attn_implementation = "eager"
    assert not is_used()
    model.config._attn_implementation = "sdpa"
    assert not is_used(trains_tower=True) and is_used()
    with torch.no_grad():  # on a CPU, and in fp32
        assert torch.equal(model(**batch()).logits, expected)


@pytest.mark.gpu
def test_flash_attention_3_is_used_where_it_agrees_with_torchs():
    pytest.importorskip("fa3_fwd_interface", reason="fa3-fwd is missing: pip install fa3-fwd")
    if torch.cuda.get_device_capability() != flash_attention_3.HOPPER:
        pytest.skip("FlashAttention-3 needs a Hopper GPU")
    assert flash_attention_3.find_fa3_problem() is None
    query, key, value = torch.randn(2, 100, 3, 4, 112, device="cuda").bfloat16().unbind(2)
    heads = [tensor.transpose(1, 2).float() for tensor in (query, key, value)]
    exact = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)
    for attend in (flash_attention_3._flash_attention, flash_attention_3._flash_attention_op):
        assert (attend(query, key, value).float() - exact).norm() < 0.01 * exact.norm()
