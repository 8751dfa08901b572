"""Layers that multiply in fp8, on a CPU: against a plain emulation, and what becomes of a model."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu
from torch.utils._python_dispatch import TorchDispatchMode

from glm4v_patched.engine import fp8, implementations
from glm4v_patched.engine.activation_checkpointing import checkpointed_layers
from glm4v_patched.engine.implementations import Use, use_implementations
from glm4v_patched.engine.kernels import flash_attention_3, skinny_gemm
from glm4v_patched.engine.kernels.fp8_linear import FrozenTowerMLP, Fp8StoredLinear, Fp8DynamicLinear
from glm4v_patched.engine.kernels.fp8_matmul import product, quantize_rows, gelu_and_quantize_rows
from glm4v_patched.engine.options import EngineOptions
from glm4v_patched.engine.prepare import prepare_model
from glm4v_patched.remote import visual
from tests.helpers.fp8 import PLAIN, apart, build, emulated, layer, passes
from tests.helpers.tiny import expanded_image, random_pixels, text, tiny_config

# What comes out is rounded to bf16, a relative 0.0017 on random data. Of other operands it
# would be 0.03 apart.
NEAR = 0.004


pytestmark = pytest.mark.newest  # torch's products


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(fp8, "_allow_cpu", True)


def far(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """As ``apart``, of all gradients of a model together."""
    assert found.keys() == expected.keys()
    return apart(
        *(torch.cat([g.double().flatten() for g in of.values()]) for of in (found, expected))
    )


each_kind = pytest.mark.parametrize("held", [False, True], ids=["used", "held"])


@pytest.mark.parametrize("bias", [True, False])
@each_kind
def test_a_layer_and_its_gradients_are_those_of_the_emulation(held, bias):
    torch.manual_seed(1)
    # Rows and channels of very different sizes: one scale for all would lose the small ones.
    x = (torch.randn(40, 96) * torch.logspace(-6, 6, 40)[:, None]).bfloat16()
    towards = (torch.randn(40, 64) * torch.logspace(3, -9, 40)[:, None]).bfloat16()
    x[5], towards[6], x[7] = 0, 0, x[7] * 1e37
    reference, linear = layer(False, bias=bias), layer(held, bias=bias)
    found = passes(linear, x, towards)
    expected = emulated(reference, x, towards, held)
    assert len(found) == (2 if held else 3 + bias)
    assert all(one.dtype is torch.bfloat16 for one in found)
    for of_rows, others in zip(found[:2], expected, strict=False):
        for one, other in zip(of_rows, others, strict=True):
            assert apart(one, other) < NEAR
    for one, other in zip(found[2:], expected[2:], strict=False):
        assert apart(one, other) < NEAR
    exact = torch.nn.functional.linear(x.double(), reference.weight.detach().double())
    row = x.shape[0] // 2
    if not bias:
        assert 0.01 < apart(found[0][row], exact[row]) < 0.06  # it is quantized


def test_what_is_not_finite_stays_so_in_its_row_alone():
    linear = layer(True, bias=False)
    for value in (float("nan"), -float("inf")):
        x, towards = torch.randn(3, 96).bfloat16(), torch.ones(3, 64, dtype=torch.bfloat16)
        x[1, 5] = towards[2, 0] = value
        out, gradient = passes(linear, x, towards)
        assert not out[1].isfinite().any() and out[[0, 2]].isfinite().all()
        assert not gradient[2].isfinite().any() and gradient[:2].isfinite().all()


@each_kind
def test_an_empty_batch_any_strides_and_more_dimensions(held):
    linear = layer(held)
    empty = passes(linear, torch.zeros(0, 96).bfloat16(), torch.zeros(0, 64).bfloat16())
    assert empty[0].shape == (0, 64) and empty[1].shape == (0, 96)
    assert all((gradient == 0).all() for gradient in empty[2:])
    x = torch.randn(96, 5, 2).bfloat16().permute(2, 1, 0)  # (2, 5, 96), strided
    towards = torch.randn(64, 5, 2).bfloat16().permute(2, 1, 0)
    found = passes(linear, x, towards)
    flat = passes(linear, x.reshape(10, 96), towards.reshape(10, 64))
    assert found[0].shape == (2, 5, 64)
    for one, other in zip(found, flat, strict=True):
        assert torch.equal(one.reshape(other.shape), other)


def test_a_held_layer_keeps_no_input_and_a_trained_one_keeps_it_unquantized():
    kept = []
    x = torch.randn(4, 96, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        held = layer(True, bias=False)
        held(x)
        assert {id(t) for t in kept} == {id(held.weight), id(held.weight_scale)}
        kept.clear()
        used = layer(False, bias=False)
        used(x)
    # The parameters themselves, and nothing made of them: ZeRO-3 releases what is in them.
    assert len(kept) == 2 and kept[1] is used.weight and kept[0].data_ptr() == x.data_ptr()


@each_kind
@torch._functorch.config.patch(treat_parameters_as_free_to_save=False)
def test_a_compiler_keeps_no_quantized_weight_from_forward_to_backward(held):
    """Which is smaller than the weight; torch takes weights that it knows for parameters as kept in
    any case, and so would keep no other of these."""
    torch._dynamo.reset()
    linear = layer(held, bias=False, into=128, out=256)
    if held:
        linear.transposed = None
    norm = nn.LayerNorm(128, dtype=torch.bfloat16, elementwise_affine=False)
    compiled = torch.compile(lambda x: linear(norm(x)), backend="aot_eager_decomp_partition")
    x = torch.randn(4, 128, dtype=torch.bfloat16, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = compiled(x)
    own = {linear.weight.data_ptr(), *(b.data_ptr() for b in linear.buffers())}
    others = [t for t in kept if t.data_ptr() not in own]
    assert kept and all(t.numel() <= x.numel() for t in others)
    out.backward(torch.ones_like(out))
    gradient = x.grad.clone()
    x.grad = None
    linear(norm(x)).backward(torch.ones_like(out))
    assert apart(gradient, x.grad.double()) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@each_kind
def test_a_compiler_loses_no_gradient(held, dtype):
    """As that of torch 2.11 does of a Function whose output is cast to the type that it has."""
    torch._dynamo.reset()
    linear = layer(held)
    x, towards = torch.randn(8, 96, dtype=dtype), torch.randn(8, 64, dtype=dtype)
    expected = passes(linear, x, towards)
    linear.forward = torch.compile(linear.forward, backend="aot_eager")
    found = passes(linear, x, towards)
    assert all(one.any() for one in found)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype and apart(one, other.double()) < NEAR


@each_kind
def test_what_comes_in_is_cast_as_autocast_does(held):
    linear, x = layer(held), torch.randn(4, 96)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = linear(x), linear(x.bfloat16())
    assert found.dtype is torch.bfloat16 and torch.equal(found, wanted)


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


def kinds(model: nn.Module) -> dict[str, type]:
    """Of the linear layers of the first layer of each tower."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".0." in name:
            found[name.split(".0.", 1)[1].removesuffix(".base_layer")] = type(module)
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_which_layers_multiply_in_fp8(compiled):
    model = build().requires_grad_(False)
    use_implementations(model, Use.training(replace(PLAIN, fp8=False)))
    assert {*kinds(model).values()} == {nn.Linear}
    options = replace(PLAIN, trained="full", compile=compiled)
    use_implementations(model, Use.training(options))
    assert kinds(model) == {
        "self_attention.query_key_value": Linear,
        "self_attention.dense": Linear,
        "mlp.dense_h_to_4h": Linear,
        "mlp.dense_4h_to_h": Linear,
        "attention.query_key_value": Linear,
        "attention.dense": nn.Linear,
        "mlp.fc1": Linear,
        "mlp.fc2": Linear if compiled else nn.Linear,
    }
    layers = [*checkpointed_layers(model)]
    inside = {id(m) for one in layers for m in one.modules()}
    outside = [m for m in model.modules() if isinstance(m, nn.Linear) and id(m) not in inside]
    assert len(outside) == 5  # the adapter's, and the output layer
    assert not any(isinstance(m, (Linear, Fp8StoredLinear)) for m in outside)


def test_lora_holds_what_is_frozen_and_its_factors_stay_as_they_are():
    _, gradients, model = step(PLAIN)
    found = kinds(model)
    assert all(kind is nn.Linear for name, kind in found.items() if "lora_" in name)
    held = [m for m in model.modules() if type(m) is Fp8StoredLinear]
    assert len(held) == 2 * 4 + 2 * 2
    plain = prepare_model(replace(PLAIN, fp8=False), build)
    names = {name: p.shape for name, p in plain.named_parameters()}
    assert {name: p.shape for name, p in model.named_parameters()} == names
    assert model.state_dict().keys() == plain.state_dict().keys()
    # The casts that frameworks do leave the numbers alone.
    model.bfloat16().half().bfloat16()
    assert all(m.weight.dtype is torch.uint8 for m in held)
    assert all(m.weight_scale.dtype is torch.int32 for m in held)
    assert gradients and all("lora_" in name for name in gradients)


@pytest.mark.parametrize("trained", ["lora_all", "full"])
def test_a_models_gradients_are_near_those_of_bf16(trained):
    loss, gradients, _ = step(replace(PLAIN, trained=trained, fp8=False))
    found_loss, found, _ = step(replace(PLAIN, trained=trained))
    assert 1e-4 < abs(found_loss - loss) / loss < 0.01 and 0.01 < far(found, gradients) < 0.2


class Counted(TorchDispatchMode):
    products = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.products += operator is torch.ops.aten._scaled_mm.default
        return operator(*arguments, **(options or {}))


@pytest.mark.parametrize("trained", ["lora_all", "full"])
def test_policies_give_the_same_gradients_and_keep_products_in_fp8_as_others(trained):
    found = {}
    for policy in ("none", "linear", "selective", "every 2", "full"):
        options = replace(PLAIN, trained=trained, tower=policy, language=policy)
        with Counted() as counted:
            loss, gradients, _ = step(options)
        found[policy] = loss, gradients, counted.products
    plain_loss, plain, products = found["none"]
    for loss, gradients, _ in found.values():
        assert torch.equal(loss, plain_loss) and gradients.keys() == plain.keys()
        assert all(torch.equal(gradients[name], plain[name]) for name in gradients)
    again = {policy: counted - products for policy, (_, _, counted) in found.items()}
    assert again == {"none": 0, "linear": 0, "selective": 8, "every 2": 6, "full": 12}


def test_both_layouts_give_the_same_gradients():
    _, both, model = step(PLAIN)
    assert any(m.transposed is not None for m in model.modules() if type(m) is Fp8StoredLinear)
    _, one, model = step(replace(PLAIN, store_transposed=False))
    assert all(m.transposed is None for m in model.modules() if type(m) is Fp8StoredLinear)
    assert all(torch.equal(both[name], one[name]) for name in both)
    lm = prepare_model(replace(PLAIN, trained="lora_lm"), build)
    held = [m for m in lm.modules() if type(m) is Fp8StoredLinear]
    # Nothing flows back through the tower, which is 32 wide.
    assert {m.in_features == 32 for m in held if m.transposed is None} == {True}
    assert not any(m.in_features == 32 for m in held if m.transposed is not None)


def test_what_fp8_needs_is_told_before_a_model_is_built(monkeypatch, words):
    config, odd = tiny_config(), tiny_config(ffn_hidden_size=104)
    fp8.require_fp8(PLAIN, config)
    fp8.require_fp8(replace(PLAIN, fp8=False), odd)
    with words.refused(ValueError, "ffn_hidden_size 104", "16"):
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


def test_rows_are_those_of_gelu_quantized():
    torch.manual_seed(0)
    x = (torch.randn(6, 96) * torch.logspace(-4, 2, 6)[:, None]).bfloat16()
    bias = torch.randn(96).bfloat16()
    x[2, 7] = float("nan")
    numbers, scale = gelu_and_quantize_rows(x, bias)
    found, wide = numbers.double() * scale.double(), gelu(x.double() + bias.double())
    assert not found[2].isfinite().any()
    found, wide = found[[0, 1, 3, 4, 5]], wide[[0, 1, 3, 4, 5]]
    largest = wide.abs().amax(-1, keepdim=True)
    assert ((found - wide).abs() <= (wide.abs() / 16).clamp(min=largest / 2e5)).all()


def test_a_frozen_tower_uses_it_and_computes_the_same(monkeypatch):
    for trained, compiled in (("lora_all", True), ("lora_lm", False), ("lm", True)):
        model = prepare_model(replace(PLAIN, trained=trained, compile=compiled), build)
        fuses = any(isinstance(m, FrozenTowerMLP) for m in model.modules())
        assert fuses == (trained == "lm")
    outputs = []
    for fused in (True, False):
        with monkeypatch.context() as patch:
            if not fused:
                rows = [row for row in implementations.TABLE if row.module is not visual.VisionMLP]
                patch.setattr(implementations, "TABLE", rows)
            model = prepare_model(replace(PLAIN, trained="lora_lm", compile=True), build)
        mlps = [m for m in model.modules() if isinstance(m, visual.VisionMLP)]
        assert mlps and all(isinstance(m, FrozenTowerMLP) is fused for m in mlps)
        with torch.no_grad():
            mlps[0].fc1.bias.fill_(0.5)
            x = torch.randn(1, 5, mlps[0].fc1.in_features, generator=torch.manual_seed(0))
            outputs.append(mlps[0](x.bfloat16()).float())
            compiled = torch.compile(mlps[0].forward, backend="aot_eager", fullgraph=True)
            assert torch.equal(compiled(x.bfloat16()).float(), outputs[-1])
    # fc2's input is not rounded to bf16 before it is quantized.
    assert outputs[1].norm() > 0 and (outputs[0] - outputs[1]).norm() / outputs[1].norm() < 0.03


@pytest.mark.parametrize(
    ("rows", "width", "computed"),
    [(33, 3072, 33), (33, 9216, 272), (256, 9216, 272), (272, 9216, 272), (300, 9216, 300)],
)
def test_rows_are_added_where_cublas_has_no_kernel_for_so_few(monkeypatch, rows, width, computed):
    torch.manual_seed(0)
    multiply, seen = torch._scaled_mm, []

    def noted(left, *given, **options):
        seen.append(len(left))
        return multiply(left, *given, **options)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    left, right = quantize_rows(torch.randn(rows, width)), quantize_rows(torch.randn(16, width))
    found = product(*left, *right, bias=torch.arange(16.0))
    exact = (left[0].float() * left[1]) @ (right[0].float() * right[1]).t() + torch.arange(16.0)
    assert seen == [computed] and found.shape == (rows, 16)
    torch.testing.assert_close(found.float(), exact, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("columns", "width"), [(4608, 4096), (27392, 4096), (4096, 13696), (64, 128)]
)
def test_the_parts_of_a_product_fill_the_gpu_and_none_is_empty(columns, width):
    parts = skinny_gemm.num_splits(columns, width, processors=132)
    size, blocks = skinny_gemm.k_blocks_per_split(width, parts), width // skinny_gemm.WIDTH
    assert (parts - 1) * size < blocks <= parts * size
    at_once = 2 * 132 // (columns // skinny_gemm.COLUMNS)
    assert parts == min(max(at_once, 1), blocks)


def test_the_frozen_tower_attends_as_torch_does_where_flash_attention_3_cannot(monkeypatch):
    model, use = build(), Use.training(replace(PLAIN, fp8=False, trained="lora_lm"))

    def is_used(**changes) -> bool:
        use_implementations(model, replace(use, **changes))
        return {type(each) for each in model.modules()}.isdisjoint({visual.Attention})

    with torch.no_grad():
        wanted = model(**batch()).logits
    assert not is_used() and "fa3-fwd is not" in flash_attention_3.find_fa3_problem()
    monkeypatch.setattr(flash_attention_3, "fault", lambda channels: None)
    model.config._attn_implementation = "eager"
    assert not is_used()
    model.config._attn_implementation = "sdpa"
    assert not is_used(trains_tower=True) and is_used()
    with torch.no_grad():  # on a CPU, and in fp32
        assert torch.equal(model(**batch()).logits, wanted)


@pytest.mark.gpu
def test_flash_attention_3_is_used_where_it_agrees_with_torchs():
    pytest.importorskip("fa3_fwd_interface", reason="fa3-fwd is missing: pip install fa3-fwd")
    if torch.cuda.get_device_capability() != flash_attention_3.HOPPER:
        pytest.skip("FlashAttention-3 is for Hopper GPUs")
    assert flash_attention_3.find_fa3_problem() is None
    query, key, value = torch.randn(2, 100, 3, 4, 112, device="cuda").bfloat16().unbind(2)
    heads = [each.transpose(1, 2).float() for each in (query, key, value)]
    exact = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)
    for attend in (flash_attention_3._attend, flash_attention_3._as_operator):
        assert (attend(query, key, value).float() - exact).norm() < 0.01 * exact.norm()
