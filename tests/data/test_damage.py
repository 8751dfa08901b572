"""Data files with random damage never train silently.

What a row names is read off its JSON here, by other means than the reader's: any string that ends
like an image's name, whatever its key, and the words of whatever looks like an assistant.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from glm4v_patched.data.check import check_sources
from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.data.source import DataSource
from tests.data.samples import contents_of, said

COLORS = ("red", "green", "blue", "white")
SUFFIXES = (".png", ".jpg", ".bmp", ".gif")


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"x": [1]}}}
CONVERSATIONS = [
    [said("user", "Which?", image="p/0.png"), said("assistant", "red it is")],
    [said("user", "<image>\nWhich?", image="p/1.jpg"), said("assistant", "green"),
     said("user", "Which?"), said("assistant", "yes, green")],
    [said("user", "Which?"), said("assistant", "which one?"), said("user", "", image="p/2.bmp"),
     said("assistant", "blue \U0001f600 蓝")],
    [said("system", "Be brief.", tools=[TOOL]), said("user", "Which?", image="p/3.gif"),
     said("assistant", "{}", metadata="look"), said("observation", "white"),
     said("assistant", "white <|user|>")],
    [said("user", "No image."), said("assistant", "none")],
]  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    (folder / "p").mkdir()
    for number, (color, suffix) in enumerate(zip(COLORS, SUFFIXES, strict=True)):
        image = Image.effect_noise((24, 16), 50).convert("RGB")
        image = Image.blend(image, Image.new("RGB", image.size, color), 0.7)
        image.save(folder / "p" / f"{number}{suffix}")
    lines = [
        json.dumps({"messages": c}, ensure_ascii=n % 2 == 0) for n, c in enumerate(CONVERSATIONS)
    ]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def damage_bytes(content: bytes, draw: Callable) -> bytes:
    at = draw(st.integers(0, max(len(content) - 1, 0)))
    match draw(st.sampled_from(["flip", "cut", "insert", "drop", "repeat"])):
        case "flip":
            flipped = bytes([content[at] ^ draw(st.integers(1, 255))]) if content else b""
            return content[:at] + flipped + content[at + 1 :]
        case "insert":
            return content[:at] + draw(st.binary(min_size=1, max_size=4)) + content[at:]
        case "drop":
            return content[:at] + content[at + draw(st.integers(1, 40)) :]
        case "repeat":
            return content[:at] + content[max(at - draw(st.integers(1, 400)), 0) :]
    return content[:at]


KEYS = ["image", "images", "Image", "img", "image_url", "content", "value", "role", "from"]
KEYS += ["messages", "conversations", "tools", "metadata", "id", "IMAGE", "image ", ""]
WORDS = ["", " ", "\ud83d", "\0", "user", "gpt", "human", "assistant", "system", "observation"]
WORDS += ["<image>", "q<image>q", "p/0.png", "p/1.jpg", "p/9.png", "https://a.b/c.png"]
WORDS += ["<|begin_of_image|>"]
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.sampled_from(KEYS)
values = st.recursive(
    leaves | st.sampled_from(WORDS),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(keys, v, max_size=3),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in a JSON value with each key or index."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])


def damage_row(line: str, draw: Callable) -> str:
    """One part of a row renamed, dropped, doubled, replaced, or joined by another."""
    row = json.loads(line)
    owner, key = draw(st.sampled_from(list(places(row))))
    match draw(st.sampled_from(["rename", "drop", "double", "replace", "replace", "join", "wrap"])):
        case "rename" if isinstance(owner, dict):
            owner[draw(st.sampled_from(KEYS))] = owner.pop(key)
        case "drop":
            del owner[key]
        case "double" if isinstance(owner, list):
            owner.insert(key, owner[key])
        case "join" if isinstance(owner, dict):
            owner[draw(st.sampled_from(KEYS))] = draw(values)
        case "wrap":
            owner[key] = [owner[key]]
        case _:
            owner[key] = draw(values)
    return json.dumps(row, ensure_ascii=draw(st.booleans()))


def damage_image(path: Path, draw: Callable) -> None:
    match draw(st.sampled_from(["bytes", "bytes", "bytes", "remove", "folder", "16 bits"])):
        case "bytes":
            path.write_bytes(damage_bytes(path.read_bytes(), draw))
        case "16 bits":
            Image.new("I;16", (9, 9), 40_000).save(path, "PNG")
        case kind:
            path.unlink()
            if kind == "folder":
                path.mkdir()


def damage(folder: Path, draw: Callable) -> None:
    data = folder / "data.jsonl"
    for _ in range(draw(st.integers(1, 3))):
        match draw(st.sampled_from(["bytes", "row", "row", "row", "image"])):
            case "bytes":
                data.write_bytes(damage_bytes(data.read_bytes(), draw))
            case "row":
                lines = data.read_text("utf-8", "surrogateescape").split("\n")
                number = draw(st.integers(0, len(lines) - 1))
                try:
                    lines[number] = damage_row(lines[number], draw)
                except (ValueError, TypeError):
                    continue  # damaged before, or empty
                data.write_text("\n".join(lines), "utf-8", "surrogatepass")
            case "image":
                images = sorted(path for path in folder.glob("p/*") if path.is_file())
                if images:
                    damage_image(draw(st.sampled_from(images)), draw)


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from strings(part) if key != "tools" else ()
    elif isinstance(value, list):
        for part in value:
            yield from strings(part)


def assert_trains_all_it_says(row: dict, messages: list[dict], folder: Path, processor) -> None:
    batch = ConversationCollator(processor)([messages])
    file_messages = row.get("messages") or row["conversations"]
    contents = [message["content"] for message in file_messages]  # where a path is a word
    named = [text for text in strings(row) if text.endswith(SUFFIXES) and text not in contents]
    named = [text for text in named if (folder / text).exists()]
    wanted = [processor.image_processor(Image.open(folder / name)) for name in named]
    pixels = batch.get("pixel_values", [])
    assert len(pixels) == len(wanted)
    for want, actual in zip(wanted, pixels, strict=True):
        assert torch.equal(actual, want["pixel_values"][0])
    labels = batch["labels"][0]
    learned = processor.tokenizer.decode(labels[labels != -100], skip_special_tokens=False)
    everything = processor.tokenizer.decode(batch["input_ids"][0], skip_special_tokens=False)
    spoken = [message["content"] for message in file_messages if message["role"] == "assistant"]
    assert spoken and file_messages[-1]["role"] == "assistant"
    assert all(words.strip() and words in learned for words in spoken)
    for words in strings(file_messages):
        if words in contents or not words.endswith(SUFFIXES):
            assert words.replace("<image>", "").strip() in everything
    of_tools = json.dumps([message.get("tools") for message in file_messages])  # text
    assert "<image>" not in everything or "<image>" in of_tools


def assert_never_silent(folder: Path, processor, memory: Path) -> int:
    """Returns how many rows are trained on."""
    path = folder / "data.jsonl"
    check = partial(check_sources, [DataSource(str(path))], processor, 1024, image_cache=memory)
    try:
        checked = check(on_bad="skip")
    except ValueError as error:
        assert str(path) in str(error)
        with pytest.raises(ValueError):
            check()
        return 0
    lines = path.read_text("utf-8-sig", "surrogateescape").split("\n")
    rows = [number for number, line in enumerate(lines, start=1) if line.strip()]
    assert checked.skipped == len(rows) - len(checked.sample_labels)
    if checked.skipped:
        with pytest.raises(ValueError) as refused:
            check()
        for number in set(rows) - set(checked.sample_labels):
            assert re.search(rf"(:|also .*\b){number}\b", str(refused.value))
    else:
        assert contents_of(check()) == contents_of(checked)
    for number, messages in zip(checked.sample_labels, checked.conversations(), strict=True):
        assert_trains_all_it_says(json.loads(lines[number - 1]), messages, folder, processor)
    return len(checked.sample_labels)


@pytest.mark.parametrize("examples", [60, pytest.param(5_000, marks=pytest.mark.exhaustive)])
def test_damaged_files_are_refused_or_trained_with_all_that_they_say(
    sound, processor, tmp_path, examples
):
    usable_counts = [assert_never_silent(sound, processor, tmp_path / "memory")]
    assert usable_counts == [len(CONVERSATIONS)]

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(st.data())
    def check(data):
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound, folder)
        damage(folder, data.draw)
        usable_counts.append(assert_never_silent(folder, processor, tmp_path / "memory"))

    check()
    # Both outcomes must be met, or the test sees nothing.
    assert (
        0 in usable_counts and len(CONVERSATIONS) in usable_counts and len(set(usable_counts)) > 3
    )
