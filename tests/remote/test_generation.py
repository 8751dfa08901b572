"""Generation: cached equals uncached, and batches equal single prompts, with any images."""

import copy

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
)

from glm4v_patched.remote.keywords import cache_kwarg
from glm4v_patched.remote.tokenization_chatglm import ChatGLM4Tokenizer
from tests.helpers.legacy_repository import write_legacy_tokenizer
from tests.helpers.tiny import (
    BOI,
    EOI,
    FILL,
    PAD,
    expanded_image,
    images_of,
    padded,
    random_pixels,
    text,
    tiny_model,
    unexpanded_image,
)
from tests.remote.inputs import GREEDY, new_tokens

# fp32, cached against one pass. Measured 8.5e-6; positions that continue from the cache's length,
# not from the image's three, must fail.
ATOL = 2e-5


def four_rows(image: list[int]) -> list[list[int]]:
    """Prompts of different lengths: no image, one inside, two adjacent, one at the start."""
    return [
        text(9, seed=1),
        [*text(4, seed=2), *image, *text(6, seed=3)],
        [*text(2, seed=4), *image, *image, *text(3, seed=5)],
        [*image, *text(5, seed=6)],
    ]


def batch_with(image: list[int]) -> dict[str, torch.Tensor]:
    return padded(four_rows(image), "left") | {"pixel_values": random_pixels(4)}


@torch.no_grad()
def recomputed_tokens(model, row: list[int], images: torch.Tensor) -> list[int]:
    """Decode greedily by a full forward pass per token, without cache and generate."""
    row, images = list(row), images if len(images) else None
    number = GREEDY["max_new_tokens"]
    for _ in range(number):
        logits = model(input_ids=torch.tensor([row]), pixel_values=images, use_cache=False).logits
        logits[..., model._image_token_ids()] = -torch.inf  # which generate does not draw
        row.append(logits[0, -1].argmax().item())
    return row[-number:]


@pytest.mark.parametrize("use_cache", [True, False])
def test_tokens_of_a_padded_batch_equal_those_of_single_prompts(model, image, use_cache):
    rows, batch = four_rows(image), batch_with(image)
    want = [recomputed_tokens(model, *pair) for pair in zip(rows, images_of(rows), strict=True)]
    assert len({tuple(tokens) for tokens in want}) == len(rows)
    # Position ids of a mask that takes the placeholder for padding, as in transformers' suite.
    mask = (batch["input_ids"] != PAD).long()
    by_mask = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    alone = {"input_ids": torch.tensor(rows[1:2]), "pixel_values": random_pixels(4)[:1]}
    several = {"num_beams": 3}, {"do_sample": True, "top_k": 1}
    for inputs in (batch, batch | by_mask):
        assert new_tokens(model, inputs, use_cache=use_cache).tolist() == want
        for kind in several:
            options = {"use_cache": use_cache, "num_return_sequences": 2} | kind
            actual = new_tokens(model, inputs, **options)[2:4]
            assert torch.equal(actual, new_tokens(model, alone, **options))


def test_position_ids_of_a_prompt_hold_at_every_token_of_each_answer_without_a_cache(model):
    batch = {"input_ids": torch.tensor([text(9, seed=1)])}
    by_default = new_tokens(model, batch)
    batch["position_ids"] = 3 * torch.arange(9)[None]
    want = new_tokens(model, batch)
    assert not torch.equal(want, by_default)
    options = {"use_cache": False, "do_sample": True, "top_k": 1, "num_return_sequences": 2}
    assert torch.equal(new_tokens(model, batch, **options), want.repeat(2, 1))


def test_a_number_of_images_other_than_of_placeholders_is_refused(model):
    row = {
        "input_ids": torch.tensor([four_rows(unexpanded_image())[2]]),
        "pixel_values": random_pixels(3),
    }
    for num_beams in (1, 2):
        with pytest.raises(ValueError, match="3 images were given for 2 begin-of-image ids"):
            new_tokens(model, row, num_beams=num_beams)
    # Also if all of them are cached and none is used.
    ids = torch.tensor([[*expanded_image(), *text(4)]])
    with torch.no_grad():
        cache = model(ids, pixel_values=random_pixels(1), use_cache=True)
    cached_inputs = {"pixel_values": random_pixels(2)} | cache_kwarg(cache.past_key_values)
    with pytest.raises(ValueError, match="2 images were given for 1 begin-of-image ids"):
        new_tokens(model, {"input_ids": torch.tensor([[*ids[0], 7]]), **cached_inputs})
    for ids, number, message in (
        (text(4), 2, "2 images were given with inputs_embeds.*give input_ids"),
        (unexpanded_image(), 1, "expand to 6 tokens, and inputs_embeds cannot be"),
    ):
        embeds = model.get_input_embeddings()(torch.tensor([ids])).detach()
        with pytest.raises(ValueError, match=message):
            model.generate(inputs_embeds=embeds, pixel_values=random_pixels(number), **GREEDY)


class ForcedTokens(LogitsProcessor):
    """Makes generate begin with certain tokens."""

    def __init__(self, prompt_length: int, tokens: list[int]):
        self.prompt_length, self.tokens = prompt_length, tokens

    def __call__(self, input_ids, scores):
        step = input_ids.shape[1] - self.prompt_length
        if step < len(self.tokens):
            scores = torch.full_like(scores, float("-inf"))
            scores[:, self.tokens[step]] = 0
        return scores


@pytest.mark.parametrize("assistant", ["other", "lookup"])
@pytest.mark.parametrize("tokens", [[BOI, 7, EOI], [7, EOI, BOI, 8, BOI]], ids=str)
def test_assisted_generation_generates_the_same_tokens(model, assistant, tokens):
    """Image ids, too, where that is allowed: among generated tokens they are text."""
    row = [*four_rows(expanded_image())[1], 7, 8, 7, 8, 7]
    batch = {"input_ids": torch.tensor([row]), "pixel_values": random_pixels(1)}
    forced = {"logits_processor": LogitsProcessorList([ForcedTokens(len(row), tokens)])}
    forced["suppress_tokens"] = []
    # Prompt lookup of transformers 4.57 wants an id to stop at.
    options = {"prompt_lookup_num_tokens": 3, "eos_token_id": 498}
    if assistant != "lookup":
        other = tiny_model()
        # Several rounds; later ones have generated ids in their input.
        other.generation_config.num_assistant_tokens = 2
        other.generation_config.num_assistant_tokens_schedule = "constant"
        with torch.no_grad():
            other.transformer.output_layer.weight.add_(0.2)
        options = {"assistant_model": other}
    want = new_tokens(model, batch, **forced)
    assert want[0, : len(tokens)].tolist() == tokens
    assert torch.equal(new_tokens(model, batch, **forced, **options), want)
    assert torch.equal(new_tokens(model, batch, **forced, use_cache=False), want)


def row(image: list[int]) -> torch.Tensor:
    return torch.tensor([[*text(3, seed=1), *image, *text(4, seed=2)]])


@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_generate_stops_at_texts(model, tmp_path, image, options):
    write_legacy_tokenizer(tmp_path)
    tokenizer = ChatGLM4Tokenizer.from_pretrained(tmp_path)
    inputs = {
        "input_ids": row(image),
        "pixel_values": random_pixels(1),
        "max_new_tokens": 12,
        **options,
    }
    length = inputs["input_ids"].shape[1]
    tokens = model.generate(**inputs)[0, length:].tolist()
    # A stop string that ends with a generated token and occurs only there.
    stop = next(text for token in tokens[2:] if (text := tokenizer.decode([token])).isascii())
    stopped = model.generate(**inputs, tokenizer=tokenizer, stop_strings=[stop])
    answer = stopped[0, length:].tolist()
    assert answer == tokens[: len(answer)] and stop in tokenizer.decode(answer)
    assert stop not in tokenizer.decode(answer[:-1])


@pytest.mark.parametrize("brings_images", [False, True])
@torch.no_grad()
def test_generate_goes_on_from_a_cache_that_was_changed(model, image, brings_images):
    """All changes of a cache are tested in test_batch_invariance.py."""
    begin = [*text(2, seed=3), *image, *text(3, seed=4), *image, *text(2, seed=5)]
    ids = torch.tensor([begin, [*image, *text(len(begin) - len(image), seed=6)]])
    of_rows = [random_pixels(2, seed=1), random_pixels(1, seed=2)]
    if len(image) == 3:  # rows of unlike growth are padded on the left, as generate wants them
        ids, of_rows[1] = torch.tensor([begin] * 2), random_pixels(2, seed=2)
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, pixel_values=torch.cat(of_rows), use_cache=True, **cache_kwarg(cache))
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.crop(-2)
    chosen = [1, 1, 0, 0]
    after = [*text(2, seed=7), *image, *text(2, seed=8)] if brings_images else text(2, seed=7)
    new = random_pixels(len(chosen) if brings_images else 0, seed=3)
    every = [torch.cat((of_rows[i], new[n : n + 1])) for n, i in enumerate(chosen)]
    whole = {"input_ids": torch.cat([ids[chosen], torch.tensor([after] * len(chosen))], dim=1)}
    want = new_tokens(model, whole | {"pixel_values": torch.cat(every)})
    cached_inputs = {"pixel_values": new, **cache_kwarg(copy.deepcopy(cache))}
    assert torch.equal(new_tokens(model, whole | cached_inputs), want)


@pytest.mark.parametrize(
    ("options", "first_given"),
    [({"num_beams": 2}, 0), ({"num_return_sequences": 2, "do_sample": True}, 1)],
    ids=str,
)
@torch.no_grad()
def test_several_answers_go_on_from_a_repeated_cache(model, options, first_given):
    """Of a row that ends with an image and one without, where another one follows at once. All
    images are given, or those that are not in the cache."""
    first = torch.tensor([[*text(3, seed=1), *expanded_image()], text(9, seed=2)])
    second = torch.tensor([[*expanded_image(), *text(3, seed=9)]] * 2)
    cache, images = DynamicCache(config=model.config), random_pixels(3)
    model(first, pixel_values=images[:1], use_cache=True, **cache_kwarg(cache))
    cache.batch_repeat_interleave(2)
    answers = []
    for cached_inputs in (
        {"pixel_values": images},
        {"pixel_values": images[first_given:], **cache_kwarg(cache)},
    ):
        torch.manual_seed(0)
        whole = {"input_ids": torch.cat([first, second], dim=1), **cached_inputs}
        answers.append(new_tokens(model, whole, **options))
    assert torch.equal(*answers)


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}],
)
def test_an_answer_ends_at_the_last_position(image, options):
    """The last token needs no position id: nothing is computed after it."""
    ids, model = row(image), tiny_model(seq_length=20)
    num_free = 20 - (3 + 3 + 4)  # an image takes three, however many ids
    inputs = {"input_ids": ids, "pixel_values": random_pixels(1), "eos_token_id": -1, **options}
    for wanted, number in ((10_000, num_free + 1), (5, 5)):
        out = model.generate(**inputs, max_new_tokens=wanted)
        assert out.shape[1] - ids.shape[1] == number


IMAGE_IDS = {BOI, EOI, FILL}
MODES = {
    "greedy": {"do_sample": False},
    "sampled from the best": {"do_sample": True, "top_k": 1},
    "sampled beams, static cache": {"num_beams": 3, "cache_implementation": "static"},
    "a framework's own config": {
        "generation_config": GenerationConfig(do_sample=True, max_new_tokens=6, eos_token_id=None)
    },
}


@pytest.fixture(scope="module")
def wants_image_ids():
    """A model whose likeliest tokens are image ids."""
    model = tiny_model(image_token_id=FILL)
    favored = torch.zeros(512).index_fill(0, torch.tensor([*IMAGE_IDS]), 100)
    model.transformer.output_layer.register_forward_hook(lambda *call: call[2] + favored)
    return model


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@pytest.mark.parametrize(("suppressed", "are_drawn"), [(None, False), ([4], False), ([], True)])
def test_no_image_ids_are_generated_unless_an_empty_list_allows_them(
    wants_image_ids, options, suppressed, are_drawn
):
    torch.manual_seed(0)
    ids = row(expanded_image())
    options = options if "generation_config" in options else {**GREEDY, "do_sample": True} | options
    options = options | ({} if suppressed is None else {"suppress_tokens": suppressed})
    # Beside a given processor of the same class.
    others = LogitsProcessorList([SuppressTokensLogitsProcessor([3])])
    base_options = {
        "pixel_values": random_pixels(1),
        "logits_processor": others,
        "pad_token_id": PAD,
    }
    answer = wants_image_ids.generate(ids, **base_options | options)[0, ids.shape[1] :].tolist()
    assert {token in IMAGE_IDS for token in answer} == {are_drawn}


def test_features_of_images_are_refused_by_generate(model):
    ids = torch.tensor([text(2) + expanded_image()])
    with pytest.raises(ValueError, match="not used by the model: .'image_features'"):
        model.generate(ids, image_features=model.get_image_features(random_pixels(1)), **GREEDY)


def test_continuous_batching_is_refused(model):
    with pytest.raises(ValueError, match="passes no images to the model: use generate"):
        model.generate_batch([text(3)])
