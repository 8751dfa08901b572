"""Generation: cached equals uncached, batches equal rows, whatever images the rows have."""

import copy

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList

from glm4v_patched.remote.generation_chatglm import ChatGLMGenerationMixin
from glm4v_patched.remote.keywords import CACHE
from tests.helpers.tiny import (
    BOI,
    EOI,
    PAD,
    grown_image,
    images_of,
    padded,
    pictures,
    text,
    three_id_image,
    tiny_model,
)
from tests.remote.rows import GREEDY, new_tokens
from tests.remote.rows import rows_with as rows_of_all_sorts

# fp32, cached against one pass. Measured 8.5e-6; positions that continue from the cache's length,
# not from the image's three, must fail.
ATOL = 2e-5
DRAWS_ANY = {"suppress_tokens": []}  # image ids, too


def rows_with(image: list[int]) -> list[list[int]]:
    """With 0, 1, 2 and 1 images."""
    return rows_of_all_sorts(image)[:4]


def batch_with(image: list[int]) -> dict[str, torch.Tensor]:
    return padded(rows_with(image), "left") | {"pixel_values": pictures(4)}


@torch.no_grad()
def by_hand(model, output, tokens: list[int], number: int = 8) -> tuple[list[int], list]:
    """Greedy decoding on a cache, a token at a time, of which the first are ``tokens``: what is
    drawn, and the logits after each."""
    drawn, logits = [], []
    for step in range(number):
        best = output.logits[0, -1].argmax().item()
        drawn.append(tokens[step] if step < len(tokens) else best)
        output = model(input_ids=torch.tensor([drawn[-1:]]), past_key_values=output.past_key_values)
        logits.append(output.logits[0, -1])
    return drawn, logits


@torch.no_grad()
def recomputed_tokens(model, row: list[int], images: torch.Tensor, number: int = 8) -> list[int]:
    """Greedy decoding by a full forward pass a token, without a cache or generate."""
    row, images = list(row), images if len(images) else None
    for _ in range(number):
        logits = model(input_ids=torch.tensor([row]), pixel_values=images, use_cache=False).logits
        logits[..., model._image_ids()] = -torch.inf  # which generate does not draw
        row.append(logits[0, -1].argmax().item())
    return row[-number:]


@pytest.mark.parametrize("use_cache", [True, False])
def test_tokens_of_a_padded_batch_equal_recomputed_rows(model, image, use_cache):
    rows = rows_with(image)
    want = [recomputed_tokens(model, *pair) for pair in zip(rows, images_of(rows), strict=True)]
    assert new_tokens(model, batch_with(image), use_cache=use_cache).tolist() == want
    assert len({tuple(tokens) for tokens in want}) == len(rows)


@pytest.mark.parametrize("with_mask", [True, False])
def test_rows_of_one_length_that_grow_differently_generate_as_alone(model, with_mask):
    rows = [[1, 2, *three_id_image(), 3, 4], text(7)]
    images = (pictures(1), [])
    alone = [recomputed_tokens(model, *pair) for pair in zip(rows, images, strict=True)]
    batch = padded(rows, "left") | {"pixel_values": pictures(1)}
    if not with_mask:
        del batch["attention_mask"]
    assert new_tokens(model, batch).tolist() == alone


@pytest.mark.parametrize("placeholder_is_padding", [False, True])
def test_given_positions_generate_as_derived_ones(model, image, placeholder_is_padding):
    batch = batch_with(image)
    if placeholder_is_padding:
        batch["attention_mask"] = (batch["input_ids"] != PAD).long()
    mask = batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
    want = new_tokens(model, batch)
    assert torch.equal(new_tokens(model, batch | {"position_ids": positions}), want)


@pytest.mark.parametrize("side", ["left", "right"])
def test_masks_that_take_the_placeholder_for_padding_lose_no_image(model, side):
    """The published placeholder is the padding id; collators and generate make such masks."""
    batch = padded(rows_with(three_id_image())[1:], side)
    images = {"images": pictures(4)}
    compared = batch | {"attention_mask": (batch["input_ids"] != PAD).long()}
    with torch.no_grad():
        got, want = (model(**inputs, **images).logits for inputs in (compared, batch))
    assert torch.equal(got, want)
    if side == "left":
        want = new_tokens(model, batch | images)
        assert torch.equal(new_tokens(model, compared | images), want)
        del compared["attention_mask"]
        assert torch.equal(new_tokens(model, compared | images), want)


@torch.no_grad()
def test_later_turns_on_a_cache_without_a_mask_equal_one_pass(model, image):
    first = [*text(3, seed=1), *image, *text(2, seed=2)]
    second, after = [*text(2, seed=3), *image, *text(1, seed=4)], text(6, seed=5)
    want = model(torch.tensor([first + second + after]), pixel_values=pictures(2)).logits[0]
    output = model(torch.tensor([first]), pixel_values=pictures(2)[:1], use_cache=True)
    cache, got = output.past_key_values, [output.logits[0]]
    pieces = [(second, pictures(2)[1:])]
    pieces += [(piece, None) for piece in (after[:3], after[3:])]
    for piece, images in pieces:
        output = model(torch.tensor([piece]), pixel_values=images, past_key_values=cache)
        got.append(output.logits[0])
    assert torch.cat(got).shape == want.shape
    assert (torch.cat(got) - want).abs().max() <= ATOL


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3, "num_return_sequences": 2}]
    # With one kept token, sampling is greedy.
    + [{"do_sample": True, "top_k": 1, "num_return_sequences": 2}],
    ids=["beams", "sampled"],
)
def test_several_answers_equal_those_of_the_rows_alone(model, image, options):
    rows = rows_with(image)
    got = new_tokens(model, batch_with(image), **options).unflatten(0, (len(rows), 2))
    for row, images, answers in zip(rows, images_of(rows), got, strict=True):
        alone = {"input_ids": torch.tensor([row])}
        alone |= {"pixel_values": images} if len(images) else {}
        assert torch.equal(answers, new_tokens(model, alone, **options))


@pytest.mark.parametrize("num_beams", [1, 2])
def test_another_number_of_images_is_refused(model, num_beams):
    batch = {"input_ids": torch.tensor([rows_with(three_id_image())[2]])}
    with pytest.raises(ValueError, match="3 images were given for 2 begin-of-image ids"):
        new_tokens(model, batch | {"pixel_values": pictures(3)}, num_beams=num_beams)


def test_prompt_tuning_generates(model):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned = peft.get_peft_model(tiny_model(), config).eval()
    batch = padded([text(5, seed=1), text(5, seed=2)], "left")
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    if CACHE == "cache" and Version(peft.__version__) < Version("0.22"):
        # With any model: peft looks for the cache by its old name and takes each step for a first.
        with pytest.raises(ValueError, match="give one entry for every cached position"):
            tuned.generate(**batch, **options)
        return
    got = tuned.generate(**batch, **options)
    ids = batch["input_ids"]
    for _ in range(4):
        with torch.no_grad():
            mask = torch.ones_like(ids)
            logits = tuned(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logits[..., model._image_ids()] = -torch.inf  # which generate does not draw
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), dim=1)
    assert got[:, -4:].tolist() == ids[:, -4:].tolist()


@pytest.mark.parametrize(
    ("row", "number", "told"),
    [
        (text(4), 2, "2 images were given with inputs_embeds.*give input_ids"),
        (three_id_image(), 1, "inputs_embeds has 3 positions but its rows take 6"),
    ],
)
def test_images_that_embeddings_have_no_place_for_are_refused(model, row, number, told):
    embeds = model.get_input_embeddings()(torch.tensor([row])).detach()
    with pytest.raises(ValueError, match=told):
        model.generate(inputs_embeds=embeds, pixel_values=pictures(number), **GREEDY)


# Begin and end ids that were drawn


class Draws(LogitsProcessor):
    """Makes generation draw given tokens first."""

    def __init__(self, prompt_length: int, tokens: list[int]):
        self.prompt_length, self.tokens = prompt_length, tokens

    def __call__(self, input_ids, scores):
        step = input_ids.shape[1] - self.prompt_length
        if step < len(self.tokens):
            scores = torch.full_like(scores, float("-inf"))
            scores[:, self.tokens[step]] = 0
        return scores


def drawing(row: list[int], tokens: list[int]) -> LogitsProcessorList:
    return LogitsProcessorList([Draws(len(row), tokens)])


# What a place without its picture looks like, too.
AMBIGUOUS = [[BOI, EOI], [BOI, 7, EOI], [7, BOI, 8, BOI]]
STRAYS = [[BOI], [EOI, 7, BOI], [BOI, 7, 8, EOI, 3]]


@pytest.mark.parametrize("prompt", ["text", "image"])
@pytest.mark.parametrize("drawn", [*STRAYS, *AMBIGUOUS[:2]], ids=str)
def test_drawn_image_ids_are_ordinary_tokens(model, drawn, prompt, image):
    row = rows_with(image)[0 if prompt == "text" else 1]
    batch = {"input_ids": torch.tensor([row])}
    batch |= {"pixel_values": pictures(1)} if prompt == "image" else {}
    with torch.no_grad():
        want, _ = by_hand(model, model(**batch, use_cache=True), drawn)
    for use_cache in (True, False):
        options = DRAWS_ANY | {"logits_processor": drawing(row, drawn), "use_cache": use_cache}
        assert new_tokens(model, batch, **options)[0].tolist() == want


def first_round(model, image: list[int], drawn: list[int]) -> tuple[list[int], DynamicCache]:
    """A prompt and its answer, which begins with ``drawn``, and their cache."""
    first = [*text(3, seed=1), *image, *text(2, seed=2)]
    cache = DynamicCache(config=model.config)
    given = {"pixel_values": pictures(1), "past_key_values": cache} | GREEDY
    ids = model.generate(torch.tensor([first]), logits_processor=drawing(first, drawn), **given)
    ids = ids[0].tolist()
    assert ids[len(first) : len(first) + len(drawn)] == drawn
    return ids, cache


@pytest.mark.parametrize("drawn", AMBIGUOUS, ids=str)
def test_drawn_ids_that_may_be_a_place_are_refused_in_a_later_round(model, image, drawn):
    ids, cache = first_round(model, image, drawn)
    row = torch.tensor([[*ids, *text(4, seed=3)]])
    for kept in ({}, {"past_key_values": cache}):
        with pytest.raises(ValueError, match="begin-of-image ids|has 0 ids"):
            model.generate(row, pixel_values=pictures(1), **kept, **GREEDY)
    with pytest.raises(ValueError, match="begin-of-image ids|has 0 ids"):
        model(row, pixel_values=pictures(1))


@pytest.mark.parametrize("drawn", STRAYS, ids=str)
@pytest.mark.parametrize("brings_image", [False, True])
def test_a_later_round_takes_drawn_ids_for_what_they_are(model, image, drawn, brings_image):
    ids, cache = first_round(model, image, drawn)
    second = [*text(2, seed=3), *(image if brings_image else []), *text(3, seed=4)]
    images, new = (pictures(2), pictures(2)[1:]) if brings_image else (pictures(1), None)
    batch = {"input_ids": torch.tensor([[*ids, *second]])}
    # By hand: the first round's cache, which lacks its last id, the second's ids, then the answer.
    with torch.no_grad():
        kept = copy.deepcopy(cache)
        model(input_ids=torch.tensor([ids[-1:]]), past_key_values=kept)
        output = model(torch.tensor([second]), pixel_values=new, past_key_values=kept)
        want, _ = by_hand(model, output, [])
    answers = [
        new_tokens(model, batch | {"pixel_values": images}, **DRAWS_ANY, use_cache=use)
        for use in (True, False)
    ]
    for of_round in (images, new):
        given = {"pixel_values": of_round, "past_key_values": copy.deepcopy(cache)}
        answers.append(new_tokens(model, batch | given, **DRAWS_ANY))
    assert [tokens[0].tolist() for tokens in answers] == [want] * 4


# Prompt lookup of transformers 4.57 wants an id to stop at.
ASSISTED = {"eos_token_id": 498}


@pytest.mark.parametrize("assistant", ["same", "other", "lookup"])
@pytest.mark.parametrize("prompt", ["text", "image", "a drawn pair"])
@pytest.mark.parametrize("drawn", [[], [BOI, 7, EOI], [7, EOI, BOI, 8, BOI]], ids=str)
def test_assisted_generation_draws_what_the_model_alone_draws(model, assistant, prompt, drawn):
    row = [*rows_with(grown_image())[0 if prompt == "text" else 1], 7, 8, 7, 8, 7]
    if "drawn" in prompt:  # of a round before
        row = [*row, BOI, 7, 8, EOI, *text(2), 7, 8, 7]
    batch = {"input_ids": torch.tensor([row])}
    if prompt != "text":
        batch["pixel_values"] = pictures(1)
    draws = {"logits_processor": drawing(row, drawn)}
    options = {"prompt_lookup_num_tokens": 3} | ASSISTED
    if assistant != "lookup":
        other = tiny_model()
        # Several rounds, of which the later ones find drawn ids in what they are given.
        other.generation_config.num_assistant_tokens = 2
        other.generation_config.num_assistant_tokens_schedule = "constant"
        if assistant == "other":
            with torch.no_grad():
                other.transformer.output_layer.weight.add_(0.2)
        options = {"assistant_model": other}
    want = new_tokens(model, batch, **draws)
    assert torch.equal(new_tokens(model, batch, **draws, **options), want)


def test_assisted_generation_of_rows_that_grow_is_right_or_refused(model):
    for row in [*rows_with(three_id_image()), [*text(20, seed=1), *three_id_image()]]:
        batch = {"input_ids": torch.tensor([row])}
        if BOI in row:
            batch["pixel_values"] = pictures(row.count(BOI))
        want = new_tokens(model, batch)
        try:
            got = new_tokens(model, batch, prompt_lookup_num_tokens=2, **ASSISTED)
        except ValueError as error:
            assert "inside of an image" in str(error) and BOI in row
        else:
            assert torch.equal(got, want)


# Continuous batching


def generate_batch(model, rows: list[list[int]]) -> list:
    from transformers import ContinuousBatchingConfig

    sizes = ContinuousBatchingConfig(num_blocks=8, block_size=32, max_batch_tokens=64)
    config = GenerationConfig(**GREEDY)
    config.eos_token_id = -1  # transformers puts it there itself, with a warning
    answers = model.generate_batch(
        rows, generation_config=config, continuous_batching_config=sizes, progress_bar=False
    )
    return list(answers.values())


continuous_batching = pytest.mark.skipif(
    not hasattr(transformers, "ContinuousBatchingConfig"),
    reason="continuous batching of transformers 4.57 runs on GPUs only",
)


@continuous_batching
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_continuous_batching_gives_the_tokens_of_generate(implementation):
    model = tiny_model(attn_implementation=implementation)
    rows = [text(9, seed=1), text(5, seed=2)]
    want = [new_tokens(model, {"input_ids": torch.tensor([row])})[0].tolist() for row in rows]
    answers = generate_batch(model, rows)
    assert [answer.generated_tokens for answer in answers] == want
    assert model.config._attn_implementation == implementation


@continuous_batching
def test_continuous_batching_refuses_rows_with_images(image):
    row = [*text(3, seed=1), *image, 5]
    with pytest.raises(ValueError, match="row 2 of 2 has a picture .*answer such rows with gener"):
        generate_batch(tiny_model(), [text(3, seed=1), row])
    model = tiny_model()
    model.generate_batch = super(ChatGLMGenerationMixin, model).generate_batch
    for answer in generate_batch(model, [row]):  # transformers 5.12 has none of a row that failed
        assert "0 images were given for 1 begin-of-image ids" in str(answer.error)
        assert not answer.generated_tokens
