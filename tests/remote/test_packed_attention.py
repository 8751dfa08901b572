"""Rows of several samples: each is computed as if it were alone, and no mask is made for the row.

How positions and labels of such rows are read: test_image_layout.py.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glm4v_patched.remote.attention import group_samples
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.tiny import (
    grown_image,
    images_of,
    padded,
    text,
    three_id_image,
    tiny_model,
)

# fp32, the same sample at another place of another product. Measured 7.7e-6 (logits) and 1.8e-6
# (gradients, relative to the largest); samples that saw each other differed by 8.3 and 1.1.
ATOL, RTOL = 2e-5, 1e-5


def samples(image: list[int]) -> list[list[int]]:
    """Of lengths that make more than one group, the first and the last with no filling."""
    return [
        [*text(4, seed=1), *image, *text(40, seed=2)],
        text(3, seed=3),
        [*image, *text(6, seed=4), *image, *text(2, seed=5)],
        text(5, seed=6),
        text(1, seed=7),
        [*text(30, seed=8), *image],
        text(3, seed=9),
    ]


def positions(rows: list[list[list[int]]]) -> torch.Tensor:
    return torch.tensor([[i for sample in row for i in range(len(sample))] for row in rows])


def pack(*rows: list[list[int]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([sum(row, []) for row in rows])
    return {"input_ids": ids, "position_ids": positions(rows), "labels": ids}


def packed_run(model, *rows: list[list[int]]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and gradients of the summed loss."""
    model.zero_grad()
    images = torch.cat(images_of(sum(rows, [])))
    output = model(**pack(*rows), pixel_values=images, num_items_in_batch=1)
    output.loss.backward()
    return output.logits.detach(), gradients(model)


def gradients(model) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Gradients, relative to the largest of all."""
    assert got.keys() == want.keys()
    largest = max(gradient.abs().max() for gradient in want.values())
    for name, gradient in want.items():
        assert (got[name] - gradient).abs().max() <= RTOL * largest, name


def run_alone(model, rows: list[list[int]]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = []
    for row, images in zip(rows, images_of(rows), strict=True):
        ids = torch.tensor([row])
        output = model(input_ids=ids, labels=ids, pixel_values=images, num_items_in_batch=1)
        output.loss.backward()
        logits.append(output.logits[0].detach())
    return logits, gradients(model)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("use_reentrant", [None, True, False])
@pytest.mark.parametrize(
    "image", [[], three_id_image(), grown_image()], ids=["text", "three ids", "grown"]
)
def test_packed_samples_have_the_logits_and_gradients_of_samples_alone(
    image, use_reentrant, implementation
):
    model = tiny_model(attn_implementation=implementation).train()
    rows = samples(image)
    want_logits, want = run_alone(model, rows)
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    logits, got = packed_run(model, rows)
    assert (logits[0] - torch.cat(want_logits)).abs().max() <= ATOL
    assert_close(got, want)


def test_several_packed_rows_equal_one():
    model = tiny_model().train()
    rows = [text(7, seed=1), text(2, seed=2)], [text(4, seed=3), text(5, seed=4)]
    want, want_gradients = packed_run(model, sum(rows, []))
    logits, got = packed_run(model, *rows)
    assert (logits.flatten(0, 1) - want[0]).abs().max() <= ATOL
    assert_close(got, want_gradients)


# What is allocated


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return output


def largest_tensor(implementation: str, rows: list[list[int]]) -> int:
    model = tiny_model(attn_implementation=implementation).train()
    with LargestTensor() as largest:
        packed_run(model, rows)
    return largest.elements


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_tensor_of_row_by_row_is_made_for_packed_samples(checkpointing):
    # 1,520 positions: a row by row tensor is three times the logits, the largest of the others.
    rows = [[*text(30, seed=i), *grown_image(), *text(40, seed=-i)] for i in range(20)]
    length = sum(map(len, rows))
    model = tiny_model().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with LargestTensor() as largest:
        packed_run(model, rows)
    assert largest.elements == length * 512
    assert largest_tensor("eager", rows) >= length**2


def test_many_short_samples_beside_a_long_one_take_no_more_than_twice_the_row():
    lengths = torch.tensor([900, 1, *[20] * 50, 7, *[400] * 3, *[2] * 100])
    packed = group_samples(torch.cat([torch.arange(n) for n in lengths])[None])
    assert sum(group.numel() for group in packed.groups) <= 2 * lengths.sum()


@pytest.mark.parametrize("seed", range(20))
def test_groups_hold_every_sample_in_its_order_and_as_much_filling_as_tokens_at_most(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.rand(30, generator=generator) * 9).exp2().long()
    starts = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    packed = group_samples(torch.cat([torch.arange(n) for n in lengths])[None])
    for group in packed.groups:
        assert group.numel() <= 2 * len(group.unique())
    places = torch.cat([group.flatten() for group in packed.groups])
    assert torch.equal(places[packed.places], torch.arange(total))
    found = {int(row[0]): row.unique_consecutive().tolist() for g in packed.groups for row in g}
    assert found == {
        start: list(range(start, start + length))
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
    }


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_of_one_sample_each_are_not_gathered(rows):
    assert group_samples(torch.arange(5).expand(rows, 5)) is None


def test_a_default_device_does_not_change_where_samples_are_found():
    position_ids = torch.tensor([[0, 1, 2, 0, 1]])
    with torch.device("meta"):
        packed = group_samples(position_ids)
    assert packed.places.tolist() == [0, 1, 2, 3, 4]


# Where attention is only causal, no mask is made


@pytest.fixture
def masks(monkeypatch):
    """The masks that attention is called with."""
    seen = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, is_causal=False, **options):
        seen.append(None if attn_mask is None else tuple(attn_mask.shape))
        return attention(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    return seen


def unlike_rows(side: str) -> dict[str, torch.Tensor]:
    return padded([text(9, seed=1), text(5, seed=2)], side)


@pytest.mark.parametrize(
    "inputs",
    [
        {"input_ids": torch.tensor([text(9)])},
        {"input_ids": torch.tensor([text(9)]), "attention_mask": torch.ones(1, 9)},
        {"input_ids": torch.tensor([text(9)]), "position_ids": torch.arange(9)[None]},
        unlike_rows("right"),
        pack([text(9), text(5)]),
    ],
    ids=["no mask", "ones", "positions", "padded on the right", "packed"],
)
def test_training_makes_no_mask_where_no_token_comes_after_padding(masks, inputs):
    tiny_model().train()(**inputs)
    assert len(masks) >= 2 and set(masks) == {None}


@pytest.mark.parametrize("holes", [unlike_rows("left")["attention_mask"], torch.ones(2, 9)])
def test_padding_before_a_token_is_masked(masks, holes):
    mask = holes.clone()
    mask[1, 3] = 0
    tiny_model().train()(input_ids=unlike_rows("left")["input_ids"], attention_mask=mask)
    assert masks == [(2, 1, 9, 9)] * 2


def test_a_batch_padded_on_the_right_has_the_logits_and_gradients_of_its_rows():
    model = tiny_model().train()
    rows = [row for row in samples(grown_image()) if len(row) > 1]
    want_logits, want = run_alone(model, rows)
    model.zero_grad()
    inputs = padded(rows, "right")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    images = torch.cat(images_of(rows))
    output = model(**inputs, labels=labels, pixel_values=images, num_items_in_batch=1)
    output.loss.backward()
    assert output.logits.isfinite().all()
    for got, logits in zip(output.logits, want_logits, strict=True):
        assert (got[: len(logits)] - logits).abs().max() <= ATOL
    assert_close(gradients(model), want)


# torch.compile


def compiled_model() -> GLM4VForCausalLM:
    model = tiny_model().train()
    torch._dynamo.reset()
    for layer in model.transformer.encoder.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    return model


def test_compiled_decoder_layers_take_packed_samples_in_one_graph():
    model = compiled_model()
    for rows in (samples(grown_image()), samples([])[:2], [text(8, seed=1), text(8, seed=2)]):
        want, want_gradients = packed_run(tiny_model().train(), rows)
        logits, got = packed_run(model, rows)
        assert (logits - want).abs().max() <= ATOL
        assert_close(got, want_gradients)


def test_the_lengths_of_packed_samples_make_no_new_graphs():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    model = tiny_model().train()
    for layer in model.transformer.encoder.layers:
        layer.compile(backend=counter, fullgraph=True)
    frames = []
    for rows in ((9, 7), (12, 8, 11), (10, 9, 9, 8), (30, 25, 20, 28, 31)):
        packed_run(model, [text(n, seed=n) for n in rows])
        frames.append(counter.frame_count)
    assert frames[1] == frames[-1]


# A cache


@torch.no_grad()
def test_packed_samples_may_fill_an_empty_cache():
    model = tiny_model()
    rows = samples(grown_image())
    inputs = pack(rows) | {"pixel_values": torch.cat(images_of(rows))}
    want = model(**inputs, use_cache=False).logits
    output = model(**inputs, use_cache=True)
    assert torch.equal(output.logits, want)
    assert output.past_key_values.get_seq_length() == want.shape[1]
