"""Rotation by halves (cogagent-9b, ``original_rope: false``) against that of neighbors.

Reordering the rotated channels of queries and keys turns one into the other: whatever a model of
one kind computes, a model of the other kind computes with permuted weights.
"""

import pytest
import torch

from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.cogagent import permuted
from tests.helpers.tiny import (
    PAD,
    expanded_image,
    padded,
    random_pixels,
    small_model,
    text,
    tiny_config,
    unexpanded_image,
)

ROWS = [
    [*unexpanded_image(), *text(9, seed=1)],
    [
        *text(4, seed=2),
        *unexpanded_image(),
        *text(3, seed=3),
        *unexpanded_image(),
        *text(2, seed=4),
    ],
    text(7, seed=5),
]
PIXELS = random_pixels(3)


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


def inputs() -> dict[str, torch.Tensor]:
    return padded(ROWS, "left") | {"pixel_values": PIXELS}


def labeled() -> dict[str, torch.Tensor]:
    batch = inputs()
    return batch | {"labels": batch["input_ids"].masked_fill(batch["input_ids"] == PAD, -100)}


def test_logits_loss_and_gradients_are_equal(models):
    outputs = [model(**labeled()) for model in models]
    assert torch.allclose(outputs[0].logits, outputs[1].logits, atol=1e-5)
    assert torch.allclose(outputs[0].loss, outputs[1].loss, atol=1e-6)
    gradients = [
        torch.autograd.grad(out.loss, [p for p in model.parameters() if p.requires_grad])
        for out, model in zip(outputs, models, strict=True)
    ]
    names = [name for name, p in models[0].named_parameters() if p.requires_grad]
    for name, first, second in zip(names, *gradients, strict=True):
        if "query_key_value" in name and "encoder.layers" in name:
            first, second = first.norm(), second.norm()  # their rows are in another order
        assert torch.allclose(first, second, atol=1e-5 * first.abs().max().item() + 1e-8), name


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
        logits = [rotated(**inputs()).logits for rotated in (model, halves)]
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5)


def test_the_other_rotation_of_the_same_weights_is_another_model(models):
    _, halves = models
    neighbors = small_model().eval()
    neighbors.load_state_dict(halves.state_dict())
    difference = (neighbors(**inputs()).logits - halves(**inputs()).logits).abs().max()
    assert difference > 0.05 * halves(**inputs()).logits.abs().max()


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
def test_greedy_tokens_are_equal_with_every_cache(models, cache):
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    options |= {"use_cache": False} if cache is None else {"cache_implementation": cache}
    first, second = (model.generate(**inputs(), **options) for model in models)
    assert torch.equal(first, second) and first.shape[1] == inputs()["input_ids"].shape[1] + 12


def test_a_cached_step_equals_the_whole_sequence(models):
    _, halves = models
    row = [*expanded_image(), *text(8, seed=6)]
    whole = halves(input_ids=torch.tensor([row]), pixel_values=PIXELS[:1]).logits
    first = halves(input_ids=torch.tensor([row[:-1]]), pixel_values=PIXELS[:1], use_cache=True)
    last = halves(
        input_ids=torch.tensor([row[-1:]]),
        past_key_values=first.past_key_values,
        position_ids=torch.tensor([[len(row) - len(expanded_image()) + 2]]),
    )
    assert torch.allclose(last.logits[0, -1], whole[0, -1], atol=1e-5)


def test_packed_samples_equal_each_by_itself(models):
    _, halves = models
    samples = [[*expanded_image(), *text(5, seed=7)], text(6, seed=8)]
    packed = torch.tensor([[*samples[0], *samples[1]]])
    positions = torch.tensor([[*range(len(samples[0])), *range(len(samples[1]))]])
    together = halves(input_ids=packed, position_ids=positions, pixel_values=PIXELS[:1]).logits[0]
    apart = [
        halves(input_ids=torch.tensor([samples[0]]), pixel_values=PIXELS[:1]).logits[0],
        halves(input_ids=torch.tensor([samples[1]])).logits[0],
    ]
    assert torch.allclose(together, torch.cat(apart), atol=1e-5)


def test_the_rotation_is_saved(models, tmp_path):
    _, halves = models
    halves.save_pretrained(tmp_path)
    loaded = GLM4VForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.original_rope is False
    assert torch.equal(loaded(**inputs()).logits, halves(**inputs()).logits)
