"""Rotation by halves (cogagent-9b, ``original_rope: false``) against that of neighbors.

Reordering the rotated channels of queries and keys turns one into the other: whatever a model of
one kind computes, a model of the other kind computes with permuted weights. Logits and gradients
are compared with the plain reference in tests/parity.
"""

import pytest
import torch

from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.cogagent import permuted
from tests.helpers.tiny import small_model, tiny_config, unexpanded_image
from tests.remote.inputs import prompts

INPUTS = prompts(unexpanded_image())


def by_halves(model: GLM4VForCausalLM) -> GLM4VForCausalLM:
    """The model that rotates by halves and computes the same."""
    config = type(model.config)(**model.config.to_dict() | {"original_rope": False})
    other = GLM4VForCausalLM._from_config(config, attn_implementation="sdpa").to(model.dtype).eval()
    other.load_state_dict(permuted(model.state_dict(), config))
    return other


@pytest.fixture(scope="module")
def models() -> tuple[GLM4VForCausalLM, GLM4VForCausalLM]:
    model = small_model().eval()
    return model, by_halves(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_ratio": 50, "rope_in_fp32": True},
        {"multi_query_group_num": 1, "kv_channels": 20},
        {"multi_query_group_num": 4, "rope_ratio": 0.5},
    ],
)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_logits_are_equal_with_other_sizes_and_attention(changes, implementation):
    torch.manual_seed(0)
    config = tiny_config(initializer_range=0.1, num_layers=1, **changes)
    model = GLM4VForCausalLM(config).eval()
    halves = by_halves(model)
    with torch.no_grad():
        for rotated in (model, halves):
            rotated.set_attn_implementation(implementation)
        logits = [rotated(**INPUTS).logits for rotated in (model, halves)]
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5)


def test_the_other_rotation_of_the_same_weights_is_another_model(models):
    _, halves = models
    neighbors = small_model().eval()
    neighbors.load_state_dict(halves.state_dict())
    difference = (neighbors(**INPUTS).logits - halves(**INPUTS).logits).abs().max()
    assert difference > 0.05 * halves(**INPUTS).logits.abs().max()


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
