"""Rotation by halves (cogagent-9b, ``original_rope: false``) against that of neighbors.

Reordering the rotated channels of queries and keys turns one into the other: whatever a model of
one kind computes, a model of the other kind computes with permuted weights. Logits and gradients
are compared with the plain reference in tests/parity.
"""

import pytest
import torch

from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.tiny import small_model, unexpanded_image
from tests.remote.inputs import prompts

INPUTS = prompts(unexpanded_image())


def by_halves(model: GLM4VForCausalLM) -> GLM4VForCausalLM:
    """The model that rotates by halves and computes the same: channel 2i of a rotated half goes to
    i, and channel 2i + 1 to i + half of them, in each query and key."""
    config = type(model.config)(**model.config.to_dict() | {"original_rope": False})
    other = GLM4VForCausalLM._from_config(config, attn_implementation="sdpa").to(model.dtype).eval()
    other.load_state_dict(model.state_dict())
    channels, rotated = config.kv_channels, config.kv_channels // 2
    order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, channels)]
    heads = config.num_attention_heads + config.multi_query_group_num
    rows = torch.tensor([head * channels + channel for head in range(heads) for channel in order])
    with torch.no_grad():
        for layer in other.transformer.encoder.layers:
            for parameter in layer.self_attention.query_key_value.parameters():
                parameter[: len(rows)] = parameter[rows].clone()
    return other


@pytest.fixture(scope="module")
def models() -> tuple[GLM4VForCausalLM, GLM4VForCausalLM]:
    model = small_model().eval()
    return model, by_halves(model)


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
def test_both_rotations_generate_the_same_tokens_with_every_cache(models, cache):
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    options |= {"use_cache": False} if cache is None else {"cache_implementation": cache}
    first, second = (model.generate(**INPUTS, **options) for model in models)
    assert torch.equal(first, second) and first.shape[1] == INPUTS["input_ids"].shape[1] + 12


def test_original_rope_is_saved_and_loaded(models, tmp_path):
    _, halves = models
    halves.save_pretrained(tmp_path)
    loaded = GLM4VForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.original_rope is False
    assert torch.equal(loaded(**INPUTS).logits, halves(**INPUTS).logits)
