"""torch.export and ONNX: a program runs at other sizes than those it was exported with.

Dimensions that vary are at least 2 in the example: ``torch.export`` takes 0 and 1 for constants.
"""

from collections.abc import Callable
from itertools import product

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.export import Dim
from transformers import DynamicCache
from transformers.integrations.executorch import register_dynamic_cache_export_support

from glm4v_patched.remote.modeling_chatglm import ChatGLMForSequenceClassification
from tests.helpers.tiny import (
    PAD,
    expanded_image,
    random_pixels,
    shallow_model,
    text,
    tiny_config,
    unexpanded_image,
)

ATOL = 1e-5
varies_in_images = pytest.mark.skipif(
    Version(transformers.__version__).major < 5,
    reason="attention of transformers 4.57 takes the number of images for a constant",
)
SIZES = [(1, 1), (1, 2), (2, 2), (3, 1), (3, 20)]  # rows, and ids of each


@pytest.fixture(scope="module")
def model():
    return shallow_model(use_cache=False)


def text_ids(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([text(length, seed=row) for row in range(rows)])}


def padded(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Padded on the left in the first sequence and on the right in the second, if long enough."""
    batch = text_ids(rows, length)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, : (length - 1) // 2] = 0
    mask[1:2, length - (length - 1) // 3 :] = 0
    return batch | {"attention_mask": mask}


def with_all(rows: int, length: int) -> dict[str, torch.Tensor]:
    batch = padded(rows, length)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100)
    return batch | {"position_ids": (mask.cumsum(1) - 1).clamp(min=0), "labels": labels}


def packed(rows: int, length: int) -> dict[str, torch.Tensor]:
    """The last sequence has a second packed sample, if it is long enough."""
    positions = torch.arange(length).repeat(rows, 1)
    positions[-1, length // 2 :] -= length // 2
    return text_ids(rows, length) | {"position_ids": positions}


def with_images(image: list[int], labeled=False) -> Callable[[int, int], dict[str, torch.Tensor]]:
    """Each sequence has one image more than the next, so they expand to different lengths."""

    def make(rows: int, length: int) -> dict[str, torch.Tensor]:
        longest = 1 + rows * len(image) + length
        prefixes = [[*text(1), *image * (rows - row)] for row in range(rows)]
        ids = torch.tensor([[*row, *text(longest - len(row), seed=2)] for row in prefixes])
        batch = {"input_ids": ids, "pixel_values": random_pixels(sum(range(rows + 1)))}
        if not labeled:
            return batch
        mask = torch.ones_like(ids)
        mask[0, 0] = 0
        labels = ids.masked_fill((ids >= PAD) | (mask == 0), -100)
        return batch | {"attention_mask": mask, "labels": labels}

    return make


def exported(model: nn.Module, batch: dict) -> nn.Module:
    """Export ``model`` with dynamic batch size and length."""
    dynamic = {
        name: dict.fromkeys(range(1 if name == "pixel_values" else 2), Dim.DYNAMIC)
        if isinstance(value, torch.Tensor)
        else None
        for name, value in batch.items()
    }
    return torch.export.export(model, (), batch, dynamic_shapes=dynamic, strict=False).module()


@torch.no_grad()
def check(model: nn.Module, *makes: Callable[[int, int], dict], sizes=SIZES) -> nn.Module:
    """Export with the first kind of batch; compare loss and logits of the program and the model."""
    program = exported(model, makes[0](2, 9))
    for make, size in product(makes, sizes):
        batch = make(*size)
        actual, want = program(**batch), model(**batch)
        if want.loss is not None:
            assert (actual.loss - want.loss).abs() <= ATOL, size
        assert actual.logits.shape == want.logits.shape
        tokens = tokens_of(batch, want.logits)
        assert (actual.logits - want.logits)[tokens].abs().max() <= ATOL, size
    return program


def tokens_of(batch: dict, logits: torch.Tensor) -> torch.Tensor:
    """Mask of tokens that are not padding: outputs at padding are arbitrary."""
    mask = batch.get("attention_mask")
    if mask is None or mask.shape != logits.shape[:2]:
        return torch.ones(logits.shape[:2], dtype=torch.bool)
    return mask.bool()


@pytest.mark.parametrize("make", [pytest.param(text_ids, marks=pytest.mark.slow), with_all])
def test_text_runs_at_other_sizes(model, monkeypatch, make):
    monkeypatch.setattr(model.config, "original_rope", make is text_ids)
    program = check(model, make)
    wrong = {"input_ids": make(2, 9)["input_ids"] + 512}
    with pytest.raises(RuntimeError, match="does not fit a compiled graph"):
        program(**make(2, 9) | wrong)


@varies_in_images
@pytest.mark.parametrize("labeled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_program_takes_unexpanded_and_expanded_prompts_with_any_number_of_images(model, labeled):
    makes = [with_images(image, labeled) for image in (unexpanded_image(), expanded_image())]
    program = check(model, *makes, sizes=[(1, 0), (2, 0), (3, 12)])
    batch = makes[0](2, 9)
    with pytest.raises(RuntimeError, match="does not fit a compiled graph"):
        program(**batch | {"pixel_values": batch["pixel_values"][1:]})


@varies_in_images
@pytest.mark.slow
def test_packed_sequences_with_images_run_at_other_sizes(model):
    def make(rows: int, length: int) -> dict[str, torch.Tensor]:
        sample = [*text(2), *unexpanded_image(), *text(length)]
        positions = [*range(len(sample))] * 2
        return {
            "input_ids": torch.tensor([[*sample, *sample]] * rows),
            "position_ids": torch.tensor([positions] * rows),
            "pixel_values": random_pixels(2 * rows),
        }

    check(model, make, sizes=[(1, 1), (3, 9)])


@varies_in_images
@pytest.mark.slow
def test_embeddings_run_at_other_sizes_and_cannot_be_expanded(model):
    def embed(image: list[int]) -> Callable[[int, int], dict[str, torch.Tensor]]:
        def make(rows: int, length: int) -> dict[str, torch.Tensor]:
            batch = with_images(image)(rows, length)
            embeds = model.get_input_embeddings()(batch.pop("input_ids")).detach()
            return batch | {"inputs_embeds": embeds, "logits_to_keep": 1}

        return make

    program = check(model, embed(expanded_image()), sizes=[(1, 0), (3, 9)])
    with pytest.raises(RuntimeError):
        program(**embed(unexpanded_image())(2, 9))


@varies_in_images
@pytest.mark.slow
@torch.no_grad()
def test_the_tower_runs_for_other_numbers_of_images(model):
    class Features(nn.Module):
        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return model.get_image_features(pixel_values, return_dict=True).pooler_output

    tower = exported(Features(), {"pixel_values": random_pixels(2)})
    for number in (1, 3):
        want = Features()(random_pixels(number))
        assert (tower(pixel_values=random_pixels(number)) - want).abs().max() <= ATOL


@varies_in_images
@pytest.mark.slow
def test_a_classifier_runs_at_other_sizes():
    torch.manual_seed(0)
    config = tiny_config(num_layers=1, use_cache=False, num_labels=3, initializer_range=0.1)
    classifier = ChatGLMForSequenceClassification(config).eval()

    def ending_in_padding(rows: int, length: int) -> dict[str, torch.Tensor]:
        batch = with_images(unexpanded_image())(rows, length)
        ids = torch.nn.functional.pad(batch["input_ids"], (0, 2), value=PAD)
        return batch | {"input_ids": ids}

    check(classifier, ending_in_padding, sizes=[(1, 0), (3, 9)])


@pytest.mark.slow
@torch.no_grad()
def test_a_step_goes_on_from_a_cache_of_another_length(model):
    register_dynamic_cache_export_support()

    def after(rows: int, num_cached: int, new: int) -> dict:
        cache = DynamicCache()
        model(**text_ids(rows, num_cached), past_key_values=cache)
        copy = DynamicCache()
        for number, layer in enumerate(cache.layers):
            copy.update(layer.keys, layer.values, number)
        positions = torch.arange(num_cached, num_cached + new).repeat(rows, 1)
        return text_ids(rows, new) | {"position_ids": positions, "past_key_values": copy}

    both = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    entries = [{0: Dim.DYNAMIC, 2: Dim.DYNAMIC}]
    dynamic = {"input_ids": both, "position_ids": both, "past_key_values": [entries, entries]}
    options = {"dynamic_shapes": dynamic, "strict": False}
    step = torch.export.export(model, (), after(2, 9, 3), **options).module()
    for size in ((1, 4, 1), (2, 30, 1), (3, 5, 2)):
        want = model(**after(*size)).logits
        assert (step(**after(*size)).logits - want).abs().max() <= ATOL


@pytest.mark.parametrize("make", [padded, packed, with_images(unexpanded_image())])
@torch.no_grad()
def test_onnx_runtime_runs_it_at_other_sizes(model, make, tmp_path):
    reason = "the session clients of tests/noxfile.py installs it"
    runtime = pytest.importorskip("onnxruntime", reason=reason)
    names = [*make(2, 9)]

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return self.model(**dict(zip(names, inputs, strict=True))).logits

    dynamic = tuple(
        {0: Dim.DYNAMIC} if name == "pixel_values" else {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
        for name in names
    )
    example = tuple(make(2, 9).values())
    # The shapes are those of the one parameter, ``*inputs``.
    program = torch.onnx.export(
        Logits().eval(), example, dynamo=True, dynamic_shapes=(dynamic,), verbose=False
    )
    program.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    for size in SIZES:
        batch = make(*size)
        inputs = zip(session.get_inputs(), batch.values(), strict=True)
        [actual] = session.run(None, {entry.name: value.numpy() for entry, value in inputs})
        want = model(**batch).logits
        off, tokens = torch.from_numpy(actual) - want, tokens_of(batch, want)
        assert actual.shape == want.shape
        # Sequences with fewer images are padded on the left, where outputs are arbitrary.
        assert (off[:, -1:] if "pixel_values" in batch else off[tokens]).abs().max() <= 1e-4, size
