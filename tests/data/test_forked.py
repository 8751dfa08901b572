"""Rows that several processes read and measure are those that one reads, in the same order."""

import json
import os
import signal
import time

import pytest

from glm4v_patched.data import check, forked, text_rows
from glm4v_patched.data.forked import run_forked
from glm4v_patched.data.rows import iter_rows
from glm4v_patched.data.source import DataSource
from glm4v_patched.data.text_rows import RowProblem


class TwoArguments(ValueError):
    """Can be pickled, and not be loaded again."""

    def __init__(self, field, text):
        super().__init__(text)


def conversation(number: int) -> dict:
    words = "word " * (number % 7)
    question = {"role": "user", "content": f"What is {number}? {words}"}
    return {"messages": [question, {"role": "assistant", "content": f"It is {number}."}]}


def test_rows_of_several_processes_are_those_of_one(tmp_path, monkeypatch, processor):
    """Two sets; the number of rows is no multiple of that of processes or of a batch's rows, and
    some cannot be used."""
    monkeypatch.setattr(check, "ROWS_PER_BATCH", 4)
    sources = []
    for name, number in (("a", 23), ("b", 1)):
        lines = [json.dumps(conversation(n)) for n in range(number)]
        lines = ["{}" if at in (11, 16) else line for at, line in enumerate(lines)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([lines[0], "", *lines[1:]]))
        sources.append(DataSource(str(tmp_path / f"{name}.jsonl"), max_samples=22))
    results = []
    for number in (1, 3):
        monkeypatch.setattr(check, "num_reading_processes", lambda sources, number=number: number)
        checked = check.check_sources(
            sources, processor, 8192, on_bad="skip", image_cache=tmp_path / "memory" / "m.sqlite"
        )
        rows = [checked.rows[at] for at in range(len(checked.rows))]
        results.append((rows, checked.skipped, checked.files, checked.sample_labels))
    assert results[0] == results[1] and 15 < len(results[0][0]) < 23 and results[0][1] > 0
    assert sorted(path.name for path in (tmp_path / "memory").iterdir()) == ["m.sqlite"]


def test_shards_together_have_the_rows_of_a_file(tmp_path, monkeypatch):
    """The first row decides on the format of all, and a line may be too long to be read."""
    monkeypatch.setattr(text_rows, "MAX_ROW_CHARACTERS", 300)
    other = {"instruction": "What is it?", "output": "A cat."}
    rows = [{}, other, conversation(1), other, conversation(6) | {"id": "x" * 400}, other, other]
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(map(json.dumps, rows)))
    results = [*iter_rows(path)]
    assert [isinstance(row, RowProblem) for row in results] == [1, 0, 1, 0, 1, 0, 0]
    for number in (2, 3):
        shards = [[*iter_rows(path, shard=(k, number))] for k in range(number)]
        assert shards == [results[k::number] for k in range(number)]


@pytest.mark.parametrize(
    ("changes", "processes"),
    [({}, 3), ({"allow_urls": True}, 1), ({"path": "org/name"}, 1)],
    ids=["large text", "fetched images", "the Hub"],
)
def test_processes_share_only_large_files_of_text(tmp_path, monkeypatch, changes, processes):
    monkeypatch.setattr(check, "count_cores", lambda: 3)
    monkeypatch.setattr(check, "BYTES_PER_PROCESS", 100)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(conversation(1)) * 4)
    assert check.num_reading_processes([DataSource(**({"path": str(path)} | changes))]) == processes
    document = tmp_path / "a.json"  # each process would hold all of it
    document.write_text(json.dumps([conversation(1)] * 4, indent=1))
    assert check.num_reading_processes([DataSource(str(document))]) == 1
    path.write_text(json.dumps(conversation(1))[:199])
    assert check.num_reading_processes([DataSource(str(path))]) == 1


def test_each_item_is_counted_once_however_often_the_processes_are_asked(monkeypatch):
    counts: list[int] = []
    monkeypatch.setattr(forked, "POLL_SECONDS", 0.01)

    def work(number, report):
        report(number + 5)
        time.sleep(0.3)

    run_forked(work, 3, counts.append)
    assert sum(counts) == 18 and len(counts) > 1


def test_the_first_error_is_raised_as_it_was():
    def fail(number, report):
        if number == 1:
            raise ValueError("a.jsonl: 0 conversations")
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(ValueError, match="0 conversations"):
        run_forked(fail, 2, int)
    assert time.monotonic() - started < 30  # the other one is not waited for


def test_a_process_that_is_killed_is_an_error():
    with pytest.raises(RuntimeError, match="exit code -9 .*max_samples"):
        run_forked(lambda number, report: os.kill(os.getpid(), signal.SIGKILL), 1, lambda n: None)


def test_an_error_whose_pickle_does_not_load_arrives_with_its_words():
    def fail(number, report):
        raise TwoArguments("field", "as told")

    with pytest.raises(ValueError, match="^as told$"):
        run_forked(fail, 1, lambda n: None)


def test_a_mistake_of_ours_is_printed_and_is_an_error(capfd):
    with pytest.raises(RuntimeError, match="exit code 1 "):
        run_forked(lambda number, report: report(None), 1, lambda n: None)
    assert "TypeError: " in capfd.readouterr().err
