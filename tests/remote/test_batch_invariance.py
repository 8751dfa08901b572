"""A sample has the same logits alone and in any batch that the model takes.

Hypothesis generates a batch. Its samples are computed one by one with the simplest call, and
compared with the same samples padded, packed, cached or with explicit position ids.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from tests.helpers.tiny import (
    FILL,
    NUM_IMAGE_TOKENS,
    PAD,
    expanded_image,
    images_of,
    padded,
    tiny_model,
    unexpanded_image,
)

# fp32, the same sample in a matmul of another shape. Measured 1.1e-5 in 2,000 batches;
# samples that see each other, or positions that are off by one, differ by 0.1 and more.
ATOL = 5e-5

BOUNDED = settings(max_examples=15, derandomize=True, deadline=None)
MANY = settings(
    max_examples=500,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

TEXT = st.lists(st.integers(0, 499), min_size=0, max_size=6)
FORM = st.sampled_from([unexpanded_image(), expanded_image()])


@st.composite
def samples(draw, max_size: int = 4) -> list[list[int]]:
    """Sequences of text and images, expanded or not, with at least two ids each."""
    rows = []
    for _ in range(draw(st.integers(1, max_size))):
        row = draw(TEXT)
        for _ in range(draw(st.integers(0, 2))):
            row = [*row, *draw(FORM), *draw(TEXT)]
        rows.append([draw(st.integers(0, 499)), *row, draw(st.integers(0, 499))])
    return rows


def expanded(row: list[int]) -> list[int]:
    """Expand image placeholders, which are the only padding ids in a sequence."""
    return [
        id_ for token in row for id_ in ([FILL] * NUM_IMAGE_TOKENS if token == PAD else [token])
    ]


def positions(row: list[int]) -> list[int]:
    """Position ids of an expanded sequence, where an image takes three."""
    counted, at = [], 0
    for before, token in zip([None, *row], row, strict=False):
        at += not (before == token == FILL) and bool(counted)
        counted.append(at)
    return counted


MODEL = tiny_model()


@torch.no_grad()
def alone(rows: list[list[int]]) -> list[torch.Tensor]:
    """Logits of each sample, expanded, one call each."""
    return [
        MODEL(input_ids=torch.tensor([expanded(row)]), pixel_values=images, use_cache=False).logits[
            0
        ]
        for row, images in zip(rows, images_of(rows), strict=True)
    ]


def assert_close(actual: torch.Tensor, want: torch.Tensor) -> None:
    assert actual.shape == want.shape
    assert (actual - want).abs().max() <= ATOL


def bounded_and_many(*strategies) -> Callable:
    """Make two tests of one property: few generated batches, and many behind ``exhaustive``."""

    def tests(check: Callable) -> Callable:
        @pytest.mark.parametrize(
            "budget",
            [BOUNDED, pytest.param(MANY, marks=pytest.mark.exhaustive)],
            ids=["few", "many"],
        )
        def test(budget):
            budget(given(*strategies)(check))()

        return test

    return tests


@bounded_and_many(samples(), st.sampled_from(["left", "right"]), st.booleans())
def test_padded_sequences_equal_single_ones(rows, side, by_hand):
    """Unexpanded and expanded images mixed; position ids by default, or as a collator counts."""
    want, unexpanded_rows = alone(rows), rows
    if by_hand:
        unexpanded_rows = [expanded(row) for row in rows]
    batch = padded(unexpanded_rows, side)
    if by_hand:
        mask = batch["attention_mask"]
        batch["position_ids"] = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    with torch.no_grad():
        logits = MODEL(**batch, pixel_values=torch.cat(images_of(rows)), use_cache=False).logits
    for unexpanded_row, actual, of_row in zip(unexpanded_rows, logits, want, strict=True):
        # Sequences that expand less are padded on the left; padding on the right stays.
        after = batch["input_ids"].shape[1] - len(unexpanded_row) if side == "right" else 0
        end = len(actual) - after
        assert_close(actual[end - len(of_row) : end], of_row)


@bounded_and_many(
    samples(max_size=5), st.sampled_from(["none", "ones"]), st.sampled_from(["counted", "shared"])
)
def test_packed_samples_equal_single_ones(rows, mask, counting):
    """Expanded prompts; a mask of ones beside position ids that restart is ignored."""
    rows = [expanded(row) for row in rows]
    counted = [positions(row) if counting == "shared" else list(range(len(row))) for row in rows]
    ids = torch.tensor([sum(rows, [])])
    batch = {"input_ids": ids, "position_ids": torch.tensor([sum(counted, [])])}
    if mask == "ones":
        batch["attention_mask"] = torch.ones_like(ids)
    with torch.no_grad():
        actual = MODEL(**batch, pixel_values=torch.cat(images_of(rows)), use_cache=False).logits[0]
    assert_close(actual, torch.cat(alone(rows)))


@bounded_and_many(samples(), st.data())
def test_labels_of_a_batch_are_those_of_its_samples(rows, data):
    """Padded, packed and shifted labels have the same loss as the single samples."""
    rows = [expanded(row) for row in rows]
    labels = [[t if data.draw(st.booleans()) and t < 500 else -100 for t in row] for row in rows]
    images, total = images_of(rows), 0.0
    with torch.no_grad():
        for row, of_row, image in zip(rows, labels, images, strict=True):
            sample_inputs = {"pixel_values": image, "labels": torch.tensor([of_row])}
            total += MODEL(torch.tensor([row]), **sample_inputs, num_items_in_batch=1).loss.item()
        batch = padded(rows, data.draw(st.sampled_from(["left", "right"])))
        spread = torch.full_like(batch["input_ids"], -100)
        spread[batch["attention_mask"].bool()] = torch.tensor(sum(labels, []))
        # The first token of a sequence is not predicted.
        first = batch["attention_mask"].cumsum(1) == 1
        shifted = torch.nn.functional.pad(spread.masked_fill(first, -100), (0, 1), value=-100)
        packed = {"input_ids": torch.tensor([sum(rows, [])])}
        packed["position_ids"] = torch.tensor([sum(map(positions, rows), [])])
        skip = {"skip_logits": data.draw(st.booleans()), "num_items_in_batch": 1}
        skip["pixel_values"] = torch.cat(images)
        for inputs in (
            batch | {"labels": spread},
            batch | {"shift_labels": shifted[:, 1:]},
            packed | {"labels": torch.tensor([sum(labels, [])])},
        ):
            assert MODEL(**inputs, **skip).loss.item() == pytest.approx(total, rel=1e-5, abs=1e-4)


@bounded_and_many(samples(max_size=3), st.data())
def test_sequences_in_pieces_on_a_cache_equal_one_pass(rows, data):
    """Rows of one batch, cut anywhere outside of images; the cache is copied, reordered and
    selected from in between, and told its positions when it was cropped or made anew."""
    continuation = data.draw(st.lists(st.integers(0, 499), min_size=3, max_size=9))
    batch = padded(rows, "left")
    with torch.no_grad():
        output = MODEL(**batch, pixel_values=torch.cat(images_of(rows)), use_cache=True)
        mask = torch.zeros(output.logits.shape[:2], dtype=torch.long)
        for of_row, row in zip(mask, rows, strict=True):
            of_row[-len(expanded(row)) :] = 1
        cache, now = output.past_key_values, list(range(len(rows)))
        following = [positions(expanded(row))[-1] + 1 for row in rows]
        actual, at = [output.logits[:, -1:]], 0
        while at < len(continuation):
            change = data.draw(st.sampled_from(["", "order", "select", "repeat", "crop", "anew"]))
            chosen, places = list(range(len(now))), st.integers(0, len(now) - 1)
            if change == "order":
                chosen = data.draw(st.lists(places, min_size=len(now), max_size=len(now)))
                cache.reorder_cache(torch.tensor(chosen))
            elif change == "select":
                chosen = data.draw(st.lists(places, min_size=1, max_size=len(now)))
                cache.batch_select_indices(torch.tensor(chosen))
            elif change == "repeat" and len(now) < 5:
                chosen = [number for number in chosen for _ in range(2)]
                cache.batch_repeat_interleave(2)
            elif change == "crop" and at:
                cache.crop(-1)
                at, mask, actual = at - 1, mask[:, :-1], [torch.cat(actual, dim=1)[:, :-1]]
            elif change == "anew":
                layers, cache = cache.layers, DynamicCache()
                for number, layer in enumerate(layers):
                    cache.update(layer.keys, layer.values, number)
            now = [now[number] for number in chosen]
            mask, actual = mask[chosen], [logits[chosen] for logits in actual]
            piece = continuation[at : at + data.draw(st.integers(1, 3))]
            ids = torch.tensor([piece] * len(now))
            mask = torch.cat((mask, torch.ones_like(ids)), dim=1)
            inputs = {"input_ids": ids, "attention_mask": mask, "past_key_values": cache}
            if change in ("crop", "anew"):
                first = torch.tensor([[following[row] + at] for row in now])
                inputs["position_ids"] = first + torch.arange(len(piece))
            actual.append(MODEL(**inputs).logits)
            at += len(piece)
    want = alone([[*row, *continuation] for row in rows])
    for number, row in enumerate(now):
        of_row = torch.cat([logits[number] for logits in actual])
        assert_close(of_row, want[row][-len(of_row) :])
