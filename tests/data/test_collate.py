"""The demo's data: drawn, written, read back, and turned into supervised batches."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.data.packing import PackingCollator
from glm4v_patched.data.pictures import Stamp
from glm4v_patched.data.rows import read_conversations, write_conversations
from glm4v_patched.demo.pictures import COLOURS, SHAPES, draw_data_set, draw_shape
from glm4v_patched.demo.tiny_model import IMAGE_SIDE
from tests.helpers.data_forms import png, said, turns, write_rows


def chat(*words: str) -> list[dict]:
    """Words of the user and the assistant in turn."""
    return [said(("user", "assistant")[at % 2], text) for at, text in enumerate(words)]


def supervised_text(processor, conversation: list[dict]) -> str:
    batch = ConversationCollator(processor)([conversation])
    labels = batch["labels"][0]
    return processor.tokenizer.decode(
        labels[labels != -100], skip_special_tokens=False, spaces_between_special_tokens=False
    )


def test_written_conversations_read_back_with_absolute_images(tmp_path):
    drawn = draw_data_set(tmp_path / "pictures", 3, seed=0, side=IMAGE_SIDE)
    write_conversations(tmp_path / "data.jsonl", drawn)
    assert json.loads((tmp_path / "data.jsonl").read_text().splitlines()[0])["messages"][0][
        "image"
    ].startswith("pictures/")
    assert read_conversations(tmp_path / "data.jsonl") == drawn


def test_same_seed_draws_the_same_pictures_and_another_seed_others(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder, seed in zip(folders, (0, 0, 1), strict=True):
        draw_data_set(folder, 2, seed=seed, side=IMAGE_SIDE)
    a, b, c = ((folder / "00000.png").read_bytes() for folder in folders)
    assert a == b != c


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_has_its_colour_in_the_middle(shape):
    image = draw_shape("red", shape, 56, random.Random(0))
    assert COLOURS["red"] in {colour for _, colour in image.getcolors(maxcolors=9999)}


def test_a_unicode_line_separator_in_a_text_ends_no_line(tmp_path):
    conversation = chat("a\u2028b", "c")
    write_conversations(tmp_path / "data.jsonl", [conversation])
    assert read_conversations(tmp_path / "data.jsonl") == [conversation]


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
    assert supervised_text(processor, marked) == learned
    collator, packing = ConversationCollator(processor), PackingCollator(processor)
    batch, plain = collator([marked]), collator([conversation])
    assert torch.equal(batch["input_ids"], plain["input_ids"])
    assert torch.equal(packing([[marked, conversation]])["labels"][0],
                       torch.cat([batch["labels"][0], plain["labels"][0]]))  # fmt: skip
    assert collator.measure([marked])[0].learned == (batch["labels"] != -100).sum()


def test_turns_that_cannot_be_told_apart_are_refused(processor, words):
    marked = chat("a", "red", "b", "red")
    marked[1]["train"] = False
    collator = ConversationCollator(processor)
    with words.refused(ValueError, "2 turns", "writes 1"):
        collator.labels([collator.assistant_id, 0], marked)


def test_several_pictures_of_a_message_come_in_their_order(processor, tmp_path):
    paths = [str(tmp_path / f"{colour}.png") for colour in ("red", "green", "blue")]
    for path in paths:
        Path(path).write_bytes(png(Path(path).stem))
    parts = [{"type": "image", "image": path} for path in paths[:2]]
    conversation = turns([*parts, {"type": "text", "text": "a"}], "red")
    conversation += turns("b", "red", image=paths[2])
    collator = ConversationCollator(processor)
    batch = collator([conversation])
    alone = [processor.image_processor(path)["pixel_values"] for path in paths]
    assert torch.equal(batch["pixel_values"], torch.cat(alone))
    (size,) = collator.measure([conversation])
    assert (size.images, size.positions) == (3, batch["input_ids"].shape[1])
    text = processor.tokenizer.decode(batch["input_ids"][0], spaces_between_special_tokens=False)
    assert text.index("<|end_of_image|><|begin_of_image|>") < text.index("a<|assistant|>")


def test_a_batch_is_padded_on_the_right_with_nothing_supervised_there(processor):
    long = turns("Which colour is it?", "red", image=Image.new("RGB", (20, 20)))
    short = chat("a", "red")
    batch = ConversationCollator(processor)([short, long])
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    assert batch["pixel_values"].shape == (1, 3, IMAGE_SIDE, IMAGE_SIDE)
    padding = batch["attention_mask"][0] == 0
    assert padding.any() and padding[-1]
    assert (batch["labels"][0][padding] == -100).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_has_the_same_pixels_in_training_and_however_it_comes_in_inference(
    processor, tmp_path, orientation
):
    # Its sides and corners differ, so that no two orientations look alike.
    image = Image.new("RGB", (64, 32), "white")
    image.paste("red", (0, 0, 32, 16))
    image.paste("blue", (32, 0, 64, 8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "a.jpg"
    image.save(path, exif=exif, quality=95)
    write_rows(tmp_path / "data.jsonl", turns("q", "red", image="a.jpg"))
    trained = ConversationCollator(processor)(read_conversations(tmp_path / "data.jsonl"))
    upright = ImageOps.exif_transpose(Image.open(path))
    if orientation > 4:
        assert upright.size == (32, 64)
    ways = {
        "PIL": Image.open(path),
        "PIL, turned": upright,
        "path": path,
        "bytes": path.read_bytes(),
        "array": np.asarray(upright),
        "tensor": torch.from_numpy(np.array(upright)),
    }
    for way, picture in ways.items():
        asked = [{"role": "user", "image": picture, "content": "q"}]
        inputs = processor.apply_chat_template(
            asked, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )
        assert torch.equal(inputs["pixel_values"], trained["pixel_values"]), way


def test_a_picture_that_changes_while_it_is_trained_on_is_refused(tmp_path, processor, words):
    paths = [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    for path in paths:
        Path(path).write_bytes(png())
    conversations = [turns("q", "red", image=path) for path in paths]
    stamps = {path: Stamp.of(path) for path in paths}
    collate = ConversationCollator(processor, stamps)
    os.utime(paths[1], ns=(0, 1000))  # touched, and the same
    assert len(collate(conversations)["pixel_values"]) == 2
    for content in (png()[::-1], png("blue")):
        Path(paths[1]).write_bytes(content)  # the first as long as before, both as old
        os.utime(paths[1], ns=(0, stamps[paths[1]].mtime_ns))
        with words.refused(ValueError, "b.png"):
            collate(conversations)
        shown = [{"type": "image", "image": path} for path in paths]
        with pytest.raises(ValueError, match="b.png has changed"):
            collate([turns([*shown, {"type": "text", "text": "q"}])])
    os.remove(paths[1])
    with words.refused(ValueError, "b.png"):
        collate(conversations)
    assert len(collate(conversations[:1])["pixel_values"]) == 1
