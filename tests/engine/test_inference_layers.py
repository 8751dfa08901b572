"""Layers of a model that is only read, with kernels of their own."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from glm4v_patched.engine import fp8
from glm4v_patched.engine.implementations import (
    CLASSES,
    INFERENCE,
    TABLE,
    Use,
    become,
    use_implementations,
)
from glm4v_patched.engine.kernels import inference_layers, skinny_gemm
from glm4v_patched.engine.kernels.fp8_linear import Fp8StoredLinear
from glm4v_patched.engine.kernels.fp8_matmul import Quantized, quantize_rows
from glm4v_patched.engine.kernels.inference_layers import (
    InferencePatchEmbedding,
    InferenceSelfAttention,
    InferenceTowerLayer,
    InferenceTowerMLP,
    in_parts,
)
from glm4v_patched.engine.kernels.reference import reduced
from glm4v_patched.engine.kernels.skinny_gemm import Parts
from glm4v_patched.inference.decoding.loop import decode_without_sync
from glm4v_patched.inference.decoding.static_cache import StaticCaches
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.keywords import CACHE_KEYWORD
from glm4v_patched.remote.modeling_chatglm import (
    GLM4VForCausalLM,
    RMSNorm,
    RotaryEmbedding,
    SelfAttention,
    apply_rotary,
)
from glm4v_patched.remote.visual import PatchEmbedding, TransformerLayer
from tests.helpers.fp8 import FP8_ALONE, apart, build
from tests.helpers.plain_kernels import put_in_the_place_of_kernels
from tests.helpers.tiny import expanded_image, random_pixels, text

if importlib.util.find_spec("triton"):  # which torch for a CPU does not bring
    from glm4v_patched.engine.kernels import fp8_triton
    from glm4v_patched.engine.kernels.fp8_triton import activate
    from glm4v_patched.engine.kernels.inference_triton import (
        layer_norm_add,
        add_rms_norm,
        flash_decode,
        rope_and_update_cache,
    )
    from glm4v_patched.engine.kernels.skinny_gemm_triton import split_k_matmul, reduce_partials

SHALLOW_TOWER = {"num_hidden_layers": 2}
PROCESSORS = 132  # of an H100 and an H200
OF_INFERENCE = {CLASSES[row.implementation] for row in TABLE if row.purposes == (INFERENCE,)}


@pytest.mark.parametrize("has_triton", [True, False])
def test_a_model_on_a_cpu_computes_as_before_and_keeps_its_layers_without_triton(
    monkeypatch, has_triton
):
    model, rows = build().eval(), text(3) + expanded_image() + text(4)
    given = {"input_ids": torch.tensor([rows]), "pixel_values": random_pixels(1)}
    with torch.no_grad():
        wanted = model(**given).logits
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: has_triton or None)
    use_implementations(model, Use.inference())
    kinds = {type(each) for each in model.modules()}
    assert kinds.isdisjoint(OF_INFERENCE) is not has_triton
    with torch.no_grad():
        assert torch.equal(model(**given).logits, wanted)


@pytest.mark.parametrize("has_products", [False, True])
@pytest.mark.parametrize("weights", [None, "fp8"])
def test_what_kernels_make_is_what_layers_take(monkeypatch, weights, has_products):
    """With plain steps in the place of the kernels, where a prompt is read and an id is drawn."""
    model, rows = build().eval().requires_grad_(False), text(20) + expanded_image() + text(4)
    for module in model.modules():  # all are ones or zeros, and one does for another
        if isinstance(module, (nn.LayerNorm, RMSNorm)):
            nn.init.normal_(module.weight)
        if getattr(module, "bias", None) is not None:
            nn.init.normal_(module.bias)
    if weights == "fp8":
        monkeypatch.setattr(fp8, "_allow_cpu", True)
        use_implementations(model, FP8_ALONE)

    def logits() -> list[torch.Tensor]:
        cache = StaticCache(config=model.config, max_cache_len=64)
        given = {"input_ids": torch.tensor([rows, rows]), "pixel_values": random_pixels(2)}
        read = model(**given, past_key_values=cache).logits
        drawn, mask = [read], torch.ones(2, len(rows) + 1, dtype=torch.long)
        for ids in ([[7], [8]], [[3, 4], [5, 6]]):
            given = {"input_ids": torch.tensor(ids), "attention_mask": mask}
            drawn.append(model(**given, past_key_values=cache).logits)
            mask = torch.cat((mask, mask[:, :2]), dim=1)
        return drawn

    layers = model.config.num_layers
    with torch.no_grad():
        wanted = logits()
        calls = put_in_the_place_of_kernels(monkeypatch, model, has_products)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
        use_implementations(model, Use.inference())
        assert OF_INFERENCE - {*map(type, model.modules())} <= {CLASSES[InferenceTowerMLP]}
        found = logits()
    # Of one id; of two, where only layers in fp8 and the MLP are asked; not of the prompt's rows.
    a_layer = 8 if weights else 6 if inference_layers.HAS_COUNTERS else 4
    assert calls.count("split_k_matmul") == has_products * layers * a_layer
    assert calls.count("flash_decode") == inference_layers.HAS_COUNTERS * layers
    assert calls.count("layer_norm_add") == 2 * model.config.vision.num_hidden_layers
    # A block's input is normalized where it is made, but for the first block's.
    assert calls.count("add_rms_norm") == 3 * 2 * layers
    for one, other in zip(found, wanted, strict=True):
        # Sums in another order round differently, to 3 bits in fp8.
        assert torch.equal(one, other) or apart(one, other) < 0.03


def read_model(monkeypatch, weights: str | None = None) -> Any:
    """In bf16 or, but for the kernels of inference, in fp8."""
    model = build().eval().requires_grad_(False)
    if weights == "fp8":
        monkeypatch.setattr(fp8, "_allow_cpu", True)
        use_implementations(model, FP8_ALONE)
    return model


def drawn(model: nn.Module) -> torch.Tensor:
    """Logits of a text with an image and of an id behind it."""
    cache = StaticCache(config=model.config, max_cache_len=32)
    ids = torch.tensor([text(3) + expanded_image() + text(5)])
    with torch.no_grad():
        read = model(ids[:, :-1], pixel_values=random_pixels(1), past_key_values=cache).logits
        last = model(ids[:, -1:], torch.ones_like(ids), past_key_values=cache).logits
    return torch.cat((read, last), dim=1)


def put(monkeypatch, model: nn.Module) -> None:
    put_in_the_place_of_kernels(monkeypatch, model, True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    use_implementations(model, Use.inference())


NORMS = "input_layernorm", "post_attention_layernorm"
OF_BLOCK = "self_attention", "self_attention.query_key_value", "mlp", "mlp.dense_4h_to_h", *NORMS
OF_TOWER = "attention", "mlp", "mlp.fc1", "mlp.activation_fn", "mlp.fc2", *NORMS
HOOKED = [
    "transformer.encoder.layers.0",
    *(f"transformer.encoder.layers.0.{name}" for name in OF_BLOCK),
    *(f"transformer.vision.transformer.layers.0.{name}" for name in OF_TOWER),
    "transformer.vision.patch_embedding.proj",
]
OTHERS = [
    *(f"transformer.encoder.layers.0{name}" for name in ("", ".mlp", ".self_attention")),
    "transformer.encoder.layers.0.post_attention_layernorm",
    "transformer.vision.transformer.layers.0.input_layernorm",
]


@pytest.mark.parametrize("weights", [None, "fp8"])
@pytest.mark.parametrize("name", HOOKED)
def test_hooks_see_and_change_what_goes_in_and_out(monkeypatch, name, weights):
    model = read_model(monkeypatch, weights)
    seen: list[type] = []
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def hook(module, given, out):
        seen.extend(map(type, (given[0], out)))
        kept.append((out.add_(1.0), out.clone()))
        return out

    hooked = model.get_submodule(name)
    handle = hooked.register_forward_hook(hook)
    wanted = drawn(model)
    handle.remove()
    put(monkeypatch, model)
    hooked.register_forward_hook(hook)  # they are looked for in every call
    assert apart(drawn(model), wanted) < 0.02
    assert {*seen} == {torch.Tensor}
    assert all(torch.equal(out, as_it_was) for out, as_it_was in kept)


@pytest.mark.skipif(not inference_layers.HAS_COUNTERS, reason="install transformers 5.4 or newer")
def test_masks_and_caches_that_kernels_do_not_take_are_torchs_to_attend_to(monkeypatch):
    model = build().eval().requires_grad_(False)
    put(monkeypatch, model)
    cache = StaticCache(config=model.config, max_cache_len=16)
    attention = model.transformer.encoder.layers[0].self_attention
    heads = attention.num_key_value_groups * attention.split_sizes[1]
    x, fills = torch.zeros(3, 1, model.config.hidden_size, dtype=model.dtype), (False, ())
    shape = 3, attention.split_sizes[1], 4, attention.head_dim
    cache.update(*torch.zeros(2, *shape, dtype=model.dtype), 0)

    def kept(*shape, x=x, fills=fills, dtype=torch.bool):
        return attention._kept(x, torch.ones(shape, dtype=dtype), cache, fills)

    with torch.no_grad():
        assert kept(3, 1, 1, 16) is kept(1, 1, 1, 16) is cache.layers[0]
        for other in ((3, 1, 1, 15), (2, 1, 1, 16), (3, heads, 1, 16), (3, 1, 2, 16), (3, 16)):
            assert kept(*other) is None
        assert kept(1, 1, 1, 16, dtype=torch.float32) is attention._kept(x, None, cache, fills)
        assert kept(1, 1, 1, 16, x=x.half()) is kept(1, 1, 1, 16, x=x.expand(3, 2, -1)) is None
        assert kept(1, 1, 1, 16, fills=(True, ())) is None
        cache.offloading = True  # its update copies keys to the device
        assert kept(1, 1, 1, 16) is None


def test_heads_that_kernels_do_not_take_are_rotated_by_torch(monkeypatch):
    model = build().eval().requires_grad_(False)
    wanted = drawn(model)
    calls = put_in_the_place_of_kernels(monkeypatch, model, True)
    monkeypatch.setattr(inference_layers, "SUPPORTED_HEAD_DIMS", ())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    use_implementations(model, Use.inference())
    assert apart(drawn(model), wanted) < 0.02
    assert "add_rms_norm" in calls and {"rotate", "rope_and_update_cache"}.isdisjoint(calls)


class Wrapper(nn.Module):
    """An adapter around a module, that has no names of what it wraps."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *given):
        return 2 * self.inner(*given)


def become_another(module: Any) -> None:
    kind: Any = type(module)
    twice = {"forward": lambda self, x, *more: kind.forward(self, 2 * x, *more) * 2}
    module.__class__ = type("Other", (kind,), twice)


@pytest.mark.parametrize("weights", [None, "fp8"])
@pytest.mark.parametrize(
    ("name", "is_wrapped"),
    [
        *((name, False) for name in OTHERS),
        *((f"{OTHERS[0]}.{name}", True) for name in ("self_attention", "mlp", *NORMS)),
    ],
)
def test_other_classes_and_wrapped_modules_compute_as_before(
    monkeypatch, name, is_wrapped, weights
):
    """As adapters put them there."""
    model = read_model(monkeypatch, weights)
    module = model.get_submodule(name)
    if is_wrapped:
        model.set_submodule(name, Wrapper(module))
    else:
        become_another(module)
    wanted = drawn(model)
    put(monkeypatch, model)
    assert apart(drawn(model), wanted) < 0.02


def test_weights_in_fewer_bytes_are_their_packages_to_multiply(monkeypatch):
    class Packed(nn.Parameter):
        """A package's, which says that it is of a float dtype, and holds no such numbers."""

    model = build().eval().requires_grad_(False)
    linear = model.transformer.encoder.layers[0].mlp.dense_h_to_4h
    linear.weight = Packed(linear.weight, requires_grad=False)
    put(monkeypatch, model)
    calls: list = []
    monkeypatch.setattr(skinny_gemm, "is_supported", lambda rows, weight: calls.append(weight) or True)
    drawn(model)
    assert calls and linear.weight not in {*calls}


@pytest.mark.gpu
@pytest.mark.parametrize("in_fp32", [False, True])
def test_heads_are_rotated_in_place_bit_for_bit_and_values_stay(in_fp32):
    config = ChatGLMConfig(rope_in_fp32=in_fp32, num_layers=1)
    with torch.device("cuda"):
        attention, angles = SelfAttention(config, 0), RotaryEmbedding(config)
        heads = torch.randn(2, 100, 36, 128).bfloat16()
        cos, sin = angles(torch.randint(0, 8000, (2, 100)), torch.bfloat16)
    become(attention, InferenceSelfAttention)
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

    exact = logits()
    if weights == "fp8":
        use_implementations(model, FP8_ALONE)
    before = logits()
    use_implementations(model, Use.inference())
    kinds = {type(each) for each in model.modules()}
    assert OF_INFERENCE - kinds == ({CLASSES[InferenceTowerMLP]} if weights else set())
    for found, was, wanted in zip(logits(), before, exact, strict=True):
        # In fp8 two ways of rounding are as far from each other as each is from bf16.
        assert apart(found, wanted) < (1.1 * apart(was, wanted) if weights else 0.02)

    given |= {"eos_token_id": None, "pad_token_id": filling, "max_new_tokens": 24}
    recorded = model.generate(**given, **StaticCaches(model, 64).generate_kwargs(2, 1664))
    kept = {CACHE_KEYWORD: StaticCache(config=config, max_cache_len=1664)}
    unrecorded = {"custom_generate": decode_without_sync, "decode_step": model.__call__}
    assert torch.equal(recorded, model.generate(**given, **kept, **unrecorded))


@pytest.mark.gpu
@pytest.mark.parametrize("batch, room, filled", [(1, 2048, 1977), (3, 129, 128), (32, 1792, 1650)])
@pytest.mark.parametrize("queries, groups, channels", [(32, 2, 128), (4, 4, 16)])
@pytest.mark.parametrize("in_fp32", [False, True])
def test_one_id_of_each_row_is_kept_and_attends_where_its_mask_lets_it(
    batch, room, filled, queries, groups, channels, in_fp32
):
    torch.manual_seed(0)
    config = ChatGLMConfig(rope_in_fp32=in_fp32, num_layers=1, kv_channels=channels)
    sizes = queries, groups, groups
    with torch.device("cuda"):
        kept = StaticLayer(max_cache_len=room)
        some = torch.randn(batch, groups, filled, channels).bfloat16()
        kept.update(some, some.flip(1))
        heads = torch.randn(batch, 1, sum(sizes), channels).bfloat16()
        angles = RotaryEmbedding(config)(torch.randint(0, 8000, (batch, 1)), torch.bfloat16)
        mask = torch.rand(batch, 1, 1, room) > 0.3
    mask[..., 0], mask[..., filled - 70 : filled - 3] = True, False  # a block has nothing to see
    mask[..., filled + 1 :] = False
    turned = apply_rotary(heads[:, :, : queries + groups], *angles).transpose(1, 2)
    keys, values = kept.keys.clone(), kept.values.clone()
    keys[:, :, filled : filled + 1] = turned[:, queries:]
    values[:, :, filled : filled + 1] = heads[:, :, queries + groups :].transpose(1, 2)
    for given in (mask, mask[:1]):
        for quantizes in (False, True):
            kept.cumulative_length.fill_(filled)
            query = rope_and_update_cache(heads.flatten(2), sizes, *angles, kept)
            assert torch.equal(query, turned[:, :queries, 0])
            assert torch.equal(kept.keys, keys) and torch.equal(kept.values, values)
            found: Any = flash_decode(query, kept, given, quantizes)
            assert kept.cumulative_length.item() == filled + 1
            exact = scaled_dot_product_attention(
                query[:, :, None].float(), keys.float(), values.float(), given, enable_gqa=True
            )
            exact = exact.transpose(1, 2).flatten(2)
            if quantizes:
                numbers = found.numbers.unflatten(2, (queries, channels)).float()
                found = (numbers * found.scale[..., None]).flatten(2)
            assert apart(found, exact) < (0.04 if quantizes else 0.005)
    kept.cumulative_length.fill_(room)  # no room is left: nothing is written beyond
    rope_and_update_cache(heads.flatten(2), sizes, *angles, kept)
    assert torch.equal(kept.keys, keys) and torch.equal(kept.values, values)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 300])
def test_sums_and_their_norms_are_torchs_and_quantized_alike(rows):
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
            again, quantized = add_rms_norm(x, norm, other, True)
            assert torch.equal(again, added)
            assert_quantized(quantized, normed)


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
            become(linear, Fp8StoredLinear)
            linear.quantize_weight(stores_transposed=False)
        parts = in_parts(linear, x)
        assert isinstance(parts, Parts) and apart(reduced(parts), exact) < (
            0.05 if is_held else 0.01
        )
        return parts, reduced(parts)

    def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
        # Sums in another order round differently, in few places.
        assert found.shape == wanted.shape and (found != wanted).float().mean() < 0.02
        assert torch.allclose(found, wanted, rtol=2**-7, atol=2**-7)

    norm = RMSNorm(4096, 1e-5).to(**made)
    nn.init.normal_(norm.weight)
    with torch.no_grad():
        parts, wanted = product(4096)
        assert_near(reduce_partials(parts), wanted)
        assert_near(reduce_partials(parts, x), wanted + x)
        added, normed = add_rms_norm(x, norm, parts, False)
        assert_near(added, wanted + x)
        assert_near(normed, norm(added))
        assert_quantized(add_rms_norm(x, norm, parts, True)[1], normed)
        parts, wanted = product(4608)
        kept = [StaticLayer(max_cache_len=9) for _ in range(2)]
        for each in kept:
            each.lazy_initialization(*torch.zeros(2, rows, 2, 1, 128, **made))
        position = torch.randint(0, 8000, (rows, 1), device="cuda")
        angles = RotaryEmbedding(ChatGLMConfig()).cuda()(position, torch.bfloat16)
        turned, plain = (
            rope_and_update_cache(each, (32, 2, 2), *angles, to)
            for each, to in zip((parts, wanted), kept, strict=True)
        )
        assert_near(turned, plain)
        assert kept[1].keys.any() and kept[1].values.any()
        assert_near(kept[0].keys, kept[1].keys)
        assert_near(kept[0].values, kept[1].values)
        parts, wanted = product(2 * 13696)
        gate, up = wanted.chunk(2, dim=-1)
        assert_near(activate(parts, "swiglu"), silu(gate) * up)
        exact = silu(gate.float()) * up.float()
        for group in (None, 3456):
            numbers, scale = fp8_triton.quantize_rows(parts, None, "swiglu", group)
            assert scale.shape == (rows, 1 if group is None else 4)
            for i, some in enumerate(exact.flatten(0, 1).split(group or 13696, dim=1)):
                quantized = Quantized(
                    numbers[:, i * 3456 :][:, : some.shape[1]], scale[:, i : i + 1]
                )
                assert_quantized(quantized, some)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("columns", "width"), [(4608, 4096), (27392, 4096), (4096, 13696), (64, 128), (128, 640)]
)
def test_the_kernel_gives_the_product_of_few_rows(rows, dtype, columns, width):
    torch.manual_seed(0)
    x = torch.randn(rows, width, device="cuda").to(dtype)
    weight = torch.randn(columns, width, device="cuda").to(dtype)
    for groups in (
        {1, width // 128, skinny_gemm.num_splits(columns, width, PROCESSORS)}
        if dtype.itemsize == 1
        else (0,)
    ):
        scales, scaled = None, x.double()
        if groups:
            scales = torch.rand(rows, groups, device="cuda") + 0.5
            size = skinny_gemm.k_blocks_per_split(width, groups) * 128
            scaled = scaled * scales.repeat_interleave(size, dim=1)[:, :width]
        found = split_k_matmul(x, weight, scales).sum(0)
        # Tensor cores sum products of fp8 to 14 bits.
        close = 1e-3 if groups else 1e-4
        assert apart(found, scaled @ weight.double().T) < close


@pytest.mark.gpu
def test_the_kernel_of_few_rows_refuses_other_sizes():
    x, weight = (torch.randn(size, 128, device="cuda").bfloat16() for size in (33, 64))
    with pytest.raises(ValueError, match=r"\(33, 128\).*at most 32 rows"):
        split_k_matmul(x, weight)
    with pytest.raises(
        ValueError, match="3 scales for each row of 128 channels: expected 1, 1 or 1"
    ):
        split_k_matmul(x[:2], weight, torch.ones(2, 3, device="cuda"))


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
def test_a_layer_of_the_tower_normalizes_and_adds_as_torch_does():
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
        become(layer, InferenceTowerLayer)
        found = layer(x)
        added, quantized = layer_norm_add(x, layer.input_layernorm, found, True)
    # Sums in another order change what is rounded, in few places.
    assert (found != wanted).float().mean() < 0.01
    assert torch.allclose(found, wanted, rtol=2**-7, atol=2**-6)
    assert torch.equal(layer_norm_add(x, layer.input_layernorm, found, False)[1], added)
    assert_quantized(quantized, added)


@pytest.mark.gpu
def test_patches_are_multiplied_as_they_are_convolved():
    torch.manual_seed(0)
    with torch.device("cuda"):
        embedding = PatchEmbedding(ChatGLMConfig(num_layers=1))
        pixels = torch.randn(2, 3, 1120, 1120).bfloat16()
    embedding.bfloat16()
    with torch.no_grad():
        wanted = embedding(pixels)
        become(embedding, InferencePatchEmbedding)
        assert apart(embedding(pixels), wanted) < 0.005


def assert_quantized(found: Quantized, of: torch.Tensor) -> None:
    """Nearly as :func:`quantize_rows` does it: at most the last bit differs, in few places."""
    rows = of.flatten(0, -2).double()
    numbers, scale = quantize_rows(of.flatten(0, -2))
    assert torch.allclose(found.scale.view_as(scale), scale, rtol=0.02)
    given = found.numbers.float().view_as(rows) * found.scale.view_as(scale)
    assert apart(given, rows) < 1.01 * apart(numbers.float() * scale, rows)
