"""Caches that change between two calls: position ids stay right, or the call is refused."""

import io

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tests.helpers.tiny import (
    expanded_image,
    padded,
    random_pixels,
    text,
    tiny_model,
    unexpanded_image,
)
from tests.remote.inputs import GREEDY

# fp32, cached against one pass. Measured 5.7e-6; a wrong position id changes it by 0.1 and more.
ATOL = 2e-5
# Different numbers of images, so that the next position ids of the sequences differ.
PROMPTS = [
    text(20, seed=1),
    [*text(4, seed=2), *expanded_image(), *text(6, seed=3)],
    [*text(2, seed=4), *expanded_image(), *expanded_image(), *text(3, seed=5)],
]
STEP = torch.tensor([[7], [8], [9]])


@torch.no_grad()
def filled(model, cache=None) -> tuple[DynamicCache, torch.Tensor]:
    batch = padded(PROMPTS, "left")
    output = model(**batch, pixel_values=random_pixels(3), past_key_values=cache, use_cache=True)
    return output.past_key_values, batch["attention_mask"]


@torch.no_grad()
def stepped(model, cache, ids, mask, **inputs) -> torch.Tensor:
    """Return the last logits after ``ids``; ``mask`` covers the cached positions."""
    length = cache.get_seq_length()
    mask = torch.nn.functional.pad(mask, (0, int(length) + ids.shape[1] - mask.shape[1]), value=1)
    return model(input_ids=ids, attention_mask=mask, past_key_values=cache, **inputs).logits[:, -1]


@pytest.fixture(scope="module")
@torch.no_grad()
def want(model) -> torch.Tensor:
    """The logits after ``STEP``, each sequence alone and without a cache."""
    images = [None, random_pixels(3)[:1], random_pixels(3)[1:]]
    rows = [[*row, *step] for row, step in zip(PROMPTS, STEP.tolist(), strict=True)]
    inputs = [(torch.tensor([row]), pixels) for row, pixels in zip(rows, images, strict=True)]
    return torch.stack([model(ids, pixel_values=pixels).logits[0, -1] for ids, pixels in inputs])


@pytest.mark.parametrize("order", [[2, 0, 1], [2, 2, 2]], ids=str)
@pytest.mark.parametrize("kind", ["static", "saved"])
def test_reordered_sequences_keep_their_position_ids(model, want, kind, order):
    static = StaticCache(config=model.config, max_cache_len=64) if kind == "static" else None
    cache, mask = filled(model, static)
    order = torch.tensor(order)
    if kind == "static":
        cache.reorder_cache(order)
    else:  # saved and loaded, and reordered by other code
        file = io.BytesIO()
        torch.save(cache, file)
        file.seek(0)
        cache = torch.load(file, weights_only=False)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[order], layer.values[order]
    actual = stepped(model, cache, STEP[order], mask[order])
    assert (actual - want[order]).abs().max() <= ATOL


def test_an_empty_cache_of_the_caller_is_filled(model):
    cache = DynamicCache()  # which is false, because it has no layers yet
    assert filled(model, cache)[0] is cache and cache.get_seq_length() == 20


def test_a_cache_of_other_sequences_is_refused(model):
    cache, mask = filled(model)
    foreign, _ = filled(tiny_model(num_attention_heads=4))
    for layer, other in zip(cache.layers, foreign.layers, strict=True):
        layer.keys = torch.cat((layer.keys[:2], other.keys[2:] + 1))
    with pytest.raises(ValueError, match="1 sequences of the cache are not as this model filled"):
        stepped(model, cache, STEP, mask)
    for layer in cache.layers:
        layer.keys = layer.keys.double()
    with pytest.raises(ValueError, match="3 sequences of the cache are not as this model filled"):
        stepped(model, cache, STEP, mask)
    cache.batch_select_indices(torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="the cache holds 2 sequences but input_ids has 3"):
        stepped(model, cache, STEP, mask)


def test_a_cache_made_anew_from_its_tensors_needs_positions(model):
    cache, mask = filled(model)
    other = DynamicCache()
    for number, layer in enumerate(cache.layers):
        other.update(layer.keys, layer.values, number)
    with pytest.raises(
        ValueError, match=f"after {mask.shape[1]} cache entries .* pass position_ids"
    ):
        stepped(model, other, STEP, mask)
    # An image takes three position ids for its six tokens.
    positions = mask.sum(1, keepdim=True) - torch.tensor([[0], [3], [6]])
    stepped(model, other, STEP, mask, position_ids=positions)
    # The model recognizes the sequences again after it has added to them.
    stepped(model, cache, STEP, mask)
    assert torch.equal(
        *(stepped(model, cache_to_extend, STEP, mask) for cache_to_extend in (other, cache))
    )


@torch.no_grad()
def test_a_cropped_turn_with_an_image_can_be_replaced(model):
    """Another turn then replaces it."""
    first = [*text(2, seed=1), *expanded_image(), *text(3, seed=2)]
    turns = [[*text(4, seed=seed), *expanded_image(), *text(2, seed=seed + 1)] for seed in (3, 5)]
    images = random_pixels(3)
    cache = model(torch.tensor([first]), pixel_values=images[:1]).past_key_values
    for turn, image in zip(turns, images[1:], strict=True):
        if cache.get_seq_length() > len(first):
            cache.crop(len(first) - cache.get_seq_length())
        ids = torch.tensor([turn])
        actual = model(ids, past_key_values=cache, pixel_values=image[None]).logits[0]
        row = torch.tensor([[*first, *turn]])
        want = model(row, pixel_values=torch.stack((images[0], image))).logits[0, len(first) :]
        assert (actual - want).abs().max() <= ATOL
    conversation = torch.tensor([[*first, *turns[1], 3]])
    want = model.generate(conversation, pixel_values=images[[0, 2]], **GREEDY)
    assert torch.equal(model.generate(conversation, past_key_values=cache, **GREEDY), want)


@torch.no_grad()
def test_positions_after_a_cropped_turn_are_unknown(model):
    cache = model(torch.tensor([text(20, seed=1)]), use_cache=True).past_key_values
    cache.crop(-10)
    turn = torch.tensor([[*expanded_image(), *text(4, seed=2)]])
    model(turn, past_key_values=cache, pixel_values=random_pixels(1))
    cache.crop(-7)
    with pytest.raises(ValueError, match="pass position_ids"):
        model(torch.tensor([[7]]), past_key_values=cache)


@torch.no_grad()
def test_positions_inside_an_image_of_the_shorter_sequence_are_unknown(model):
    images = unexpanded_image()
    ids = torch.tensor([[*images, *images, *text(6, seed=1)], [*text(8, seed=2), *images, 3]])
    mask = torch.ones_like(ids)  # they have 18 and 15 tokens: the second is padded
    cache = model(ids, mask, pixel_values=random_pixels(3), use_cache=True).past_key_values
    cache.crop(-3)
    with pytest.raises(ValueError, match="after 15 cache entries .* pass position_ids"):
        model(STEP[:2], past_key_values=cache)


@torch.no_grad()
def test_position_ids_continue_after_a_turn_with_its_own_was_cropped(model):
    rows, cache = torch.tensor([text(26, seed=1)]), DynamicCache(config=model.config)
    want = model(rows).logits
    model(rows[:, :20], past_key_values=cache)
    model(rows[:, :5], past_key_values=cache, position_ids=torch.arange(20, 25)[None])
    cache.crop(-5)
    for part in (slice(20, 23), slice(23, 26)):
        actual = model(rows[:, part], past_key_values=cache).logits
        assert (actual - want[:, part]).abs().max() <= ATOL
