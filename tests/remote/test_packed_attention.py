"""Packed samples are computed as if each were alone, without a mask over the packed sequence.

Their position ids and labels are tested in test_image_layout.py.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glm4v_patched.remote.attention import group_samples
from tests.helpers.tiny import expanded_image, images_of, padded, shallow_model, text, tiny_model
from tests.remote.inputs import assert_close, gradients

# Of the largest gradient, in fp32: the same sample in a matmul of another shape. Measured
# 1.8e-6; samples that saw each other differed by 1.1.
RTOL = 1e-5


def samples(image: list[int]) -> list[list[int]]:
    """Samples whose lengths make several groups, the first and the last without padding."""
    rows = [*text(4, seed=1), *image, *text(40, seed=2)], text(3, seed=3)
    two = [*image, *text(6, seed=4), *image, *text(2, seed=5)]
    return [*rows, two, text(1, seed=7), [*text(30, seed=8), *image], text(3, seed=9)]


def pack(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([sum(rows, [])])
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    inputs = {"input_ids": ids, "position_ids": positions, "labels": ids, "num_items_in_batch": 1}
    return inputs | {"pixel_values": torch.cat(images_of(rows))}


def assert_equals(actual: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert_close(actual, want, RTOL * max(gradient.abs().max() for gradient in want.values()))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("use_reentrant", [None, False])
def test_packed_samples_have_the_gradients_of_samples_alone(image, use_reentrant, implementation):
    model, want = tiny_model(attn_implementation=implementation).train(), {}
    rows = samples(image)
    for row, images in zip(rows, images_of(rows), strict=True):
        alone = pack([row]) | {"position_ids": None, "pixel_values": images}
        for name, value in gradients(model, **alone).items():
            want[name] = want.get(name, 0) + value
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_equals(gradients(model, **pack(rows)), want)


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return output


@pytest.mark.parametrize("implementation", ["sdpa, checkpointed", "eager"])
def test_no_mask_of_length_by_length_is_made_for_packed_samples(implementation):
    # 1,520 positions: a length by length mask is three times the logits, the next largest tensor.
    rows = [[*text(30, seed=i), *expanded_image(), *text(40, seed=-i)] for i in range(20)]
    length = sum(map(len, rows))
    model = tiny_model(attn_implementation=implementation.split(",")[0]).train()
    if "checkpointed" in implementation:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with LargestTensor() as largest:
        gradients(model, **pack(rows))
    if implementation == "eager":
        assert largest.elements >= length**2
    else:
        assert largest.elements == length * 512


LENGTHS = [torch.tensor([900, 1, *[20] * 50, 7, *[400] * 3, *[2] * 100]), torch.tensor([3, 2])]
for seed in range(20):
    random = torch.rand(30, generator=torch.Generator().manual_seed(seed))
    LENGTHS.append((random * 9).exp2().long())


@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
def test_groups_have_every_sample_in_order_and_at_most_half_padding(lengths):
    assert group_samples(torch.arange(5).expand(2, 5)) is None  # of one sample each
    starts = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    packed = group_samples(torch.cat([torch.arange(n) for n in lengths])[None])
    for group in packed.group_indices:
        assert group.numel() <= 2 * len(group.unique())
    slots = torch.cat([group.flatten() for group in packed.group_indices])
    assert torch.equal(slots[packed.inverse_indices], torch.arange(total))
    samples = {
        int(row[0]): row.unique_consecutive().tolist() for g in packed.group_indices for row in g
    }
    assert samples == {
        start: list(range(start, start + length))
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
    }


@pytest.fixture
def masks(monkeypatch):
    """Record the masks that attention is called with."""
    seen = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, is_causal=False, **options):
        seen.append(None if attn_mask is None else tuple(attn_mask.shape))
        return attention(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    return seen


def test_training_makes_no_mask_where_no_token_comes_after_padding(masks):
    model, rows = tiny_model().train(), [text(9, seed=1), text(5, seed=2)]
    model(torch.tensor(rows[:1]), attention_mask=torch.ones(1, 9))
    model(**padded(rows, "right"))
    model(**pack(rows))
    assert len(masks) >= 6 and set(masks) == {None}
    masks.clear()
    hole = torch.ones(1, 9)
    hole[0, 3] = 0
    model(torch.tensor(rows[:1]), attention_mask=hole)
    assert masks == [(1, 1, 9, 9)] * 2


def test_compiled_layers_take_packed_samples_in_one_graph_whatever_their_lengths():
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    model = shallow_model().train()
    for layer in model.transformer.encoder.layers:
        layer.compile(backend=counter, fullgraph=True)
    frames = []
    batches = [
        [text(n, seed=n) for n in lengths] for lengths in ((9, 7), (12, 8, 11), (30, 25, 20, 28))
    ]
    for rows in batches:
        want = gradients(shallow_model().train(), **pack(rows))
        assert_equals(gradients(model, **pack(rows)), want)
        frames.append(counter.frame_count)
    assert frames[1] == frames[2]
