"""Rows that are read while they are learned: which, in which order, and what is left out."""

import io
import json
from itertools import islice
from pathlib import Path

import datasets
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.data.source import Source
from glm4v_patched.data.stream import FAULTS, Stream, StreamCollator
from glm4v_patched.remote.loss import IGNORE_INDEX


def conversation(asked: str, answer: str = "yes", **more) -> dict:
    user = {"role": "user", "content": asked, **more}
    return {"messages": [user, {"role": "assistant", "content": answer}]}


def written(path, rows) -> Source:
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return Source(str(path))


@pytest.fixture
def rows(tmp_path) -> Source:
    return written(tmp_path / "rows.jsonl", [conversation(str(n)) for n in range(20)])


def asked(rows) -> list[str]:
    return [row.messages[0]["content"] for row in rows]


def taken(stream: Stream, number: int) -> list[str]:
    return asked(islice(stream, number))


@pytest.mark.parametrize("buffer", [1, 7, 1000])
def test_each_pass_has_every_row_once_in_another_order(rows, buffer):
    order = taken(Stream([rows], 1, buffer=buffer, seed=3), 40)
    everything = [str(n) for n in range(20)]
    assert sorted(order[:20], key=int) == sorted(order[20:], key=int) == everything
    assert (order[:20] == everything) == (buffer == 1)
    assert buffer == 1 or order[:20] != order[20:]
    assert order != taken(Stream([rows], 1, buffer=buffer, seed=4), 40) or buffer == 1


def test_processes_share_the_rows(rows):
    shares = [taken(Stream([rows], 1, share=(k, 3)), n) for k, n in enumerate((7, 7, 6))]
    assert sorted(map(int, sum(shares, []))) == [*range(20)]


def test_a_stream_goes_on_where_it_was_stopped(rows):
    whole = taken(Stream([rows], 2, buffer=5), 50)
    assert taken(Stream([rows], 2, buffer=5, start=26), 24) == whole[26:]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_readers_changes_nothing(rows, workers):
    def batches(number: int) -> list[list[str]]:
        stream = Stream([rows], 2, buffer=5, start=6)
        return [*islice(DataLoader(stream, 2, collate_fn=asked, num_workers=number), 9)]

    assert batches(workers) == batches(0)


def test_pictures_of_a_table_come_to_whoever_reads_them(tmp_path, monkeypatch):
    """Each process that reads has Arrow and the cache of pictures for itself."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    images = [Image.effect_noise((32, 32), n) for n in range(6)]
    columns = {"image": datasets.Image(), "question": datasets.Value("string")}
    features = datasets.Features(columns | {"answer": datasets.Value("string")})
    table = {"image": images, "question": [*"abcdef"], "answer": [*"ABCDEF"]}
    path = str(tmp_path / "rows.parquet")
    datasets.Dataset.from_dict(table, features=features).to_parquet(path)
    source = Source(path, columns={name: name for name in table})

    def pictures(rows) -> list[tuple[str, bytes]]:
        return [(r.messages[0]["content"], Path(r.messages[0]["image"]).read_bytes()) for r in rows]

    loader = DataLoader(Stream([source], 2), 2, collate_fn=pictures, num_workers=2, timeout=60)
    shown = {
        asked: Image.open(io.BytesIO(it)) for batch in islice(loader, 3) for asked, it in batch
    }
    assert sorted(shown) == [*"abcdef"]
    assert all(
        shown[asked].tobytes() == it.tobytes() for asked, it in zip("abcdef", images, strict=True)
    )


def test_a_set_is_drawn_from_by_its_weight(rows, tmp_path):
    often = written(tmp_path / "often.jsonl", [conversation("often")])
    often = Source(often.path, weight=3)
    drawn = taken(Stream([often, rows], 1), 400)
    assert 0.7 < drawn.count("often") / 400 < 0.8


def test_rows_that_cannot_be_read_are_told_with_the_next_one(tmp_path):
    few = written(tmp_path / "few.jsonl", [conversation("0"), "{", conversation("2", answer=7)])
    first, second = islice(Stream([few], 1, buffer=1), 2)
    assert asked([first, second]) == ["0", "0"] and first.passed == ()
    broken, no_text = second.passed
    assert broken.startswith(f"{few.path}:2: ") and no_text.startswith(f"{few.path}:3: ")


def test_a_process_without_a_row_is_told_so(tmp_path):
    few = written(tmp_path / "few.jsonl", [conversation("0"), "{"])
    with pytest.raises(ValueError, match="process 2 of 2"):
        next(iter(Stream([few], 1, share=(1, 2))))


def test_all_processes_read_rows_in_the_format_of_the_first(tmp_path):
    """Also a process whose rows alone would have another one, which it refuses as all do."""
    alpaca = {"instruction": "What?", "input": "this", "output": "that"}
    file = written(tmp_path / "rows.jsonl", [alpaca, conversation("other")])
    with pytest.raises(ValueError, match="process 2 of 2"):
        next(iter(Stream([file], 1, share=(1, 2))))


# Batches


@pytest.fixture
def collator(processor) -> StreamCollator:
    return StreamCollator(ConversationCollator(processor), 100, 8192)


def streamed(rows, tmp_path) -> list:
    file = written(tmp_path / "given.jsonl", rows)
    return [*islice(Stream([file], len(rows), buffer=1), len(rows))]


def same(batch: dict, other: dict) -> bool:
    return batch.keys() == other.keys() and all(torch.equal(batch[k], other[k]) for k in other)


@pytest.fixture
def pictures(tmp_path):
    Image.effect_noise((64, 64), 50).convert("RGB").save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])


def test_good_rows_are_batched_as_in_a_training_that_checked_them(collator, pictures, tmp_path):
    rows = streamed([conversation("a", image="whole.png"), conversation("b")], tmp_path)
    batch = collator(rows)
    assert batch.pop(FAULTS) == []
    assert same(batch, collator.collator([row.messages for row in rows]))


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (conversation("b", image="cut.png"), "cut.png cannot be decoded"),
        (conversation("b", image="none.png"), "none.png does not exist"),
        (conversation("b " * 200), "100"),
        (conversation("b", answer="x" * 2**20), "characters"),
    ],
    ids=["a cut picture", "no picture", "longer than planned", "endless"],
)
def test_a_row_that_cannot_be_learned_from_is_not_in_its_batch(
    collator, pictures, tmp_path, bad, told
):
    rows = streamed([conversation("a"), bad, conversation("c")], tmp_path)
    batch = collator(rows)
    [fault] = batch.pop(FAULTS)
    assert fault.startswith(f"{tmp_path}/given.jsonl:2: ") and told in fault
    assert same(batch, collator.collator([rows[0].messages, rows[2].messages]))


def test_a_batch_without_any_row_teaches_nothing(collator, pictures, tmp_path):
    batch = collator(streamed([conversation("b", image="cut.png")], tmp_path))
    assert len(batch[FAULTS]) == 1
    assert batch["labels"].shape == batch["input_ids"].shape
    assert (batch["labels"] == IGNORE_INDEX).all()
