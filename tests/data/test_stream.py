"""Rows that are read while they are learned: which, in which order, and what is left out."""

import json
import os
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from glm4v_patched.data import decoding, stream
from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.data.source import DataSource
from glm4v_patched.data.stream import (
    BAD_ROWS_KEY,
    UNREADABLE_KEY,
    StreamDataset,
    StreamingCollator,
)
from glm4v_patched.remote.loss import IGNORE_INDEX
from tests.data.forms import draw, make
from tests.data.samples import turns, write_rows


def written(path, *rows) -> DataSource:
    return DataSource(str(write_rows(path, *rows)))


@pytest.fixture
def rows(tmp_path) -> DataSource:
    return written(tmp_path / "rows.jsonl", *(turns(str(n)) for n in range(20)))


def asked(rows) -> list[str | None]:
    return [row.messages[0]["content"] if row.problem is None else None for row in rows]


def taken(stream: StreamDataset, number: int) -> list[str | None]:
    return asked(islice(stream, number))


@pytest.mark.parametrize("buffer", [1, 7, 1000])
def test_each_pass_has_every_row_once_in_another_order(rows, buffer):
    order = taken(StreamDataset([rows], 1, buffer_size=buffer, seed=3), 40)
    everything = [str(n) for n in range(20)]
    assert sorted(order[:20], key=int) == sorted(order[20:], key=int) == everything
    assert (order[:20] == everything) == (buffer == 1)
    assert buffer == 1 or order[:20] != order[20:]
    assert buffer == 1 or order != taken(StreamDataset([rows], 1, buffer_size=buffer, seed=4), 40)


def test_processes_share_the_rows_and_draw_for_themselves(rows, tmp_path):
    shares = [taken(StreamDataset([rows], 1, shard=(k, 2)), 10) for k in range(2)]
    assert sorted(map(int, sum(shares, []))) == [*range(20)]
    assert [int(n) // 2 for n in shares[0]] != [int(n) // 2 for n in shares[1]]
    other = written(tmp_path / "other.jsonl", turns("other"), turns("other"))
    shares = [taken(StreamDataset([other, rows], 1, shard=(k, 2)), 20) for k in range(2)]
    assert [n == "other" for n in shares[0]] != [n == "other" for n in shares[1]]
    few = written(tmp_path / "few.jsonl", turns("0"), "", turns("1"), "", "")
    assert [taken(StreamDataset([few], 1, shard=(k, 2)), 2) for k in range(2)] == [
        ["0"] * 2,
        ["1"] * 2,
    ]
    assert {*taken(StreamDataset([replace(rows, max_samples=3)], 1, shard=(1, 2)), 5)} == {"1"}


@pytest.mark.parametrize("workers", [0, 3])
def test_a_stream_goes_on_where_it_was_stopped_whoever_reads(rows, workers):
    whole = taken(StreamDataset([rows], 2, buffer_size=5), 50)
    rest = StreamDataset([rows], 2, buffer_size=5, num_used=26)
    loader = DataLoader(rest, 2, collate_fn=asked, num_workers=workers)
    assert sum(islice(loader, 12), []) == whole[26:]


def test_a_row_that_is_corrected_moves_no_other(rows, tmp_path):
    """A run that ended at it goes on with the rows that it has not learned; and of two readers, of
    which one cannot fetch an image, none has the other's rows."""
    right = taken(StreamDataset([rows], 1, buffer_size=6), 40)
    lines = Path(rows.path).read_text().splitlines()
    wrong = written(tmp_path / "wrong.jsonl", *lines[:7], "{", turns("8", 7), *lines[9:])
    streamed_rows = [*islice(StreamDataset([wrong], 1, buffer_size=6), 40)]
    assert asked(streamed_rows) == [None if n in ("7", "8") else n for n in right]
    assert {row.location for row in streamed_rows if row.problem} == {
        f"{wrong.path}:{n}" for n in (8, 9)
    }


@pytest.mark.parametrize(
    ("form", "context", "workers"), [("save_to_disk", "fork", 2), ("hf download", "spawn", 1)]
)
def test_images_of_a_table_come_to_whoever_reads_them(tmp_path, form, context, workers):
    """Each process that reads has Arrow and the cache of images for itself, and its own rows."""
    examples = draw(tmp_path, 6)
    columns = {name: name for name in ("image", "question", "answer")}
    source = DataSource(str(make(form, tmp_path, examples)[0]), columns=columns)
    [*islice(StreamDataset([source], 2), 1)]  # a parent that has read, and has threads
    options = {"num_workers": workers, "multiprocessing_context": context, "timeout": 120}
    loader = DataLoader(StreamDataset([source], 2), 2, collate_fn=list, **options)
    streamed_rows = [row for batch in islice(loader, 3) for row in batch]
    conversations = [row.messages for row in streamed_rows]
    samples = {(Image.open(row[0]["image"]).tobytes(), row[1]["content"]) for row in conversations}
    expected = [
        (Image.open(tmp_path / "images" / example.image), example.answer) for example in examples
    ]
    assert samples == {(image.tobytes(), answer) for image, answer in expected}


def test_a_buffer_of_fewer_places_than_sets_has_one_for_each(rows):
    assert len(taken(StreamDataset([rows] * 3, 1, buffer_size=2), 30)) == 30


def test_a_set_is_drawn_from_by_its_weight_and_no_more_rows_are_held_than_the_buffer_has_places(
    rows, tmp_path, monkeypatch
):
    often = replace(written(tmp_path / "often.jsonl", turns("often")), weight=3)
    order = taken(StreamDataset([often, rows], 1), 400)
    assert 0.7 < order.count("often") / 400 < 0.8
    read, plain = [], stream.iter_rows

    def noted(*arguments, **options):
        for row in plain(*arguments, **options):
            read.append(row)
            yield row

    monkeypatch.setattr(stream, "iter_rows", noted)
    assert len({*taken(StreamDataset([rows] * 4, 1, buffer_size=8), 30)}) > 10
    assert len(read) <= 30 + 8 + 4


def test_a_set_that_cannot_be_read_on_says_so_in_each_row_to_come(tmp_path):
    for content, shard, location, message in (
        # Rows are read in the format of the first, also by a process whose own have another.
        ([{"query": "q", "response": "b"}, turns("0")], (1, 2), "", "process 2 of 2"),
        (["[", json.dumps({"messages": turns("0")}), ",", "{]"], (0, 1), ":4", "row 2 is not JSON"),
        ([], (0, 1), "", "it is empty"),
    ):
        source = written(tmp_path / "rows", *content)
        *_, last, again = islice(StreamDataset([source], 1, shard=shard, buffer_size=1), 5)
        assert last == again and last.ends_source
        assert last.location == source.path + location and message in last.problem


@pytest.fixture
def collator(processor) -> StreamingCollator:
    return StreamingCollator(ConversationCollator(processor), 100, 8192)


@pytest.fixture
def streamed(tmp_path):
    """Rows as they come to the collator, which may show two images, of which one is cut."""
    image = Image.effect_noise((64, 64), 50).convert("RGB")
    image.resize((8, 8)).save(tmp_path / "cut.png")
    image.save(tmp_path / "whole.png")
    os.truncate(tmp_path / "cut.png", 99)

    def stream_them(*rows) -> list:
        file = written(tmp_path / "given.jsonl", *rows)
        return [*islice(StreamDataset([file], len(rows), buffer_size=1), len(rows))]

    return stream_them


def same(batch: dict, other: dict) -> bool:
    return batch.keys() == other.keys() and all(torch.equal(batch[k], other[k]) for k in other)


def test_only_rows_of_more_tokens_than_memory_was_planned_for_are_not_batched(collator, streamed):
    rows = streamed(turns("a", image="whole.png"), turns("b"))
    want = collator.collator([row.messages for row in rows])
    longest = want["input_ids"].shape[1]  # of the row with an image
    for limit, is_taken in ((longest, True), (longest - 1, False)):
        collator.max_tokens = limit
        batch = collator(rows)
        assert (batch.pop(BAD_ROWS_KEY) == []) == is_taken and batch.pop(UNREADABLE_KEY) == []
        assert same(batch, want) == is_taken


def test_a_row_that_cannot_be_learned_from_is_not_in_its_batch(
    collator, streamed, tmp_path, monkeypatch
):
    monkeypatch.setattr(decoding, "MAX_PIXELS", 64 * 64 - 1)
    for bad, message in (
        (turns("b", image="cut.png"), "cut.png cannot be read as an image"),
        (turns("b", image="whole.png"), "whole.png is too large"),
        (turns("b", answer="x" * 2**20), "characters"),
        (turns("b", answer=7), "content is 7; expected text"),
    ):
        rows = streamed(turns("a"), bad, turns("c"))
        batch = collator(rows)
        [fault] = batch.pop(BAD_ROWS_KEY)
        assert fault.startswith(f"{tmp_path}/given.jsonl:2: ") and message in fault
        assert batch.pop(UNREADABLE_KEY) == []
        assert same(batch, collator.collator([rows[0].messages, rows[2].messages]))


def test_a_batch_without_any_row_teaches_nothing_and_tells_what_ends_a_run(collator, streamed):
    [bad] = streamed(turns("b", image="cut.png"))
    batch = collator([bad, bad._replace(problem="is the last", ends_source=True)])
    assert len(batch[BAD_ROWS_KEY]) == 1 and batch[UNREADABLE_KEY] == [
        f"{bad.location}: is the last"
    ]
    assert batch["labels"].shape == batch["input_ids"].shape
    assert (batch["labels"] == IGNORE_INDEX).all()
