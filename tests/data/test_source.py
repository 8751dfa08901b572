"""Several sets of rows: weights, and rows that are held out for evaluation."""

from collections import Counter
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from glm4v_patched.data import check as checking
from glm4v_patched.data import stored_rows
from glm4v_patched.data.checked_data import CheckedData
from glm4v_patched.data.source import DataSource
from tests.data.samples import contents_of, turns, write_rows


def row(number: int, name: str = "") -> list[dict]:
    return turns(f"What is {number}{name}?", "red")


@pytest.fixture
def write(tmp_path):
    def write_them(name: str, numbers) -> DataSource:
        return DataSource(str(write_rows(tmp_path / name, *(row(n, name) for n in numbers))))

    return write_them


def asked(checked: CheckedData) -> Counter:
    return Counter(messages[0]["content"] for messages in checked.conversations())


def test_sets_are_read_one_after_the_other(check, write):
    a, b = write("a", range(3)), write("b", range(2))
    checked = check(a, b)
    rows = [row(0, "a"), row(1, "a"), row(2, "a"), row(0, "b"), row(1, "b")]
    assert [*checked.conversations()] == rows
    assert checked.sample_labels == ("a:1", "a:2", "a:3", "b:1", "b:2")
    assert checked.row_location(4) == f"{b.path}:2"
    assert check(DataSource(a.path, weight=2.0), b).row_location(6) == f"{b.path}:1"
    Path(b.path).write_text('{"messages": []}\n5')
    with pytest.raises(ValueError, match=r"b: 2 of 2 rows cannot(.|\n)*b:1: (.|\n)*b:2: "):
        check(a, b)
    assert check(a, b, on_bad="skip").counts.samples == 3


def test_a_weight_is_how_often_a_row_comes(check, write):
    a, b, c = (write(name, range(10)) for name in "abc")
    checked = check(a, DataSource(b.path, weight=2.0), DataSource(c.path, weight=1.3))
    counts = asked(checked)
    assert {counts[f"What is {n}a?"] for n in range(10)} == {1}
    assert {counts[f"What is {n}b?"] for n in range(10)} == {2}
    assert sorted(counts[f"What is {n}c?"] for n in range(10)) == [1] * 7 + [2] * 3
    assert len(checked.sample_digests) == checked.counts.samples == 43
    assert check(DataSource(c.path, weight=0.28)).counts.samples == 3
    # The same rows, whatever their order.
    again = asked(check(DataSource(c.path, weight=1.3)))
    Path(c.path).write_text("\n".join(reversed(Path(c.path).read_text().splitlines())))
    assert asked(check(DataSource(c.path, weight=1.3))) == again


def test_a_weight_that_leaves_no_row_of_a_set_is_refused(check, write, words):
    a = write("a", range(20))
    with words.refused(ValueError, "a: weight 0.02 of 20", "0.05"):
        check(DataSource(a.path, weight=0.02), write("b", range(20)))
    assert check(DataSource(a.path, weight=0.05)).counts.samples == 1
    # Of first rows a weight says nothing, and there are no more than the set is to have.
    assert check(DataSource(a.path, weight=0.02), num_precheck=4).counts.samples == 4
    assert check(DataSource(a.path, max_samples=3), num_precheck=4).counts.samples == 3


def test_rows_are_held_out_by_what_they_say_and_not_by_where_they_stand(check, write, words):
    numbers = [*range(200)]
    source = write("a", [*numbers, *numbers[:50]])
    Path(source.path).write_text(Path(source.path).read_text() + "5")
    checked = check(source, evaluate=0.2, on_bad="skip")
    trained_on, held_out = asked(checked), asked(checked.eval)
    assert not trained_on.keys() & held_out.keys()
    assert len(trained_on) + len(held_out) == 200 and 20 <= len(held_out) <= 60
    assert checked.eval_option == 0.2 and checked.eval.eval is None
    # In another order, without some and with others: what is there stays on its side.
    other = check(write("a", [*reversed(numbers[20:]), *range(300, 320)]), evaluate=0.2)
    assert not asked(other).keys() & held_out.keys()
    assert not asked(other.eval).keys() & trained_on.keys()
    # A larger share takes more, and leaves none of those.
    assert held_out.keys() < asked(check(write("a", numbers), evaluate=0.4).eval).keys()
    assert (checked.skipped, checked.eval.skipped) == (1, 0)
    with words.refused(ValueError, "data.eval is 1e-06", "3 rows, 0"):
        check(write("a", range(3)), evaluate=1e-6)


def test_a_file_may_be_evaluated_on(tmp_path, check, write, capsys, words):
    a, b = write("a", range(4)), write("b", range(3))
    checked = check(a, evaluate=[DataSource(b.path, weight=2.0)])
    assert [*checked.conversations()] == [row(n, "a") for n in range(4)]
    assert [*checked.eval.conversations()] == [row(n, "b") for n in range(3)]
    assert checked.eval_option == [b.path] and not capsys.readouterr().out
    check(a, evaluate=[a])
    words(capsys.readouterr().out)
    checked.write(tmp_path / "out.json")
    assert contents_of(CheckedData.read(tmp_path / "out.json")) == contents_of(checked)
    Path(b.path).write_text("5")
    with pytest.raises(ValueError, match=r"b: 1 of 1 rows cannot be used"):
        check(a, evaluate=[b])


def test_rows_are_read_from_the_disk_in_any_process_and_refused_where_they_are_cut(
    tmp_path, check, write, monkeypatch
):
    monkeypatch.setattr(stored_rows, "ROWS_PER_BATCH", 3)
    source, rows = write("a", range(10)), [row(n, "a") for n in range(10)]
    check(source).write(tmp_path / "out.json")
    conversations = CheckedData.read(tmp_path / "out.json").conversations()
    assert [conversations[n] for n in (9, 0, 3)] == [rows[n] for n in (9, 0, 3)]
    assert [*conversations[2:5]] == rows[2:5]
    for context in ("fork", "spawn"):
        options = {"num_workers": 1, "multiprocessing_context": context}
        loader = DataLoader(conversations, batch_size=4, collate_fn=list, **options)
        assert [one for batch in loader for one in batch] == rows
    stored = tmp_path / "out.arrow"
    check(write("b", range(9))).write(tmp_path / "other.json")
    for content in (stored.read_bytes()[:-100], (tmp_path / "other.arrow").read_bytes()):
        stored.write_bytes(content)
        with pytest.raises(ValueError, match=r"out\.json does not contain the result .*out\.arrow"):
            CheckedData.read(tmp_path / "out.json")
    # Faults of many parts are of their rows.
    lines = Path(source.path).read_text().splitlines()
    Path(source.path).write_text("\n".join([*lines[:7], '{"messages": []}', *lines[8:]]))
    assert [*check(source, on_bad="skip").conversations()] == rows[:7] + rows[8:]


@pytest.mark.parametrize("numbers", [[], [0], [8], [2, 3], [0, 4, 8], [1, 2, 6, 7], [*range(9)]])
def test_columns_of_selected_rows_are_of_these_rows_whatever_batches_they_are_in(numbers):
    """Rows that were checked are read column by column; those that are skipped are left out."""
    empty = {name: None for name in stored_rows.SCHEMA.names}
    batches = [[empty | {"line": n} for n in range(begin, begin + 3)] for begin in (0, 3, 6)]
    selected = stored_rows.store_rows(batches, None).select(numbers)
    assert [line for (line,) in stored_rows.iter_values(selected, "line")] == numbers


def test_a_file_that_changes_while_it_is_read_is_refused(check, write, monkeypatch):
    a = write("a", range(3))
    before, read = Path(a.path).read_text(), checking.iter_rows

    def replaced(source):
        Path(a.path).write_text(before.replace("What is 1a", "What is 9a"))
        yield from read(source)

    monkeypatch.setattr(checking, "iter_rows", replaced)
    with pytest.raises(ValueError, match="a changed while it was read"):
        check(a)
