"""Conversations turned into supervised batches, padded or packed."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from glm4v_patched.data.checked_data import EpochSequences
from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.data.image_files import FileStamp
from glm4v_patched.data.packing import PackingCollator, pack_best_fit
from glm4v_patched.data.rows import read_conversations, write_conversations
from glm4v_patched.demo.images import draw_data_set
from glm4v_patched.demo.tiny_model import IMAGE_SIDE
from tests.data.samples import png, said, turns, write_rows


def chat(*words: str) -> list[dict]:
    """Words of the user and the assistant in turn."""
    return [said(("user", "assistant")[at % 2], text) for at, text in enumerate(words)]


def test_written_conversations_read_back_with_absolute_images(tmp_path):
    samples = draw_data_set(tmp_path / "images", 3, seed=0, side=IMAGE_SIDE)
    samples.append(chat("a\u2028b", "c"))
    write_conversations(tmp_path / "data.jsonl", samples)
    assert '"image": "images/' in (tmp_path / "data.jsonl").read_text()
    assert read_conversations(tmp_path / "data.jsonl") == samples


@pytest.mark.parametrize(
    ("marks", "learned"),
    [
        ((True, True), "\nred<|user|>\na red circle<|endoftext|>"),
        ((False, True), "\na red circle<|endoftext|>"),
        ((True, False), "\nred<|user|>"),
    ],
)
def test_turns_of_the_assistant_are_learned_to_the_token_that_ends_them(processor, marks, learned):
    """But for those that are context."""
    conversation = chat("a", "red", "x<|assistant|>y", "a red circle")
    marked = [dict(message) for message in conversation]
    for at, mark in zip((1, 3), marks, strict=True):
        if not mark:
            marked[at]["train"] = False
    collator, packing = ConversationCollator(processor), PackingCollator(processor)
    batch, plain = collator([marked]), collator([conversation])
    ids = batch["labels"][batch["labels"] != -100]
    options = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert processor.tokenizer.decode(ids, **options) == learned
    assert torch.equal(batch["input_ids"], plain["input_ids"])
    packed = packing([[marked, conversation]])["labels"][0]
    assert torch.equal(packed, torch.cat([batch["labels"][0], plain["labels"][0]]))
    assert collator.measure([marked])[0].supervised == len(ids)
    if not all(marks):  # of a template that writes another number of turns
        with pytest.raises(ValueError, match="has 2 turns of the assistant, but the chat .* 1, "):
            collator.labels([collator.assistant_id, collator.end_id], marked)


def test_several_images_of_a_message_come_in_their_order_and_rows_are_padded(processor):
    images = [Image.new("RGB", (20, 20), color) for color in ("red", "green", "blue")]
    parts = [{"type": "image", "image": image} for image in images[:2]]
    conversation = turns([*parts, {"type": "text", "text": "a"}], "red")
    conversation += turns("b", "red", image=images[2])
    collator = ConversationCollator(processor)
    batch = collator([chat("a", "red"), conversation])
    alone = [processor.image_processor(image)["pixel_values"] for image in images]
    assert torch.equal(batch["pixel_values"], torch.cat(alone))
    (size,) = collator.measure([conversation])
    assert (size.num_images, size.tokens) == (3, batch["input_ids"].shape[1])
    padding = batch["attention_mask"][0] == 0
    assert padding[-1] and (batch["labels"][0][padding] == -100).all()


@pytest.mark.parametrize("orientation", [1, 2, 6])
def test_an_image_has_the_same_pixels_in_training_and_however_it_comes_in_inference(
    processor, tmp_path, orientation
):
    # Its sides and corners differ, so that no two orientations look alike.
    image = Image.new("RGB", (64, 32), "white")
    image.paste("red", (0, 0, 32, 16))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "a.jpg"
    image.save(path, exif=exif, quality=95)
    write_rows(tmp_path / "data.jsonl", turns("q", "red", image="a.jpg"))
    trained = ConversationCollator(processor)(read_conversations(tmp_path / "data.jsonl"))
    upright = ImageOps.exif_transpose(Image.open(path))
    assert upright.size == ((32, 64) if orientation > 4 else (64, 32))
    for image in (upright, path, path.read_bytes(), torch.from_numpy(np.array(upright))):
        messages = [{"role": "user", "image": image, "content": "q"}]
        inputs = processor.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
        )
        assert torch.equal(inputs["pixel_values"], trained["pixel_values"]), type(image)


def test_an_image_that_changes_while_it_is_trained_on_is_refused(tmp_path, processor, words):
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for path in paths:
        path.write_bytes(png())
    conversations = [turns("q", "red", image=str(path)) for path in paths]
    stamps = {str(path): FileStamp.of(str(path)) for path in paths}
    collate = ConversationCollator(processor, stamps)
    os.utime(paths[1], ns=(0, 1000))  # touched, and the same
    assert len(collate(conversations)["pixel_values"]) == 2
    for content in (png()[::-1], png("blue")):
        paths[1].write_bytes(content)  # the first as long as before, both as old
        os.utime(paths[1], ns=(0, stamps[str(paths[1])].mtime_ns))
        with words.refused(ValueError, "b.png"):
            collate(conversations)
    paths[1].unlink()
    with words.refused(ValueError, "b.png"):
        collate(conversations)
    assert len(collate(conversations[:1])["pixel_values"]) == 1


def conversation(words: int, images: int = 0) -> list[dict]:
    """A question of so many words, one image a turn, and an answer."""
    image_turns = []
    for number in range(images):
        image = Image.new("RGB", (20, 20), (words, 50 * number, 99))
        image_turns += turns("Which color is it", "red", image=image)
    return [*image_turns, *turns("ag"[words % 2] + " red" * words, "red")]


def conversations() -> list[list[dict]]:
    sizes = [(3, 1), (40, 0), (1, 0), (8, 2), (12, 0), (2, 1)]
    return [conversation(words, images) for words, images in sizes]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=2, max_size=40))
def test_every_conversation_is_in_one_row_and_no_two_rows_fit_into_one(lengths):
    rows = pack_best_fit(lengths, 100)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    totals = [sum(lengths[number] for number in row) for row in rows]
    assert max(totals) <= 100
    # None of two rows would fit into one, and so all but one are more than half full.
    assert len(totals) == 1 or sum(sorted(totals)[:2]) > 100
    assert pack_best_fit(lengths, 100) == rows


def test_a_row_is_filled_to_the_last_position_and_no_further(words):
    assert pack_best_fit([9, 40], 49) == [[1, 0]]
    assert pack_best_fit([9, 40], 48) == [[1], [0]]
    with words.refused(ValueError, "2 of 4", "number 2", "30", "29", "40"):
        pack_best_fit([1, 30, 2, 40], 29)


def test_the_mean_number_of_conversations_in_a_packed_sequence_is_no_integer():
    for packs, mean in (([[0, 1], [2]], 1.5), ([[0], [1], [2, 3]], 4 / 3), (None, 1)):
        assert EpochSequences(np.ones(1), np.ones(1), packs).samples_per_sequence == mean


def test_a_packed_batch_is_the_padded_one_without_its_padding(processor):
    """What the model makes of it: tests/remote/test_packed_attention.py."""
    first, second, *others = conversations()
    packed = PackingCollator(processor)([[first, second], others])
    padded = ConversationCollator(processor)(conversations())
    mask = padded["attention_mask"] == 1
    want = {name: padded[name][mask] for name in ("input_ids", "labels")}
    want |= {"position_ids": (mask.cumsum(1) - 1)[mask]}
    assert packed.keys() == want.keys() | {"pixel_values"}
    assert all(torch.equal(packed[name], values[None]) for name, values in want.items())
    assert torch.equal(packed["pixel_values"], padded["pixel_values"])
