"""Sharing out conversations among rows, and the batches that such rows become."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.data.packing import PackingCollator, share_out
from glm4v_patched.demo.tiny_model import tiny_config
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.data_forms import turns


def conversation(words: int, pictures: int = 0) -> list[dict]:
    """A question of so many words, one picture a turn, and an answer."""
    shown = []
    for number in range(pictures):
        image = Image.new("RGB", (20, 20), (words, 50 * number, 99))
        shown += turns("Which colour is it", "red", image=image)
    return [*shown, *turns("ag"[words % 2] + " red" * words, "red")]


def conversations() -> list[list[dict]]:
    sizes = [(3, 1), (40, 0), (1, 0), (8, 2), (12, 0), (2, 1)]
    return [conversation(words, pictures) for words, pictures in sizes]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=2, max_size=40))
def test_every_conversation_is_in_one_row_and_no_row_is_too_long(lengths):
    rows = share_out(lengths, 100)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    totals = [sum(lengths[number] for number in row) for row in rows]
    assert max(totals) <= 100
    # None of two rows would fit into one, and so all but one are more than half full.
    assert len(totals) == 1 or sum(sorted(totals)[:2]) > 100
    assert share_out(lengths, 100) == rows


def test_a_row_is_filled_to_the_last_position_and_no_further(words):
    assert share_out([9, 40], 49) == [[1, 0]]
    assert share_out([9, 40], 48) == [[1], [0]]
    with words.refused(ValueError, "2 of 4", "number 2", "30", "29", "40"):
        share_out([1, 30, 2, 40], 29)


@pytest.fixture
def batch(processor) -> dict[str, torch.Tensor]:
    first, second, *others = conversations()
    return PackingCollator(processor)([[first, second], others])


def test_a_packed_batch_has_the_loss_and_gradients_of_the_padded_one(processor, batch):
    torch.manual_seed(0)
    model = GLM4VForCausalLM(tiny_config(processor.tokenizer)).train()
    results = []
    for inputs in (batch, ConversationCollator(processor)(conversations())):
        model.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        results.append((loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}))
    (loss, got), (want_loss, want) = results
    # fp32. Measured 0 and 1.8e-7 of the largest gradient.
    assert loss == pytest.approx(want_loss, rel=1e-5)
    largest = max(gradient.abs().max() for gradient in want.values())
    for name, gradient in want.items():
        assert (got[name] - gradient).abs().max() <= 1e-5 * largest, name
