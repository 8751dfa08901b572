"""Inference layers and their kernels."""

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from glm4v_patched.engine import fp8
from glm4v_patched.engine.implementations import (
    GUARDED_CLASSES,
    IMPLEMENTATIONS,
    INFERENCE,
    TRAINING,
    ModelUsage,
    set_implementation,
    use_implementations,
)
from glm4v_patched.engine.kernels import inference_layers, reference, skinny_gemm
from glm4v_patched.engine.kernels.fp8_linear import Fp8StoredLinear
from glm4v_patched.engine.kernels.fp8_matmul import Fp8Tensor, quantize_rows
from glm4v_patched.engine.kernels.inference_layers import (
    InferencePatchEmbedding,
    InferenceSelfAttention,
    InferenceTowerLayer,
    InferenceTowerMLP,
    linear_or_partials,
)
from glm4v_patched.engine.kernels.reference import to_tensor
from glm4v_patched.engine.kernels.skinny_gemm import SplitKPartials
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
from tests.helpers.fp8 import apart, build
from tests.helpers.tiny import expanded_image, random_pixels, text

if importlib.util.find_spec("triton"):  # torch's CPU builds do not include it
    from glm4v_patched.engine.kernels import fp8_triton
    from glm4v_patched.engine.kernels.fp8_triton import activate
    from glm4v_patched.engine.kernels.inference_triton import (
        add_rms_norm,
        flash_decode,
        layer_norm_add,
        rope_and_update_cache,
    )
    from glm4v_patched.engine.kernels.skinny_gemm_triton import reduce_partials, split_k_matmul

# As in inference, except for the kernels.
FP8_ALONE = ModelUsage(purpose=TRAINING, fp8=True, stores_fp8=True, has_fused_quantization=True)
KERNELS = {
    "inference_triton": (
        "layer_norm_add",
        "add_rms_norm",
        "rope_in_place",
        "rope_and_update_cache",
        "flash_decode",
    ),
    "fp8_triton": ("activate", "activate_and_quantize_rows"),
    "skinny_gemm_triton": ("reduce_partials", "split_k_matmul"),
}
SHALLOW_TOWER = {"num_hidden_layers": 2}
NUM_SMS = 132  # of an H100 and an H200
INFERENCE_CLASSES = {
    GUARDED_CLASSES[entry.implementation]
    for entry in IMPLEMENTATIONS
    if entry.purposes == (INFERENCE,)
}


@pytest.mark.parametrize("has_triton", [True, False])
def test_a_model_on_a_cpu_computes_the_same_and_keeps_its_classes_without_triton(
    monkeypatch, has_triton
):
    model, ids = build().eval(), text(3) + expanded_image() + text(4)
    inputs = {"input_ids": torch.tensor([ids]), "pixel_values": random_pixels(1)}
    with torch.no_grad():
        expected = model(**inputs).logits
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: has_triton or None)
    use_implementations(model, ModelUsage.inference())
    classes = {type(module) for module in model.modules()}
    assert classes.isdisjoint(INFERENCE_CLASSES) is not has_triton
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize("has_skinny_gemm", [False, True])
@pytest.mark.parametrize(
    ("weights", "neighbors"), [(None, True), ("fp8", True), (None, False), ("fp8", False)]
)
def test_inference_layers_with_reference_kernels_compute_the_same_logits(
    monkeypatch, weights, neighbors, has_skinny_gemm
):
    """With the reference kernels, in prefill and in decode steps."""
    model, ids = inference_model(monkeypatch, weights), text(20) + expanded_image() + text(4)
    model.config.original_rope = neighbors

    def logits() -> list[torch.Tensor]:
        cache = StaticCache(config=model.config, max_cache_len=64)
        inputs = {"input_ids": torch.tensor([ids, ids]), "pixel_values": random_pixels(2)}
        outputs = [model(**inputs, past_key_values=cache).logits]
        mask = torch.ones(2, len(ids) + 1, dtype=torch.long)
        for new_ids in ([[7], [8]], [[3, 4], [5, 6]]):
            inputs = {"input_ids": torch.tensor(new_ids), "attention_mask": mask}
            outputs.append(model(**inputs, past_key_values=cache).logits)
            mask = torch.cat((mask, mask[:, :2]), dim=1)
        return outputs

    layers = model.config.num_layers
    with torch.no_grad():
        expected = logits()
        calls = use_reference_kernels(monkeypatch, model, has_skinny_gemm)
        assert INFERENCE_CLASSES - {*map(type, model.modules())} <= {
            GUARDED_CLASSES[InferenceTowerMLP]
        }
        actual = logits()
    # Skinny GEMMs: in the step of one token all, in the step of two those of fp8 and of the MLP, in
    # prefill none.
    per_layer = 8 if weights else 6 if inference_layers.HAS_CUMULATIVE_LENGTH else 4
    assert calls.count("split_k_matmul") == has_skinny_gemm * layers * per_layer
    assert calls.count("flash_decode") == inference_layers.HAS_CUMULATIVE_LENGTH * layers
    assert calls.count("layer_norm_add") == 2 * model.config.vision.num_hidden_layers
    # The previous block normalizes a block's input, except the first block's.
    assert calls.count("add_rms_norm") == 3 * 2 * layers
    for out, exact in zip(actual, expected, strict=True):
        # Sums in another order round differently; fp8 has 3 mantissa bits.
        assert torch.equal(out, exact) or apart(out, exact) < 0.03


def inference_model(monkeypatch, weights: str | None = None) -> Any:
    """Build a model in bf16 or fp8, without the inference layers."""
    model = build().eval().requires_grad_(False)
    for module in model.modules():  # initially ones or zeros, which would hide mix-ups
        if isinstance(module, (nn.LayerNorm, RMSNorm)):
            nn.init.normal_(module.weight)
        if getattr(module, "bias", None) is not None:
            nn.init.normal_(module.bias)
    if weights == "fp8":
        monkeypatch.setattr(fp8, "_allow_cpu", True)
        use_implementations(model, FP8_ALONE)
    return model


def decode(model: nn.Module) -> torch.Tensor:
    """Return the logits of a prompt with an image and of one decode step."""
    cache = StaticCache(config=model.config, max_cache_len=32)
    ids = torch.tensor([text(3) + expanded_image() + text(5)])
    with torch.no_grad():
        prompt = model(ids[:, :-1], pixel_values=random_pixels(1), past_key_values=cache).logits
        step = model(ids[:, -1:], torch.ones_like(ids), past_key_values=cache).logits
    return torch.cat((prompt, step), dim=1)


def use_reference_kernels(monkeypatch, model: Any, has_skinny_gemm=True) -> list[str]:
    """Replace the kernels by ``reference.py``; return a list that gets the name of each call."""
    calls: list[str] = []

    def noted(function):
        def call(*args):
            calls.append(function.__name__)
            return function(*args)

        return call

    for name, functions in KERNELS.items():
        module: Any = ModuleType(name)
        vars(module).update({kernel: noted(getattr(reference, kernel)) for kernel in functions})
        monkeypatch.setitem(sys.modules, f"glm4v_patched.engine.kernels.{name}", module)
    is_tensor = lambda x: isinstance(x, torch.Tensor)  # noqa: E731
    monkeypatch.setattr(inference_layers, "_can_use_kernels", is_tensor)
    monkeypatch.setattr(inference_layers, "SUPPORTED_HEAD_DIMS", (model.config.kv_channels,))
    for module in (inference_layers, skinny_gemm):
        monkeypatch.setattr(module, "num_sms", lambda device: 1)
    is_supported = lambda rows, weight: has_skinny_gemm and rows <= 32  # noqa: E731
    monkeypatch.setattr(skinny_gemm, "is_supported", is_supported)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    use_implementations(model, ModelUsage.inference())
    return calls


NORMS = "input_layernorm", "post_attention_layernorm"
BLOCK_MODULES = (
    "self_attention",
    "self_attention.query_key_value",
    "mlp",
    "mlp.dense_4h_to_h",
    *NORMS,
)
TOWER_MODULES = "attention", "mlp", "mlp.fc1", "mlp.activation_fn", "mlp.fc2", *NORMS
HOOKED_MODULES = [
    "transformer.encoder.layers.0",
    *(f"transformer.encoder.layers.0.{name}" for name in BLOCK_MODULES),
    *(f"transformer.vision.transformer.layers.0.{name}" for name in TOWER_MODULES),
    "transformer.vision.patch_embedding.proj",
]
REPLACED_MODULES = [
    *(f"transformer.encoder.layers.0{name}" for name in ("", ".mlp", ".self_attention")),
    "transformer.encoder.layers.0.post_attention_layernorm",
    "transformer.vision.transformer.layers.0.input_layernorm",
]


@pytest.mark.parametrize("weights", [None, "fp8"])
@pytest.mark.parametrize("name", HOOKED_MODULES)
def test_hooks_see_and_change_inputs_and_outputs(monkeypatch, name, weights):
    model = inference_model(monkeypatch, weights)
    seen: list[type] = []
    outputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def hook(module, args, out):
        seen.extend(map(type, (args[0], out)))
        outputs.append((out.add_(1.0), out.clone()))
        return out

    hooked = model.get_submodule(name)
    handle = hooked.register_forward_hook(hook)
    expected = decode(model)
    handle.remove()
    use_reference_kernels(monkeypatch, model)
    hooked.register_forward_hook(hook)  # hooks are looked for in every call
    assert apart(decode(model), expected) < 0.02
    assert {*seen} == {torch.Tensor}
    assert all(torch.equal(out, copy) for out, copy in outputs)  # nothing overwrote it later


@pytest.mark.skipif(
    not inference_layers.HAS_CUMULATIVE_LENGTH, reason="install transformers 5.4 or newer"
)
def test_torch_attends_where_kernels_do_not_support_the_mask_or_cache(monkeypatch):
    model = build().eval().requires_grad_(False)
    use_reference_kernels(monkeypatch, model)
    cache = StaticCache(config=model.config, max_cache_len=16)
    attention = model.transformer.encoder.layers[0].self_attention
    heads = attention.num_key_value_groups * attention.split_sizes[1]
    x, filled = torch.zeros(3, 1, model.config.hidden_size, dtype=model.dtype), (False, ())
    shape = 3, attention.split_sizes[1], 4, attention.head_dim
    cache.update(*torch.zeros(2, *shape, dtype=model.dtype), 0)

    def find_layer(*mask_shape, x=x, cache_update=filled, dtype=torch.bool):
        mask = torch.ones(mask_shape, dtype=dtype)
        return attention._decode_cache_layer(x, mask, cache, cache_update)

    with torch.no_grad():
        assert find_layer(3, 1, 1, 16) is find_layer(1, 1, 1, 16) is cache.layers[0]
        for other in ((3, 1, 1, 15), (2, 1, 1, 16), (3, heads, 1, 16), (3, 1, 2, 16), (3, 16)):
            assert find_layer(*other) is None
        unmasked = attention._decode_cache_layer(x, None, cache, filled)
        assert find_layer(1, 1, 1, 16, dtype=torch.float32) is unmasked
        two_tokens = x.expand(3, 2, -1)
        assert find_layer(1, 1, 1, 16, x=x.half()) is find_layer(1, 1, 1, 16, x=two_tokens) is None
        assert find_layer(1, 1, 1, 16, cache_update=(True, ())) is None
        cache.offloading = True  # its update copies keys to the device
        assert find_layer(1, 1, 1, 16) is None


def test_torch_rotates_heads_of_sizes_that_kernels_do_not_support(monkeypatch):
    model = build().eval().requires_grad_(False)
    expected = decode(model)
    calls = use_reference_kernels(monkeypatch, model)
    monkeypatch.setattr(inference_layers, "SUPPORTED_HEAD_DIMS", ())
    assert apart(decode(model), expected) < 0.02
    assert "add_rms_norm" in calls and {"rope_in_place", "rope_and_update_cache"}.isdisjoint(calls)


class Wrapper(nn.Module):
    """An adapter around a module, which does not have the attributes of the wrapped one."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return 2 * self.inner(*args)


def change_class(module: Any) -> None:
    original: Any = type(module)
    members = {"forward": lambda self, x, *more: original.forward(self, 2 * x, *more) * 2}
    module.__class__ = type("Other", (original,), members)


@pytest.mark.parametrize("weights", [None, "fp8"])
@pytest.mark.parametrize(
    ("name", "is_wrapped"),
    [
        *((name, False) for name in REPLACED_MODULES),
        *((f"{REPLACED_MODULES[0]}.{name}", True) for name in ("self_attention", "mlp", *NORMS)),
    ],
)
def test_subclasses_and_wrapped_modules_compute_the_same(monkeypatch, name, is_wrapped, weights):
    """Adapters make such modules."""
    model = inference_model(monkeypatch, weights)
    module = model.get_submodule(name)
    if is_wrapped:
        model.set_submodule(name, Wrapper(module))
    else:
        change_class(module)
    expected = decode(model)
    use_reference_kernels(monkeypatch, model)
    assert apart(decode(model), expected) < 0.02


def test_packed_weights_of_other_packages_are_not_passed_to_kernels(monkeypatch):
    class PackedParameter(nn.Parameter):
        """Stands for a package's parameter that claims a float dtype but stores other numbers."""

    model = build().eval().requires_grad_(False)
    linear = model.transformer.encoder.layers[0].mlp.dense_h_to_4h
    linear.weight = PackedParameter(linear.weight, requires_grad=False)
    use_reference_kernels(monkeypatch, model)
    calls: list = []
    monkeypatch.setattr(skinny_gemm, "is_supported", lambda m, weight: calls.append(weight) or True)
    decode(model)
    assert calls and linear.weight not in {*calls}


@pytest.mark.gpu
@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("neighbors", [True, False])
def test_heads_are_rotated_in_place_bit_for_bit_and_values_stay(neighbors, in_fp32):
    config = ChatGLMConfig(rope_in_fp32=in_fp32, num_layers=1, original_rope=neighbors)
    with torch.device("cuda"):
        attention, angles = SelfAttention(config, 0), RotaryEmbedding(config)
        heads = torch.randn(2, 100, 36, 128).bfloat16()
        cos, sin = angles(torch.randint(0, 8000, (2, 100)), torch.bfloat16)
    set_implementation(attention, InferenceSelfAttention)
    expected = apply_rotary(heads[:, :, :34], cos, sin, config.rotary_distance)
    expected = expected.split((32, 2), dim=2)
    value = heads[:, :, 34:].clone()
    with torch.no_grad():
        rotated = attention.rotate(heads, cos, sin)
    assert rotated[0].data_ptr() == heads.data_ptr()
    for out, exact in zip(rotated, (*expected, value), strict=True):
        assert torch.equal(out, exact)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("weights", "neighbors"), [(None, True), ("fp8", True), (None, False), ("fp8", False)]
)
def test_a_model_on_a_gpu_generates_as_before(weights, neighbors):
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "seq_length": 2048, "vision_config": SHALLOW_TOWER}
    config = ChatGLMConfig(**sizes, original_rope=neighbors)
    config._attn_implementation = "sdpa"
    with torch.device("cuda"):
        model = GLM4VForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    model.requires_grad_(False)
    begin, end, pad = config.boi_token_id, config.eoi_token_id, config.pad_token_id
    ids = torch.tensor([[begin, pad, end, 7, 8, 9], [7, 8, 9, 7, 8, 9]], device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    kwargs = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    kwargs["pixel_values"] = torch.randn(1, 3, 1120, 1120, device="cuda").bfloat16()

    def logits() -> tuple[torch.Tensor, ...]:
        """Return the logits of 8 prescribed tokens, so that both models have the same inputs."""
        return model.generate(
            **kwargs, cache_implementation="static", disable_compile=True, output_logits=True,
            return_dict_in_generate=True, prefix_allowed_tokens_fn=lambda _, ids: [100 + len(ids)],
        ).logits  # fmt: skip

    exact = logits()
    if weights == "fp8":
        use_implementations(model, FP8_ALONE)
    before = logits()
    use_implementations(model, ModelUsage.inference())
    classes = {type(module) for module in model.modules()}
    assert INFERENCE_CLASSES - classes == (
        {GUARDED_CLASSES[InferenceTowerMLP]} if weights else set()
    )
    for now, was, expected in zip(logits(), before, exact, strict=True):
        # In fp8 two ways of rounding are as far from each other as each is from bf16.
        assert apart(now, expected) < (1.1 * apart(was, expected) if weights else 0.02)

    kwargs |= {"eos_token_id": None, "pad_token_id": pad, "max_new_tokens": 24}
    replayed = model.generate(**kwargs, **StaticCaches(model, 64).generate_kwargs(2, 1664))
    cache = {CACHE_KEYWORD: StaticCache(config=config, max_cache_len=1664)}
    eager = {"custom_generate": decode_without_sync, "decode_step": model.__call__}
    assert torch.equal(replayed, model.generate(**kwargs, **cache, **eager))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "batch, max_cache_len, filled", [(1, 2048, 1977), (3, 129, 128), (32, 1792, 1650)]
)
@pytest.mark.parametrize("queries, groups, channels", [(32, 2, 128), (4, 4, 16)])
@pytest.mark.parametrize("in_fp32, neighbors", [(False, True), (True, True), (False, False)])
def test_a_new_token_is_cached_and_attends_where_its_mask_is_true(
    batch, max_cache_len, filled, queries, groups, channels, in_fp32, neighbors
):
    torch.manual_seed(0)
    rotation = {"rope_in_fp32": in_fp32, "original_rope": neighbors}
    config = ChatGLMConfig(num_layers=1, kv_channels=channels, **rotation)
    sizes, distance = (queries, groups, groups), config.rotary_distance
    with torch.device("cuda"):
        cache_layer = StaticLayer(max_cache_len=max_cache_len)
        cached = torch.randn(batch, groups, filled, channels).bfloat16()
        cache_layer.update(cached, cached.flip(1))
        heads = torch.randn(batch, 1, sum(sizes), channels).bfloat16()
        angles = RotaryEmbedding(config)(torch.randint(0, 8000, (batch, 1)), torch.bfloat16)
        mask = torch.rand(batch, 1, 1, max_cache_len) > 0.3
    mask[..., 0], mask[..., filled - 70 : filled - 3] = True, False  # masks a block's keys
    mask[..., filled + 1 :] = False
    rotated = apply_rotary(heads[:, :, : queries + groups], *angles, distance).transpose(1, 2)
    keys, values = cache_layer.keys.clone(), cache_layer.values.clone()
    keys[:, :, filled : filled + 1] = rotated[:, queries:]
    values[:, :, filled : filled + 1] = heads[:, :, queries + groups :].transpose(1, 2)
    for current_mask in (mask, mask[:1]):
        for quantizes in (False, True):
            cache_layer.cumulative_length.fill_(filled)
            query = rope_and_update_cache(heads.flatten(2), sizes, *angles, distance, cache_layer)
            assert torch.equal(query, rotated[:, :queries, 0])
            assert torch.equal(cache_layer.keys, keys) and torch.equal(cache_layer.values, values)
            out: Any = flash_decode(query, cache_layer, current_mask, quantizes)
            assert cache_layer.cumulative_length.item() == filled + 1
            exact = scaled_dot_product_attention(
                query[:, :, None].float(),
                keys.float(),
                values.float(),
                current_mask,
                enable_gqa=True,
            )
            exact = exact.transpose(1, 2).flatten(2)
            if quantizes:
                data = out.data.unflatten(2, (queries, channels)).float()
                out = (data * out.scale[..., None]).flatten(2)
            assert apart(out, exact) < (0.04 if quantizes else 0.005)
    cache_layer.cumulative_length.fill_(max_cache_len)  # full: nothing is written beyond its end
    rope_and_update_cache(heads.flatten(2), sizes, *angles, distance, cache_layer)
    assert torch.equal(cache_layer.keys, keys) and torch.equal(cache_layer.values, values)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 300])
def test_add_rms_norm_matches_torch_and_its_quantized_output_matches_it(rows):
    torch.manual_seed(0)
    factory: dict = {"device": "cuda", "dtype": torch.bfloat16}
    x, y = torch.randn(2, rows, 4096, **factory), torch.randn(2, rows, 4096, **factory)
    norm = RMSNorm(4096, 1e-5).to(**factory)
    nn.init.normal_(norm.weight)
    with torch.no_grad():
        for other, expected in ((y, x + y), (None, x)):
            total, normalized = add_rms_norm(x, norm, other, False)
            assert torch.equal(total, expected)
            assert (normalized != norm(expected)).float().mean() < 0.01
            same_total, quantized = add_rms_norm(x, norm, other, True)
            assert torch.equal(same_total, total)
            assert_quantized(quantized, normalized)


@pytest.mark.gpu
@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("rows", [1, 16])
def test_each_kernel_reduces_split_k_partials(rows, is_stored):
    torch.manual_seed(0)
    factory: dict = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(rows, 1, 4096, **factory)

    def multiply(out: int) -> tuple[SplitKPartials, torch.Tensor]:
        linear: Any = nn.Linear(4096, out, **factory).requires_grad_(False)
        exact = x.double() @ linear.weight.double().T + linear.bias.double()
        if is_stored:
            set_implementation(linear, Fp8StoredLinear)
            linear.quantize_weight(stores_transposed=False)
        partials = linear_or_partials(linear, x)
        assert isinstance(partials, SplitKPartials)
        assert apart(to_tensor(partials), exact) < (0.05 if is_stored else 0.01)
        return partials, to_tensor(partials)

    def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
        # Sums in another order round differently, in few elements.
        assert actual.shape == expected.shape and (actual != expected).float().mean() < 0.02
        assert torch.allclose(actual, expected, rtol=2**-7, atol=2**-7)

    norm = RMSNorm(4096, 1e-5).to(**factory)
    nn.init.normal_(norm.weight)
    with torch.no_grad():
        partials, expected = multiply(4096)
        assert_near(reduce_partials(partials), expected)
        assert_near(reduce_partials(partials, x), expected + x)
        total, normalized = add_rms_norm(x, norm, partials, False)
        assert_near(total, expected + x)
        assert_near(normalized, norm(total))
        assert_quantized(add_rms_norm(x, norm, partials, True)[1], normalized)
        partials, expected = multiply(4608)
        caches = [StaticLayer(max_cache_len=9) for _ in range(2)]
        for cache in caches:
            cache.lazy_initialization(*torch.zeros(2, rows, 2, 1, 128, **factory))
        position = torch.randint(0, 8000, (rows, 1), device="cuda")
        angles = RotaryEmbedding(ChatGLMConfig()).cuda()(position, torch.bfloat16)
        query, expected_query = (
            rope_and_update_cache(heads, (32, 2, 2), *angles, 1, cache)
            for heads, cache in zip((partials, expected), caches, strict=True)
        )
        assert_near(query, expected_query)
        assert caches[1].keys.any() and caches[1].values.any()
        assert_near(caches[0].keys, caches[1].keys)
        assert_near(caches[0].values, caches[1].values)
        partials, expected = multiply(2 * 13696)
        gate, up = expected.chunk(2, dim=-1)
        assert_near(activate(partials, "swiglu"), silu(gate) * up)
        exact = silu(gate.float()) * up.float()
        for group_size in (None, 3456):
            data, scale = fp8_triton.activate_and_quantize_rows(
                partials, None, "swiglu", group_size
            )
            assert scale.shape == (rows, 1 if group_size is None else 4)
            for i, group in enumerate(exact.flatten(0, 1).split(group_size or 13696, dim=1)):
                group_data = data[:, i * 3456 :][:, : group.shape[1]]
                assert_quantized(Fp8Tensor(group_data, scale[:, i : i + 1]), group)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 7, 16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("n", "k"), [(4608, 4096), (27392, 4096), (4096, 13696), (64, 128), (128, 640)]
)
def test_the_skinny_gemm_kernel_multiplies(m, dtype, n, k):
    torch.manual_seed(0)
    x = torch.randn(m, k, device="cuda").to(dtype)
    weight = torch.randn(n, k, device="cuda").to(dtype)
    is_fp8 = dtype.itemsize == 1
    for groups in {1, k // 128, skinny_gemm.num_splits(n, k, NUM_SMS)} if is_fp8 else (0,):
        scales, scaled = None, x.double()
        if groups:
            scales = torch.rand(m, groups, device="cuda") + 0.5
            group_size = skinny_gemm.k_blocks_per_split(k, groups) * 128
            scaled = scaled * scales.repeat_interleave(group_size, dim=1)[:, :k]
        out = split_k_matmul(x, weight, scales).sum(0)
        # Tensor cores accumulate fp8 products in 14 bits.
        tolerance = 1e-3 if groups else 1e-4
        assert apart(out, scaled @ weight.double().T) < tolerance


@pytest.mark.gpu
def test_gelu_and_swiglu_match_torch():
    torch.manual_seed(0)
    x = torch.randn(2, 300, 6000, device="cuda").mul(3).bfloat16()
    gate, up = x.chunk(2, dim=-1)
    pairs = (silu(gate) * up, activate(x, "swiglu")), (gelu(x), activate(x, "gelu"))
    for expected, actual in pairs:
        # Closer to 0, torch's own GELU has the rounding error of 1 + erf.
        differs = (actual != expected)[expected.abs() > 1e-3]
        assert differs.float().mean() < 0.005
        assert torch.allclose(actual, expected, rtol=2**-7, atol=1e-6)


@pytest.mark.gpu
def test_a_tower_layer_normalizes_and_adds_as_torch_does():
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
        expected = layer(x)
        set_implementation(layer, InferenceTowerLayer)
        out = layer(x)
        total, quantized = layer_norm_add(x, layer.input_layernorm, out, True)
    # Sums in another order round differently, in few elements.
    assert (out != expected).float().mean() < 0.01
    assert torch.allclose(out, expected, rtol=2**-7, atol=2**-6)
    assert torch.equal(layer_norm_add(x, layer.input_layernorm, out, False)[1], total)
    assert_quantized(quantized, total)


@pytest.mark.gpu
def test_the_patch_embeddings_matrix_product_matches_its_convolution():
    torch.manual_seed(0)
    with torch.device("cuda"):
        embedding = PatchEmbedding(ChatGLMConfig(num_layers=1))
        pixels = torch.randn(2, 3, 1120, 1120).bfloat16()
    embedding.bfloat16()
    with torch.no_grad():
        expected = embedding(pixels)
        set_implementation(embedding, InferencePatchEmbedding)
        assert apart(embedding(pixels), expected) < 0.005


def assert_quantized(actual: Fp8Tensor, x: torch.Tensor) -> None:
    """``actual`` must be ``x``, with nearly the error of :func:`quantize_rows`."""
    rows = x.flatten(0, -2).double()
    data, scale = quantize_rows(x.flatten(0, -2))
    assert torch.allclose(actual.scale.view_as(scale), scale, rtol=0.02)
    dequantized = actual.data.float().view_as(rows) * actual.scale.view_as(scale)
    assert apart(dequantized, rows) < 1.01 * apart(data.float() * scale, rows)
