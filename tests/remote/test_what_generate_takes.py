"""Everything that ``generate`` takes reaches it: texts to stop at, caches that were changed, and as
many tokens as there are positions. It draws no image ids unless told."""

import copy

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
)

from glm4v_patched.remote.keywords import named_cache
from glm4v_patched.remote.tokenization_chatglm import ChatGLM4Tokenizer
from tests.helpers.legacy_repository import write_legacy_tokenizer
from tests.helpers.tiny import BOI, EOI, FILL, grown_image, pictures, text, tiny_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_legacy_tokenizer(folder)
    return ChatGLM4Tokenizer.from_pretrained(folder)


def row(image: list[int]) -> torch.Tensor:
    return torch.tensor([[*text(3, seed=1), *image, *text(4, seed=2)]])


@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_generate_stops_at_texts(model, tokenizer, image, options):
    given = {"input_ids": row(image), "pixel_values": pictures(1), "max_new_tokens": 12, **options}
    drawn = model.generate(**given)[0, given["input_ids"].shape[1] :].tolist()
    # Text that ends with one of the drawn tokens, and its place is the first of that text.
    stop = next(text for token in drawn[2:] if (text := tokenizer.decode([token])).isascii())
    stopped = model.generate(**given, tokenizer=tokenizer, stop_strings=[stop])
    answer = stopped[0, given["input_ids"].shape[1] :].tolist()
    assert answer == drawn[: len(answer)] and stop in tokenizer.decode(answer)
    assert stop not in tokenizer.decode(answer[:-1])


# Ways to change a cache of two rows, and the rows that are in it then.
CHANGES = {
    "repeated": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    "selected": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "reordered": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    "cropped": (lambda cache: cache.crop(-2), [0, 1]),
}


@pytest.mark.parametrize(("change", "chosen"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("given", ["none", "all", "new"])
@torch.no_grad()
def test_generate_goes_on_from_a_cache_that_was_changed(model, image, change, chosen, given):
    begin = [*text(2, seed=3), *image, *text(3, seed=4), *image, *text(2, seed=5)]
    ids = torch.tensor([begin, [*image, *text(len(begin) - len(image), seed=6)]])
    of_rows = [pictures(2, seed=1), pictures(1, seed=2)]
    if len(image) == 3:  # rows of unlike growth are padded on the left, as generate wants them
        ids, of_rows[1] = torch.tensor([begin] * 2), pictures(2, seed=2)
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, pixel_values=torch.cat(of_rows), use_cache=True, **named_cache(cache))
    change(cache)
    cache = copy.deepcopy(cache)
    new = pictures(len(chosen), seed=3)
    if given == "none":  # what follows the cache is text then
        after, images = text(2, seed=7), None
        every = torch.cat([of_rows[i] for i in chosen])
    else:
        after = [*text(2, seed=7), *image, *text(2, seed=8)]
        every = torch.cat([torch.cat([of_rows[i], new[n : n + 1]]) for n, i in enumerate(chosen)])
        images = every if given == "all" else new
    whole = torch.cat([ids[chosen], torch.tensor([after] * len(chosen))], dim=1)
    options = {"max_new_tokens": 4, "do_sample": False}
    want = model.generate(whole, pixel_values=every, **options)
    found = model.generate(whole, pixel_values=images, **options, **named_cache(cache))
    assert torch.equal(found, want)


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}], ids=str
)
@pytest.mark.parametrize("given", ["all", "new"])
@pytest.mark.parametrize("brings_image", [True, False])
@torch.no_grad()
def test_several_answers_go_on_from_a_repeated_cache(model, image, options, given, brings_image):
    first = row(image) if not brings_image else torch.tensor([[*text(3, seed=1), *image]])
    second = [*(image if brings_image else []), *text(3, seed=9)]
    every = pictures(2 if brings_image else 1)
    cache = DynamicCache(config=model.config)
    model(first, pixel_values=every[:1], use_cache=True, **named_cache(cache))
    cache.batch_repeat_interleave(2)
    whole = torch.cat([first, torch.tensor([second])], dim=1)
    torch.manual_seed(0)
    want = model.generate(whole, pixel_values=every, max_new_tokens=5, **options)
    torch.manual_seed(0)
    images = every if given == "all" else every[1:] if brings_image else None
    options = options | named_cache(cache)
    found = model.generate(whole, pixel_values=images, max_new_tokens=5, **options)
    assert torch.equal(found, want)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
def test_an_answer_ends_at_the_last_position(model, image, options):
    ids = row(image)
    room = model.config.seq_length - (3 + 3 + 4)  # an image takes three, however many ids
    given = {"input_ids": ids, "pixel_values": pictures(1), "eos_token_id": -1, **options}
    for wanted, number in ((10_000, room + 1), (room + 1, room + 1), (5, 5)):
        out = model.generate(**given, max_new_tokens=wanted)
        assert out.shape[1] - ids.shape[1] == number


# Image ids

MODES = {
    "greedy": {"do_sample": False},
    "sampled from the best": {"do_sample": True, "top_k": 1},
    "sampled, static cache": {"do_sample": True, "cache_implementation": "static"},
    "sampled beams": {"do_sample": True, "num_beams": 3},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 2},
    "a framework's own config": {
        "generation_config": GenerationConfig(do_sample=True, max_new_tokens=6, eos_token_id=None)
    },
}


@pytest.fixture(scope="module")
def drawing_image_ids():
    """A model that wants nothing but image ids."""
    model = tiny_model(image_token_id=FILL)

    def favour(module, inputs, logits):
        logits = logits.clone()
        logits[..., [BOI, EOI, FILL]] += 100
        return logits

    model.transformer.output_layer.register_forward_hook(favour)
    return model


def drawn(model, **options) -> set[int]:
    prompt = torch.tensor([[*text(2, seed=1), *grown_image(), *text(3, seed=2)]])
    limits = {} if "generation_config" in options else {"max_new_tokens": 6, "eos_token_id": None}
    torch.manual_seed(0)
    rows = model.generate(prompt, pixel_values=pictures(1), pad_token_id=500, **limits, **options)
    new = rows[:, prompt.shape[1] :]
    assert new.shape[1] == 6
    return set(new.flatten().tolist())


@pytest.mark.parametrize("mode", MODES)
def test_no_image_ids_are_drawn_unless_an_empty_list_allows_them(mode, drawing_image_ids):
    assert not drawn(drawing_image_ids, **MODES[mode]) & {BOI, EOI, FILL}
    if mode != "prompt lookup":  # that of transformers 4.57 wants an eos_token_id
        assert drawn(drawing_image_ids, **MODES[mode], suppress_tokens=[]) <= {BOI, EOI, FILL}


def test_what_is_suppressed_or_processed_besides_takes_nothing_away(drawing_image_ids):
    assert drawing_image_ids.generation_config.suppress_tokens is None
    best = drawn(drawing_image_ids, do_sample=False)
    others = drawn(drawing_image_ids, do_sample=False, suppress_tokens=[FILL, *best])
    assert not others & {BOI, EOI, FILL, *best}
    own = LogitsProcessorList([SuppressTokensLogitsProcessor([3])])
    for more in ({}, {"suppress_tokens": [4]}):
        options = {"do_sample": False, "logits_processor": own, **more}
        assert not drawn(drawing_image_ids, **options) & {BOI, EOI, FILL}
