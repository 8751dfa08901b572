"""Everything that ``generate`` takes reaches it: texts to stop at, caches that were changed, and as
many tokens as there are positions."""

import copy

import pytest
import torch
from transformers import DynamicCache

from glm4v_patched.remote.keywords import named_cache
from glm4v_patched.remote.tokenization_chatglm import ChatGLM4Tokenizer
from tests.helpers.legacy_repository import write_legacy_tokenizer
from tests.helpers.tiny import grown_image, pictures, text, three_id_image

IMAGES = {"three ids": three_id_image, "grown": grown_image}
BOTH_FORMS = pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_legacy_tokenizer(folder)
    return ChatGLM4Tokenizer.from_pretrained(folder)


def row(image) -> torch.Tensor:
    return torch.tensor([[*text(3, seed=1), *image(), *text(4, seed=2)]])


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 2}, {"do_sample": True}, {"prompt_lookup_num_tokens": 2}], ids=str
)
@BOTH_FORMS
def test_generate_stops_at_texts(model, tokenizer, image, options):
    given = {"input_ids": row(image), "pixel_values": pictures(1), "max_new_tokens": 12, **options}
    torch.manual_seed(0)
    drawn = model.generate(**given)[0, given["input_ids"].shape[1] :].tolist()
    # Text that ends with one of the drawn tokens, and its place is the first of that text.
    stop = next(text for token in drawn[2:] if (text := tokenizer.decode([token])).isascii())
    torch.manual_seed(0)
    stopped = model.generate(**given, tokenizer=tokenizer, stop_strings=[stop])
    answer = stopped[0, given["input_ids"].shape[1] :].tolist()
    if "num_beams" in options:  # beams that have stopped compete with those that go on
        assert len(answer) <= len(drawn)
        return
    assert answer == drawn[: len(answer)] and stop in tokenizer.decode(answer)
    assert stop not in tokenizer.decode(answer[:-1])


def test_texts_to_stop_at_need_a_tokenizer(model):
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(row(three_id_image), pixel_values=pictures(1), stop_strings=["a"])
    with pytest.raises(ValueError, match="tokenizer.*is not what goes by that name"):
        model.generate(row(three_id_image), pixel_values=pictures(1), tokenizer="a")


def repeated(cache, ids):
    cache.batch_repeat_interleave(2)
    return ids.repeat_interleave(2, dim=0)


def selected(cache, ids):
    cache.batch_select_indices(torch.tensor([1]))
    return ids[1:]


def reordered(cache, ids):
    cache.reorder_cache(torch.tensor([1, 0]))
    return ids[[1, 0]]


def of_one_row(cache, ids):
    cache.reorder_cache(torch.tensor([1, 1]))
    return ids[[1, 1]]


def cropped(cache, ids):
    cache.crop(-2)
    return ids


def copied(cache, ids):
    return ids


CHANGES = [repeated, selected, reordered, of_one_row, cropped, copied]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("given", ["none", "all", "new"])
@BOTH_FORMS
@torch.no_grad()
def test_generate_goes_on_from_a_cache_that_was_changed(model, image, change, given):
    """Two rows, one of two pictures and one of one, and one more picture after the cache."""
    begin = [*text(2, seed=3), *image(), *text(3, seed=4), *image(), *text(2, seed=5)]
    other = [*text(len(begin) - len(image()), seed=6), *image()]
    other = [*other[-len(image()) :], *other[: -len(image())]]
    ids = torch.tensor([begin, other])
    of_rows = [pictures(2, seed=1), pictures(1, seed=2)]
    cache = DynamicCache(config=model.config)
    # Rows of unlike growth are padded on the left, as generate wants them.
    if image is three_id_image:
        ids = torch.tensor([begin, [*begin]])
        of_rows = [pictures(2, seed=1), pictures(2, seed=2)]
    model(input_ids=ids, pixel_values=torch.cat(of_rows), use_cache=True, **named_cache(cache))
    rows = torch.tensor([[0], [1]])
    chosen = change(cache, rows).flatten().tolist()
    cache = copy.deepcopy(cache)
    after = torch.tensor([[*text(2, seed=7), *image(), *text(2, seed=8)]])
    new = pictures(len(chosen), seed=3)
    whole = torch.cat([ids[chosen], after.expand(len(chosen), -1)], dim=1)
    every = torch.cat([torch.cat([of_rows[i], new[at : at + 1]]) for at, i in enumerate(chosen)])
    want = model.generate(whole, pixel_values=every, max_new_tokens=4, do_sample=False)
    images = {"all": every, "new": new, "none": None}[given]
    if given == "none":  # what follows the cache is text then
        whole = torch.cat([ids[chosen], after[:, :2].expand(len(chosen), -1)], dim=1)
        before = torch.cat([of_rows[i] for i in chosen])
        want = model.generate(whole, pixel_values=before, max_new_tokens=4, do_sample=False)
    found = model.generate(
        whole, pixel_values=images, max_new_tokens=4, do_sample=False, **named_cache(cache)
    )
    assert torch.equal(found, want)


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}]
)
@pytest.mark.parametrize("given", [True, False])
@torch.no_grad()
def test_beams_and_several_answers_go_on_from_a_repeated_cache(model, options, given):
    ids = row(three_id_image)
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, pixel_values=pictures(1), use_cache=True, **named_cache(cache))
    cache.batch_repeat_interleave(2)
    whole = torch.cat([ids, torch.tensor([text(3, seed=9)])], dim=1)
    torch.manual_seed(0)
    want = model.generate(whole, pixel_values=pictures(1), max_new_tokens=5, **options)
    torch.manual_seed(0)
    images = pictures(1) if given else None
    options = options | named_cache(cache)
    found = model.generate(whole, pixel_values=images, max_new_tokens=5, **options)
    assert torch.equal(found, want)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 2},
        {"do_sample": True},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
@BOTH_FORMS
def test_an_answer_ends_at_the_last_position(model, image, options):
    """The last token needs none: nothing is computed after it."""
    ids = row(image)
    grown = 3 + 2 + 1 + 4  # an image takes three positions, however many ids
    room = model.config.seq_length - grown
    given = {"input_ids": ids, "pixel_values": pictures(1), "eos_token_id": -1, **options}
    out = model.generate(**given, max_new_tokens=10_000)
    assert out.shape[1] - ids.shape[1] == room + 1
    torch.manual_seed(0)
    short = model.generate(**given, max_new_tokens=5)
    assert short.shape[1] - ids.shape[1] == 5
