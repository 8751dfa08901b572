"""Layers of a model that is only read, with kernels of their own."""

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from glm4v_patched.engine import fp8, reading
from glm4v_patched.engine.few_rows import Parts
from glm4v_patched.engine.fp8_activations import quantise_rows_of_swiglu
from glm4v_patched.engine.fp8_numbers import Quantised, quantise_rows
from glm4v_patched.engine.reading import (
    READ,
    ReadPatchEmbedding,
    ReadSelfAttention,
    ReadTowerLayer,
    ReadTowerMLP,
    attend_to_parts,
    in_parts,
    read_only,
)
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import (
    GLM4VForCausalLM,
    RMSNorm,
    RotaryEmbedding,
    SelfAttention,
    apply_rotary,
)
from glm4v_patched.remote.visual import PatchEmbedding, TransformerLayer
from tests.helpers.fp8 import apart, build
from tests.helpers.tiny import grown_image, pictures, text

if importlib.util.find_spec("triton"):  # which torch for a CPU does not bring
    from glm4v_patched.engine.few_rows_triton import sum_of_parts
    from glm4v_patched.engine.fp8_triton import activate
    from glm4v_patched.engine.reading_triton import add_norm, add_rms_norm, rotate_parts, write_one

SHALLOW_TOWER = {"num_hidden_layers": 2}


@pytest.mark.parametrize("has_triton", [True, False])
def test_a_model_on_a_cpu_computes_as_before_and_keeps_its_layers_without_triton(
    monkeypatch, has_triton
):
    model, rows = build().eval(), text(3) + grown_image() + text(4)
    given = {"input_ids": torch.tensor([rows]), "pixel_values": pictures(1)}
    with torch.no_grad():
        wanted = model(**given).logits
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: has_triton or None)
    read_only(model)
    kinds = {type(each) for each in model.modules()}
    assert kinds.isdisjoint(READ.values()) is not has_triton
    with torch.no_grad():
        assert torch.equal(model(**given).logits, wanted)


@pytest.mark.parametrize("has_kernels", [False, True])
@pytest.mark.parametrize("weights", [None, "fp8"])
def test_what_kernels_make_is_what_layers_take(monkeypatch, weights, has_kernels):
    """With plain steps in the place of the kernels."""

    def quantised(x: torch.Tensor) -> Quantised:
        return Quantised(*quantise_rows(x.flatten(0, -2))).reshape(*x.shape)

    def add_norm(x, norm, y, quantises):
        added = x + norm(y)
        return added, quantised(added) if quantises else added

    def add_rms_norm(x, norm, y, quantises):
        added = x if y is None else x + whole(y)
        return added, quantised(norm(added)) if quantises else norm(added)

    def rotate(heads, rotated_heads, cos, sin):
        heads[:, :, :rotated_heads] = apply_rotary(heads[:, :, :rotated_heads], cos, sin)

    def rotate_parts(heads, rotated_heads, cos, sin, channels):
        heads = whole(heads).unflatten(-1, (-1, channels))
        rotate(heads, rotated_heads, cos, sin)
        return heads

    def activate(x, function):
        gate, up = whole(x).chunk(2, dim=-1)
        return gelu(x) if function == "gelu" else silu(gate) * up

    def sum_of_parts(of, residual):
        return whole(of) + residual

    model, rows = build().eval().requires_grad_(False), text(3) + grown_image() + text(4)
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, RMSNorm)):  # all are ones, and one does for another
            nn.init.normal_(module.weight)
    if weights == "fp8":
        monkeypatch.setattr(fp8, "_on_cpu", True)
        fp8.hold_in_fp8(model, torch.device("cpu"))
    given = {"input_ids": torch.tensor([rows]), "pixel_values": pictures(1)}
    kernels = {
        "reading_triton": (add_norm, add_rms_norm, rotate, rotate_parts),
        "fp8_triton": (activate,),
        "few_rows_triton": (sum_of_parts,),
    }
    for name, functions in kernels.items():
        module: Any = ModuleType(name)
        vars(module).update({each.__name__: each for each in functions})
        monkeypatch.setitem(sys.modules, f"glm4v_patched.engine.{name}", module)
    with torch.no_grad():
        wanted = model(**given).logits
        monkeypatch.setattr(reading, "_takes", lambda x: isinstance(x, torch.Tensor))
        monkeypatch.setattr(reading, "_has_kernel", lambda layer: has_kernels)
        swiglu = lambda x: quantise_rows(activate(x, "swiglu").flatten(0, -2))  # noqa: E731
        monkeypatch.setattr(reading, "quantise_rows_of_swiglu", swiglu)
        products = []
        summed = lambda x, weight, parts: (x.float() @ weight.float().T)[None]  # noqa: E731
        noted = lambda *given: products.append(given) or summed(*given)  # noqa: E731
        monkeypatch.setattr(reading, "parts_of_product", noted)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
        read_only(model)
        assert {*READ.values()} - {*map(type, model.modules())} <= {ReadTowerMLP}
        found = model(**given).logits
    assert len(products) == has_kernels * 4 * model.config.num_layers
    # Sums in another order round differently, to 3 bits in fp8.
    assert torch.equal(found, wanted) or (has_kernels and apart(found, wanted) < 0.03)


def whole(x: torch.Tensor | Parts) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    total = x.parts.sum(0)
    if x.left_scale is not None:
        total = total * x.left_scale * x.right_scale.T
    if x.bias is not None:
        total = total + x.bias.float()
    return total.to(x.dtype).view(x.shape)


@pytest.mark.gpu
@pytest.mark.parametrize("in_fp32", [False, True])
def test_heads_are_rotated_in_place_bit_for_bit_and_values_stay(in_fp32):
    config = ChatGLMConfig(rope_in_fp32=in_fp32, num_layers=1)
    with torch.device("cuda"):
        attention, angles = SelfAttention(config, 0), RotaryEmbedding(config)
        heads = torch.randn(2, 100, 36, 128).bfloat16()
        cos, sin = angles(torch.randint(0, 8000, (2, 100)), torch.bfloat16)
    attention.__class__ = ReadSelfAttention
    wanted = apply_rotary(heads[:, :, :34], cos, sin).split((32, 2), dim=2)
    value = heads[:, :, 34:].clone()
    with torch.no_grad():
        found = attention.rotate(heads, cos, sin)
    assert found[0].data_ptr() == heads.data_ptr()
    for one, other in zip(found, (*wanted, value), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [None, "fp8"])
def test_a_model_on_a_gpu_reads_and_draws_as_before(weights):
    torch.manual_seed(0)
    config = ChatGLMConfig(num_layers=2, seq_length=2048, vision_config=SHALLOW_TOWER)
    config._attn_implementation = "sdpa"
    with torch.device("cuda"):
        model = GLM4VForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    model.requires_grad_(False)
    if weights == "fp8":
        fp8.hold_in_fp8(model, torch.device("cuda"))
    begin, end, filling = config.boi_token_id, config.eoi_token_id, config.pad_token_id
    ids = torch.tensor([[begin, filling, end, 7, 8, 9], [7, 8, 9, 7, 8, 9]], device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    given["pixel_values"] = torch.randn(1, 3, 1120, 1120, device="cuda").bfloat16()

    def logits() -> tuple[torch.Tensor, ...]:
        """Of 8 tokens that are prescribed, so that both models are asked the same."""
        return model.generate(
            **given, cache_implementation="static", disable_compile=True, output_logits=True,
            return_dict_in_generate=True, prefix_allowed_tokens_fn=lambda _, ids: [100 + len(ids)],
        ).logits  # fmt: skip

    wanted = logits()
    read_only(model)
    kinds = {type(each) for each in model.modules()}
    assert {*READ.values()} - kinds == ({ReadTowerMLP} if weights else set())
    for found, before in zip(logits(), wanted, strict=True):
        assert apart(found, before) < (0.05 if weights else 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("batch, keys", [(1, 2048), (3, 129), (32, 1792)])
@pytest.mark.parametrize("heads, channels", [(32, 128), (4, 16)])
def test_one_query_attends_where_its_mask_lets_it(batch, keys, heads, channels):
    torch.manual_seed(0)
    made: dict = {"device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(batch, 1, heads + 4, channels, **made)[:, :, :heads].transpose(1, 2)
    key, value = (torch.randn(batch, 2, keys, channels, **made) for _ in range(2))
    mask = torch.rand(batch, 1, 1, keys, device="cuda") > 0.3
    mask[..., 0], mask[..., keys - 70 :] = True, False  # some blocks have nothing to see
    for given in (mask, mask[:1]):
        with torch.no_grad():
            found = attend_to_parts(query, key, value, given)
        exact = scaled_dot_product_attention(
            query.float(), key.float(), value.float(), attn_mask=given, enable_gqa=True
        )
        assert apart(found, exact.transpose(1, 2).flatten(2)) < 0.005


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 300])
def test_sums_and_their_norms_are_torchs_and_quantised_alike(rows):
    torch.manual_seed(0)
    made: dict = {"device": "cuda", "dtype": torch.bfloat16}
    x, y = torch.randn(2, rows, 4096, **made), torch.randn(2, rows, 4096, **made)
    norm = RMSNorm(4096, 1e-5).to(**made)
    nn.init.normal_(norm.weight)
    with torch.no_grad():
        for other, wanted in ((y, x + y), (None, x)):
            added, normed = add_rms_norm(x, norm, other, False)
            assert torch.equal(added, wanted)
            assert (normed != norm(wanted)).float().mean() < 0.01
            again, quantised = add_rms_norm(x, norm, other, True)
            assert torch.equal(again, added)
            assert_quantised(quantised, normed)


@pytest.mark.gpu
@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("rows", [1, 16])
def test_a_product_in_parts_is_summed_by_what_takes_it(rows, is_held):
    torch.manual_seed(0)
    made: dict = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(rows, 1, 4096, **made)

    def product(out: int) -> tuple[Parts, torch.Tensor]:
        linear: Any = nn.Linear(4096, out, **made).requires_grad_(False)
        exact = x.double() @ linear.weight.double().T + linear.bias.double()
        if is_held:
            fp8._hold(linear, keeps_transposed=False)
        parts = in_parts(linear, x)
        assert isinstance(parts, Parts) and apart(whole(parts), exact) < (0.05 if is_held else 0.01)
        return parts, whole(parts)

    def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
        # Sums in another order round differently, in few places.
        assert found.shape == wanted.shape and (found != wanted).float().mean() < 0.02
        assert torch.allclose(found, wanted, rtol=2**-7, atol=2**-7)

    norm = RMSNorm(4096, 1e-5).to(**made)
    nn.init.normal_(norm.weight)
    with torch.no_grad():
        parts, wanted = product(4096)
        assert_near(sum_of_parts(parts), wanted)
        assert_near(sum_of_parts(parts, x), wanted + x)
        added, normed = add_rms_norm(x, norm, parts, False)
        assert_near(added, wanted + x)
        assert_near(normed, norm(added))
        assert_quantised(add_rms_norm(x, norm, parts, True)[1], normed)
        parts, wanted = product(4608)
        cos, sin = RotaryEmbedding(ChatGLMConfig()).cuda()(
            torch.randint(0, 8000, (rows, 1), device="cuda"), torch.bfloat16
        )
        heads = wanted.unflatten(-1, (-1, 128))
        wanted = torch.cat((apply_rotary(heads[:, :, :34], cos, sin), heads[:, :, 34:]), dim=2)
        assert_near(rotate_parts(parts, 34, cos, sin, 128), wanted)
        parts, wanted = product(2 * 13696)
        gate, up = wanted.chunk(2, dim=-1)
        assert_near(activate(parts, "swiglu"), silu(gate) * up)
        numbers, scale = quantise_rows_of_swiglu(parts)
        assert apart(numbers.float() * scale, (silu(gate) * up).flatten(0, 1).double()) < 0.04


@pytest.mark.gpu
@pytest.mark.parametrize("batch, groups", [(1, 2), (3, 2), (70, 2), (5, 1)])
def test_one_key_of_each_row_is_written_and_counted(batch, groups):
    torch.manual_seed(0)
    with torch.device("cuda"):
        keys, values = torch.zeros(2, batch, groups, 9, 128).bfloat16()
        heads = torch.randn(batch, 1, 2 * groups + 3, 128).bfloat16().transpose(1, 2)
        key, value, length = heads[:, 3 : 3 + groups], heads[:, 3 + groups :], torch.tensor(3)
    write_one(keys, values, length, key, value)
    assert length.item() == 4
    for kept, new in ((keys, key), (values, value)):
        assert torch.equal(kept[:, :, 3:4], new) and kept.count_nonzero() == new.count_nonzero()
    length.fill_(9)  # no room is left: nothing is written beyond
    before = keys.clone()
    write_one(keys, values, length, key, value)
    assert torch.equal(keys, before)


@pytest.mark.gpu
def test_gelu_and_swiglu_are_torchs():
    torch.manual_seed(0)
    x = torch.randn(2, 300, 6000, device="cuda").mul(3).bfloat16()
    gate, up = x.chunk(2, dim=-1)
    for wanted, found in ((silu(gate) * up, activate(x, "swiglu")), (gelu(x), activate(x, "gelu"))):
        # Beyond, torch's GELU has the error of its own of 1 + erf.
        differs = (found != wanted)[wanted.abs() > 1e-3]
        assert differs.float().mean() < 0.005
        assert torch.allclose(found, wanted, rtol=2**-7, atol=1e-6)


@pytest.mark.gpu
def test_a_layer_of_the_tower_normalises_and_adds_as_torch_does():
    torch.manual_seed(0)
    config = ChatGLMConfig(num_layers=1)
    config._attn_implementation = "sdpa"
    with torch.device("cuda"):
        layer = TransformerLayer(config).bfloat16()
        x = torch.randn(2, 100, 1792).bfloat16()
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    with torch.no_grad():
        wanted = layer(x)
        layer.__class__ = ReadTowerLayer
        found = layer(x)
        added, quantised = add_norm(x, layer.input_layernorm, found, True)
    # Sums in another order change what is rounded, in few places.
    assert (found != wanted).float().mean() < 0.01
    assert torch.allclose(found, wanted, rtol=2**-7, atol=2**-6)
    assert torch.equal(add_norm(x, layer.input_layernorm, found, False)[1], added)
    assert_quantised(quantised, added)


@pytest.mark.gpu
def test_patches_are_multiplied_as_they_are_convolved():
    torch.manual_seed(0)
    with torch.device("cuda"):
        embedding = PatchEmbedding(ChatGLMConfig(num_layers=1))
        pixels = torch.randn(2, 3, 1120, 1120).bfloat16()
    embedding.bfloat16()
    with torch.no_grad():
        wanted = embedding(pixels)
        embedding.__class__ = ReadPatchEmbedding
        assert apart(embedding(pixels), wanted) < 0.005


def assert_quantised(found: Quantised, of: torch.Tensor) -> None:
    numbers, scale = quantise_rows(of.flatten(0, -2))
    assert torch.equal(found.scale.flatten(0, -2), scale)
    assert torch.equal(found.numbers.flatten(0, -2).view(torch.uint8), numbers.view(torch.uint8))
