"""Layers of a model that is only read, with kernels of their own."""

import importlib.util

import pytest
import torch
from torch import nn

from glm4v_patched.engine.reading import ReadSelfAttention, ReadTowerLayer, read_only
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import RotaryEmbedding, SelfAttention, apply_rotary
from glm4v_patched.remote.visual import TransformerLayer
from tests.helpers.fp8 import build
from tests.helpers.tiny import grown_image, pictures, text


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
    assert kinds.isdisjoint({ReadSelfAttention, ReadTowerLayer}) is not has_triton
    with torch.no_grad():
        assert torch.equal(model(**given).logits, wanted)


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
    # Sums in another order change what is rounded, in few places.
    assert (found != wanted).float().mean() < 0.01
    assert torch.allclose(found, wanted, rtol=2**-7, atol=2**-6)
