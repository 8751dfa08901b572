"""Generation: cached equals uncached, batches equal rows, whatever images the rows have."""

import copy

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)

from glm4v_patched.remote.generation_chatglm import ChatGLMGenerationMixin
from glm4v_patched.remote.keywords import CACHE
from tests.helpers.tiny import (
    BOI,
    EOI,
    FILL,
    PAD,
    grown_image,
    images_of,
    padded,
    pictures,
    text,
    three_id_image,
    tiny_model,
)

# fp32, cached against one pass. Measured 8.5e-6; positions that continue from the cache's length,
# not from the image's three, must fail.
ATOL = 2e-5
FORMS = pytest.mark.parametrize(
    "image", [three_id_image(), grown_image()], ids=["three ids", "grown"]
)
DRAWS_ANY = {"suppress_tokens": []}  # image ids, too
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 500}


def rows_with(image: list[int]) -> list[list[int]]:
    """Unlike lengths, with 0, 1, 2 and 1 images."""
    return [
        text(9, seed=1),
        [*text(4, seed=2), *image, *text(6, seed=3)],
        [*text(2, seed=4), *image, *image, *text(3, seed=5)],
        [*image, *text(2, seed=6)],
    ]


def new_tokens(model, batch: dict, **options) -> torch.Tensor:
    length = batch["input_ids"].shape[1] if "input_ids" in batch else 0
    return model.generate(**batch, **(GREEDY | options))[:, length:]


@torch.no_grad()
def recomputed_tokens(model, row: list[int], images: torch.Tensor, number: int = 8) -> list[int]:
    """Greedy decoding by a full forward pass a token, without a cache or generate."""
    row = list(row)
    for _ in range(number):
        images = images if len(images) else None
        logits = model(input_ids=torch.tensor([row]), pixel_values=images, use_cache=False).logits
        row.append(logits[0, -1].argmax().item())
        images = [] if images is None else images
    return row[-number:]


@FORMS
@pytest.mark.parametrize("use_cache", [True, False])
def test_tokens_of_a_padded_batch_equal_recomputed_rows(model, image, use_cache):
    rows = rows_with(image)
    batch = padded(rows, "left") | {"pixel_values": pictures(4)}
    want = [recomputed_tokens(model, *pair) for pair in zip(rows, images_of(rows), strict=True)]
    assert new_tokens(model, batch, use_cache=use_cache).tolist() == want
    assert len({tuple(tokens) for tokens in want}) == len(rows)


@FORMS
def test_images_is_another_name_for_pixel_values(model, image):
    row = torch.tensor([rows_with(image)[2]])
    named = [
        new_tokens(model, {"input_ids": row, name: images})
        for name in ("pixel_values", "images")
        for images in (pictures(2), list(pictures(2)))
    ]
    for tokens in named[1:]:
        assert torch.equal(tokens, named[0])
    assert not torch.equal(
        new_tokens(model, {"input_ids": row, "images": pictures(2, seed=9)}), named[0]
    )


@FORMS
def test_given_positions_generate_as_derived_ones(model, image):
    rows = rows_with(image)
    batch = padded(rows, "left") | {"pixel_values": pictures(4)}
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    want = new_tokens(model, batch)
    assert torch.equal(new_tokens(model, batch | {"position_ids": positions}), want)


@FORMS
def test_positions_counted_by_a_mask_that_takes_the_placeholder_for_padding(model, image):
    """As transformers' suite of generation counts them; not for two samples in one row."""
    rows = rows_with(image)
    batch = padded(rows, "left") | {"pixel_values": pictures(4)}
    batch["attention_mask"] = (batch["input_ids"] != PAD).long()
    positions = batch["attention_mask"].cumsum(1) - 1
    positions = positions.masked_fill(batch["attention_mask"] == 0, 0)
    want = new_tokens(model, batch)
    assert torch.equal(new_tokens(model, batch | {"position_ids": positions}), want)


@torch.no_grad()
def test_positions_that_restart_inside_an_image_are_refused(model):
    ids = torch.tensor([[*text(3, seed=1), *grown_image(), *text(3, seed=2)]])
    positions = torch.arange(ids.shape[1])[None]
    inside = {"input_ids": ids, "pixel_values": pictures(1)}
    for mask in ({}, {"attention_mask": torch.ones_like(ids)}):
        for place in (4, 7, 8):  # the first id inside, the last, the end
            given = positions.clone()
            given[0, place] = 0
            with pytest.raises(ValueError, match="position_ids are 0 at 1 places between the begi"):
                model(**inside, **mask, position_ids=given)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_masks_that_take_the_placeholder_for_padding_lose_no_image(model, side, given):
    """The published placeholder is the padding id; collators and generate make such masks."""
    rows = rows_with(three_id_image())[1:]
    batch = padded(rows, side)
    images = {"pixel_values": pictures(4)}
    compared = {"attention_mask": (batch["input_ids"] != PAD).long()} if given else {}
    compared["input_ids"] = batch["input_ids"]
    if side == "left":
        assert torch.equal(new_tokens(model, compared | images), new_tokens(model, batch | images))
    if given:
        with torch.no_grad():
            got, want = (model(**inputs, **images).logits for inputs in (compared, batch))
        assert torch.equal(got, want)


@FORMS
@pytest.mark.parametrize("chunk", [1, 3])
@torch.no_grad()
def test_cached_chunks_without_a_mask_equal_one_pass(model, image, chunk):
    row = [*text(3, seed=1), *image, *text(2, seed=2), *image, *text(1, seed=3)]
    after = text(6, seed=4)
    want = model(input_ids=torch.tensor([row + after]), pixel_values=pictures(2)).logits[0]
    output = model(input_ids=torch.tensor([row]), pixel_values=pictures(2), use_cache=True)
    cache, got = output.past_key_values, [output.logits[0]]
    for start in range(0, len(after), chunk):
        ids = torch.tensor([after[start : start + chunk]])
        got.append(model(input_ids=ids, past_key_values=cache).logits[0])
    assert (torch.cat(got) - want).abs().max() <= ATOL


@FORMS
@torch.no_grad()
def test_an_image_in_a_later_turn_equals_one_pass(model, image):
    """The second turn is fed on top of the cache, with its own image alone."""
    first = [*text(3, seed=1), *image, *text(2, seed=2)]
    second = [*text(2, seed=3), *image, *text(4, seed=4)]
    images = pictures(2)
    want = model(input_ids=torch.tensor([first + second]), pixel_values=images).logits[0]
    output = model(input_ids=torch.tensor([first]), pixel_values=images[:1], use_cache=True)
    later = model(
        input_ids=torch.tensor([second]),
        pixel_values=images[1:],
        past_key_values=output.past_key_values,
    )
    got = torch.cat((output.logits[0], later.logits[0]))
    assert got.shape == want.shape
    assert (got - want).abs().max() <= ATOL


@FORMS
def test_beams_and_several_answers_equal_those_of_the_rows_alone(model, image):
    rows = rows_with(image)
    batch = padded(rows, "left") | {"pixel_values": pictures(4)}
    options = {"num_beams": 3, "num_return_sequences": 2}
    got = new_tokens(model, batch, **options).unflatten(0, (len(rows), 2))
    for row, images, answers in zip(rows, images_of(rows), got, strict=True):
        alone = {"input_ids": torch.tensor([row])}
        if len(images):
            alone["pixel_values"] = images
        assert torch.equal(answers, new_tokens(model, alone, **options))


@FORMS
def test_sampled_answers_see_the_images_of_their_row(model, image):
    """With one kept token, sampling is greedy: every answer is that of its row."""
    rows = rows_with(image)
    batch = padded(rows, "left") | {"pixel_values": pictures(4)}
    got = new_tokens(model, batch, do_sample=True, top_k=1, num_return_sequences=3)
    assert torch.equal(got, new_tokens(model, batch).repeat_interleave(3, dim=0))


def test_refuses_too_many_images_for_several_answers(model):
    row = torch.tensor([rows_with(three_id_image())[1]])
    with pytest.raises(ValueError, match="2 images were given for 1 begin-of-image ids"):
        new_tokens(model, {"input_ids": row, "pixel_values": pictures(2)}, num_beams=2)


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_refuses_another_number_of_images(model, wrong):
    batch = {"input_ids": torch.tensor([rows_with(three_id_image())[2]])}
    batch["pixel_values"] = pictures(wrong)
    with pytest.raises(ValueError, match=f"{wrong} images were given for 2 begin-of-image ids"):
        new_tokens(model, batch)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("with_mask", [True, False])
def test_rows_of_one_length_that_grow_differently_generate_as_alone(model, with_mask, use_cache):
    rows = [[1, 2, *three_id_image(), 3, 4], text(7)]
    images = (pictures(1), [])
    alone = [recomputed_tokens(model, *pair) for pair in zip(rows, images, strict=True)]
    batch = padded(rows, "left") | {"pixel_values": pictures(1)}
    if not with_mask:
        del batch["attention_mask"]
    assert new_tokens(model, batch, use_cache=use_cache).tolist() == alone


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
    ids, mask = batch["input_ids"], batch["attention_mask"]
    for _ in range(4):
        with torch.no_grad():
            logits = tuned(input_ids=ids, attention_mask=mask, use_cache=False).logits
        # Which generate does not draw.
        logits[..., [model.config.boi_token_id, model.config.eoi_token_id]] = -torch.inf
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), dim=1)
        mask = torch.ones_like(ids)
    assert got[:, -4:].tolist() == ids[:, -4:].tolist()


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


@FORMS
@pytest.mark.parametrize("prompt", ["text", "image"])
@pytest.mark.parametrize(
    "drawn",
    [
        [BOI],
        [EOI],
        [BOI, EOI],
        [EOI, 7, BOI],
        [BOI, 7, 7, EOI, 3],
        [BOI, 7, EOI],
    ],
    ids=str,
)
def test_drawn_image_ids_are_ordinary_tokens(model, drawn, prompt, image):
    row = rows_with(image)[0 if prompt == "text" else 1]
    batch = {"input_ids": torch.tensor([row])}
    if prompt == "image":
        batch["pixel_values"] = pictures(1)
    draws = DRAWS_ANY | {"logits_processor": LogitsProcessorList([Draws(len(row), drawn)])}
    got = new_tokens(model, batch, **draws)[0].tolist()
    assert got[: len(drawn)] == drawn
    without_cache = new_tokens(model, batch, **draws, use_cache=False)
    assert without_cache[0].tolist() == got

    # The same by hand, on a cache, one id at a time.
    with torch.no_grad():
        output = model(**batch, use_cache=True)
        tokens = []
        for step in range(8):
            tokens.append(
                drawn[step] if step < len(drawn) else output.logits[0, -1].argmax().item()
            )
            output = model(
                input_ids=torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values
            )
    assert got == tokens


def test_training_mode_generates_the_same(model):
    batch = {"input_ids": torch.tensor([rows_with(grown_image())[1]]), "pixel_values": pictures(1)}
    want = new_tokens(model, batch)
    try:
        assert torch.equal(new_tokens(model.train(), batch), want)
    finally:
        model.eval()


@pytest.mark.parametrize("name", ["pixel_values", "images"])
def test_refuses_images_that_embeddings_have_no_place_for(model, name):
    embeds = model.get_input_embeddings()(torch.tensor([text(4)])).detach()
    with pytest.raises(ValueError, match="2 images were given with inputs_embeds.*give input_ids"):
        model.generate(inputs_embeds=embeds, **{name: pictures(2)}, **GREEDY)
    ids = torch.tensor([three_id_image()])
    with pytest.raises(ValueError, match="1 images were given with inputs_embeds.*give input_ids"):
        model.generate(ids, inputs_embeds=embeds, **{name: pictures(1)}, **GREEDY)
    short = model.get_input_embeddings()(ids).detach()
    with pytest.raises(ValueError, match="inputs_embeds has 3 positions but its rows take 6"):
        model.generate(inputs_embeds=short, **{name: pictures(1)}, **GREEDY)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"num_return_sequences": 2}])
def test_embeddings_of_rows_with_images_generate_the_same(model, options):
    rows = padded([rows_with(grown_image())[1], [*text(2), *grown_image() * 2, 5]], "left")
    if "num_return_sequences" in options:
        options = options | {"num_beams": 2}
    given = rows | {"pixel_values": pictures(3)}
    want = new_tokens(model, given, **options)
    embeds = model.get_input_embeddings()(rows["input_ids"])
    assert torch.equal(
        model(**given).logits,
        model(
            inputs_embeds=embeds,
            attention_mask=rows["attention_mask"],
            pixel_values=given["pixel_values"],
        ).logits,
    )
    given = {"inputs_embeds": embeds, "attention_mask": rows["attention_mask"]}
    got = model.generate(**given, images=pictures(3), **GREEDY, **options)
    assert torch.equal(got, want)


# Begin and end ids that an earlier round drew

STRAYS = pytest.mark.parametrize(
    "drawn",
    [[BOI], [EOI], [EOI, 7, BOI], [BOI, 7, 8, EOI, 3], [7, BOI, 8, 9, BOI], [BOI, 7, 8, 9, EOI]],
    ids=str,
)
# What a place without its picture looks like, too.
AMBIGUOUS = [[BOI, EOI], [BOI, 7, EOI], [BOI, PAD, EOI], [7, BOI, 8, BOI]]


@torch.no_grad()
def logits_with_strays(model, row: list[int], drawn: range, images) -> torch.Tensor:
    """Of the whole row: in the first rounds its drawn ids are given as such."""
    output = model(input_ids=torch.tensor([row[: drawn.start]]), pixel_values=images)
    logits = [output.logits]
    for token in row[drawn.start : drawn.stop]:
        output = model(input_ids=torch.tensor([[token]]), past_key_values=output.past_key_values)
        logits.append(output.logits)
    for token in row[drawn.stop :]:
        output = model(input_ids=torch.tensor([[token]]), past_key_values=output.past_key_values)
        logits.append(output.logits)
    return torch.cat(logits, dim=1)[0]


@FORMS
@STRAYS
@pytest.mark.parametrize("prompt", ["text", "image"])
def test_rows_that_hold_drawn_ids_are_computed(model, image, drawn, prompt):
    """What GRPO does with prompt and answer, or anybody who feeds an answer back."""
    first = [*text(3, seed=1), *(image if prompt == "image" else []), *text(2, seed=2)]
    row = [*first, *drawn, *text(3, seed=3)]
    images = pictures(1) if prompt == "image" else None
    want = logits_with_strays(model, row, range(len(first), len(first) + len(drawn)), images)
    inputs = {"input_ids": torch.tensor([row]), "pixel_values": images}
    with torch.no_grad():
        assert (model(**inputs).logits[0] - want).abs().max() <= ATOL
    # And beside another row, padded. With labels every place is meant to be one.
    other = [*image, *text(9, seed=4)]
    batch = padded([row, other], "left")
    both = pictures(1).repeat(2 if prompt == "image" else 1, 1, 1, 1)
    with torch.no_grad():
        output = model(**batch, pixel_values=both)
        assert (output.logits[0, -len(want) :] - want).abs().max() <= ATOL
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with pytest.raises(ValueError, match="begin-of-image ids|ids between its begin and its end"):
        model(**batch, pixel_values=both, labels=labels)


@FORMS
@pytest.mark.parametrize("drawn", AMBIGUOUS, ids=str)
@pytest.mark.parametrize("keeps_cache", [False, True])
def test_drawn_ids_that_may_be_a_place_are_refused_in_a_later_round(
    model, image, drawn, keeps_cache
):
    first = [*text(3, seed=1), *image, *text(2, seed=2)]
    cache = DynamicCache(config=model.config)
    given = {"pixel_values": pictures(1), "past_key_values": cache}
    draws = LogitsProcessorList([Draws(len(first), drawn)])
    ids = model.generate(torch.tensor([first]), **given, logits_processor=draws, **GREEDY)
    row = torch.tensor([[*ids[0].tolist(), *text(4, seed=3)]])
    kept = {"past_key_values": cache} if keeps_cache else {}
    with pytest.raises(ValueError, match="begin-of-image ids|has 0 ids"):
        model.generate(row, pixel_values=pictures(1), **kept, **GREEDY)
    with pytest.raises(ValueError, match="begin-of-image ids|has 0 ids"):
        model(row, pixel_values=pictures(1))


@FORMS
@STRAYS
@pytest.mark.parametrize("keeps_cache", [False, True])
@pytest.mark.parametrize("brings_image", [False, True])
def test_a_later_round_takes_drawn_ids_for_what_they_are(
    model, image, drawn, keeps_cache, brings_image
):
    first = [*text(3, seed=1), *image, *text(2, seed=2)]
    draws = LogitsProcessorList([Draws(len(first), drawn)])
    cache = DynamicCache(config=model.config)
    ids = model.generate(
        torch.tensor([first]),
        pixel_values=pictures(1),
        past_key_values=cache,
        logits_processor=draws,
        **GREEDY,
    )[0].tolist()
    assert ids[len(first) : len(first) + len(drawn)] == drawn
    second = [*text(2, seed=3), *(image if brings_image else []), *text(3, seed=4)]
    images = pictures(2) if brings_image else pictures(1)
    row = [*ids, *second]
    batch = {"input_ids": torch.tensor([row])}
    if keeps_cache:
        given = [images, images[1:]] if brings_image else [images, None]
        caches = [copy.deepcopy(cache) for _ in given]
        answers = [
            new_tokens(model, batch | {"pixel_values": of, "past_key_values": kept}, **DRAWS_ANY)
            for of, kept in zip(given, caches, strict=True)
        ]
    else:
        batch["pixel_values"] = images
        answers = [new_tokens(model, batch, **DRAWS_ANY, use_cache=use) for use in (True, False)]
        two = {"num_beams": 2, "num_return_sequences": 2}
        new_tokens(model, batch, **two)
    # By hand: the first round's cache, the rest of the row, then a token at a time.
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor([[row[len(ids) - 1]]]), past_key_values=copy.deepcopy(cache)
        )
        output = model(
            input_ids=torch.tensor([second]),
            pixel_values=images[1:] if brings_image else None,
            past_key_values=output.past_key_values,
        )
        want = []
        for _ in range(8):
            want.append(output.logits[0, -1].argmax().item())
            output = model(
                input_ids=torch.tensor([want[-1:]]), past_key_values=output.past_key_values
            )
    for tokens in answers:
        assert tokens[0].tolist() == want


@FORMS
def test_a_row_that_was_cut_inside_an_image_is_no_row_with_a_stray(model, image):
    whole = [*text(2), *image]
    cut = [*text(2), BOI, *[FILL] * 3]
    for row in (cut, [*whole, *cut], [FILL, FILL, EOI, *whole]):
        images = pictures(1) if EOI in row and BOI in row else None
        with pytest.raises(ValueError, match="was a row truncated inside an image"):
            model(input_ids=torch.tensor([row]), pixel_values=images)
    # The picture of the cut image is still there.
    row = [*whole, BOI]
    with pytest.raises(ValueError, match="was a row truncated inside an image"):
        model(input_ids=torch.tensor([row]), pixel_values=pictures(2))


# Prompt lookup of transformers 4.57 wants an id to stop at.
ASSISTED = {"eos_token_id": 498}


@pytest.mark.parametrize("assistant", ["same", "other", "lookup"])
@pytest.mark.parametrize("prompt", ["text", "image"])
@pytest.mark.parametrize("drawn", [[], [BOI, 7, EOI], [7, EOI, BOI, 8, BOI]], ids=str)
def test_assisted_generation_draws_what_the_model_alone_draws(model, assistant, prompt, drawn):
    row = [*rows_with(grown_image())[0 if prompt == "text" else 1], 7, 8, 7, 8, 7]
    batch = {"input_ids": torch.tensor([row])}
    if prompt == "image":
        batch["pixel_values"] = pictures(1)
    draws = LogitsProcessorList([Draws(len(row), drawn)])
    want = new_tokens(model, batch, logits_processor=draws)
    if assistant == "lookup":
        options = {"prompt_lookup_num_tokens": 3} | ASSISTED
    else:
        other = tiny_model()
        # Several rounds, of which the later ones find drawn ids in what they are given.
        other.generation_config.num_assistant_tokens = 2
        other.generation_config.num_assistant_tokens_schedule = "constant"
        if assistant == "other":
            with torch.no_grad():
                other.transformer.output_layer.weight.add_(0.2)
        options = {"assistant_model": other}
    got = new_tokens(model, batch, logits_processor=draws, **options)
    assert torch.equal(got, want)


def test_assisted_generation_of_rows_that_grow_is_right_or_refused(model):
    """The cache is cropped by the number of ids, which here is less than what it holds."""
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


@pytest.mark.parametrize("drawn", [[BOI], [BOI, 7, 8, EOI]], ids=str)
def test_assisted_generation_of_a_later_round(model, drawn):
    first = [*text(3, seed=1), *grown_image(), *text(2, seed=2)]
    row = [*first, *drawn, *text(2, seed=3), *grown_image(), 7, 8, 7, 8, 7]
    batch = {"input_ids": torch.tensor([row]), "pixel_values": pictures(2)}
    want = new_tokens(model, batch)
    for options in ({"prompt_lookup_num_tokens": 3} | ASSISTED, {"assistant_model": model}):
        assert torch.equal(new_tokens(model, batch, **options), want)


@FORMS
@pytest.mark.parametrize("past", ["whole prompt", "one drawn"])
@pytest.mark.parametrize("drawn", [[5, BOI, PAD, EOI, 6], [5, 6, BOI, FILL, FILL, FILL, FILL, EOI]])
@torch.no_grad()
def test_several_drawn_ids_that_look_like_an_image_are_none(model, image, past, drawn):
    """What assisted decoding feeds at once. Among drawn ids nothing is an image, however filled."""
    prompt = [*text(3, seed=1), *image, *text(2, seed=2)]
    output = model(input_ids=torch.tensor([prompt]), pixel_values=pictures(1))
    cache, want = copy.deepcopy(output.past_key_values), []
    for token in drawn:
        output = model(input_ids=torch.tensor([[token]]), past_key_values=output.past_key_values)
        want.append(output.logits[0, -1])
    if past == "one drawn":
        model(input_ids=torch.tensor([drawn[:1]]), past_key_values=cache)
        want = want[1:]
    inputs = model.prepare_inputs_for_generation(
        torch.tensor([prompt + drawn]),
        past_key_values=cache,
        pixel_values=pictures(1),
        prompt_length=len(prompt),
    )
    assert inputs["input_ids"][0].tolist() == drawn[-len(want) :]
    assert inputs["prompt_length"] == (0 if past == "whole prompt" else -1)
    got = model(**inputs).logits[0]
    assert (got - torch.stack(want)).abs().max() <= ATOL


@FORMS
def test_generate_takes_a_cache_that_was_cropped_before_its_image(model, image):
    row = [*text(6, seed=1), *image, *text(3, seed=2)]
    batch = {"input_ids": torch.tensor([row]), "pixel_values": pictures(1)}
    want = new_tokens(model, batch)
    with torch.no_grad():
        cache = model(**batch).past_key_values
    cache.crop(4 - cache.get_seq_length())
    assert torch.equal(new_tokens(model, batch | {"past_key_values": cache}), want)


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
@FORMS
def test_continuous_batching_refuses_rows_with_images(image):
    """It hands on no pictures: told before a cache is made, and by a manager of one's own."""
    row = [*text(3, seed=1), *image, 5]
    with pytest.raises(ValueError, match="row 2 of 2 has a picture .*answer such rows with gener"):
        generate_batch(tiny_model(), [text(3, seed=1), row])
    model = tiny_model()
    model.generate_batch = super(ChatGLMGenerationMixin, model).generate_batch
    for answer in generate_batch(model, [row]):  # transformers 5.12 has none of a row that failed
        assert "0 images were given for 1 begin-of-image ids" in str(answer.error)
        assert not answer.generated_tokens
