"""Several sets of rows: weights, and rows that are held out for evaluation."""

import base64
import gc
import hashlib
import json
import os
import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from glm4v_patched.data import check as checking
from glm4v_patched.data import stored_rows
from glm4v_patched.data.check import _is_held_out, check_sets
from glm4v_patched.data.checked_data import CheckedData
from glm4v_patched.data.source import Source
from tests.helpers.data_forms import found, png, turns, write_rows


@pytest.fixture
def check(tmp_path, processor):
    def check_them(*sources: Source, **options) -> CheckedData:
        return check_sets(sources, processor, 1024, memory=tmp_path / "m.sqlite", **options)

    return check_them


def row(number: int, name: str = "") -> list[dict]:
    return turns(f"What is {number}{name}?", "red")


@pytest.fixture
def write(tmp_path):
    def write_them(name: str, numbers) -> Source:
        return Source(str(write_rows(tmp_path / name, *(row(n, name) for n in numbers))))

    return write_them


def asked(checked: CheckedData) -> Counter:
    return Counter(messages[0]["content"] for messages in checked.conversations())


def test_sets_are_read_one_after_the_other(tmp_path, check, write):
    a, b = write("a", range(3)), write("b", range(2))
    checked = check(a, b)
    assert [*checked.conversations()] == [
        *(row(n, "a") for n in range(3)),
        row(0, "b"),
        row(1, "b"),
    ]
    assert checked.row_lines == ("a:1", "a:2", "a:3", "b:1", "b:2")
    assert checked.place(4) == f"{b.path}:2"
    Path(b.path).write_text(json.dumps({"messages": []}) + "\n" + "5")
    with pytest.raises(ValueError, match=r"b: 2 of 2 rows cannot(.|\n)*b:1: (.|\n)*b:2: "):
        check(a, b)
    assert check(a, b, on_bad="skip").counts.rows == 3
    with pytest.raises(ValueError, match="b has changed since it was checked"):
        checked.conversations()


def test_a_weight_is_how_often_a_row_comes(tmp_path, check, write):
    a, b, c = (write(name, range(10)) for name in "abc")
    checked = check(a, Source(b.path, weight=2.0), Source(c.path, weight=1.3))
    counts = asked(checked)
    assert {counts[f"What is {n}a?"] for n in range(10)} == {1}
    assert {counts[f"What is {n}b?"] for n in range(10)} == {2}
    assert sorted(counts[f"What is {n}c?"] for n in range(10)) == [1] * 7 + [2] * 3
    assert len(checked.row_digests) == checked.counts.rows == 43
    for weight, rows in ((0.5, 5), (0.28, 3)):
        assert check(Source(c.path, weight=weight)).counts.rows == rows
    # The same rows, whatever their order.
    lines = Path(c.path).read_text().splitlines()
    again = asked(check(Source(c.path, weight=1.3)))
    Path(c.path).write_text("\n".join(reversed(lines)))
    assert asked(check(Source(c.path, weight=1.3))) == again


@pytest.mark.parametrize("alone", [True, False])
def test_a_weight_that_leaves_no_row_of_a_set_is_refused(tmp_path, check, write, words, alone):
    a, b = (write(name, range(20)) for name in "ab")
    others = [] if alone else [b]
    with words.refused(ValueError, "a: weight 0.02 of 20", "0.05"):
        check(Source(a.path, weight=0.02), *others)
    assert check(Source(a.path, weight=0.05), *others).counts.rows == 1 + 20 * len(others)
    Path(a.path).write_text(Path(a.path).read_text() + '{"messages": []}\n' * 20)
    few = Source(a.path, weight=0.025)  # one of 40, and none of the 20 that are left
    with pytest.raises(ValueError, match=r"weight 0\.025 of 20 rows"):
        check(few, *others, on_bad="skip")


def test_rows_are_held_out_by_what_they_say_and_not_by_where_they_stand(tmp_path, check, write):
    numbers = [*range(200)]
    checked = check(write("a", [*numbers, *numbers[:50]]), evaluate=0.2)
    there, held_out = asked(checked), asked(checked.eval)
    assert not there.keys() & held_out.keys()
    assert len(there) + len(held_out) == 200 and 20 <= len(held_out) <= 60
    assert checked.asked == 0.2 and checked.eval.eval is None
    # In another order, without some and with others: what is there stays on its side.
    other = check(write("a", [*reversed(numbers[20:]), *range(300, 320)]), evaluate=0.2)
    assert not asked(other).keys() & held_out.keys()
    assert not asked(other.eval).keys() & there.keys()
    # A larger share takes more, and leaves none of those.
    assert held_out.keys() < asked(check(write("a", numbers), evaluate=0.4).eval).keys()


def test_a_digest_is_on_the_same_side_in_every_process():
    """Training processes, resumed runs and other machines hold out the same rows."""
    digests = [hashlib.sha256(bytes([number])).hexdigest() for number in range(40)]
    held_out = [number for number, digest in enumerate(digests) if _is_held_out(digest, 0.1)]
    assert held_out == [3, 10, 36]
    assert _is_held_out("0" * 64, 0.01) and not _is_held_out("f" * 64, 0.99)


def test_a_share_that_leaves_no_row_on_a_side_is_refused(check, write, words):
    with words.refused(ValueError, "data.eval is 1e-06", "3 rows 0"):
        check(write("a", range(3)), evaluate=1e-6)


def test_a_file_may_be_evaluated_on(tmp_path, check, write, capsys, words):
    a, b = write("a", range(4)), write("b", range(3))
    checked = check(a, evaluate=[Source(b.path, weight=2.0)])
    assert [*checked.conversations()] == [row(n, "a") for n in range(4)]
    assert [*checked.eval.conversations()] == [row(n, "b") for n in range(3)]
    assert checked.asked == [b.path] and not capsys.readouterr().out
    check(a, evaluate=[a])
    words(capsys.readouterr().out)
    checked.write(tmp_path / "out.json")
    read = CheckedData.read(tmp_path / "out.json")
    assert found(read) == found(checked)
    Path(b.path).write_text("5")
    with pytest.raises(ValueError, match=r"b: 1 of 1 rows cannot be used"):
        check(a, evaluate=[b])


def test_rows_are_read_from_the_disk_in_any_process(tmp_path, check, write, monkeypatch):
    monkeypatch.setattr(stored_rows, "ROWS_AT_ONCE", 3)
    checked = check(write("a", range(10)))
    checked.write(tmp_path / "out.json")
    conversations = CheckedData.read(tmp_path / "out.json").conversations()
    assert [conversations[n] for n in (9, 0, 3)] == [row(n, "a") for n in (9, 0, 3)]
    assert [*conversations[2:5]] == [row(n, "a") for n in (2, 3, 4)]
    for context in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(
            conversations,
            batch_size=4,
            collate_fn=list,
            num_workers=1,
            multiprocessing_context=context,
        )
        assert [one for batch in loader for one in batch] == [row(n, "a") for n in range(10)]


def test_faults_of_many_parts_are_of_their_rows(check, write, monkeypatch):
    monkeypatch.setattr(stored_rows, "ROWS_AT_ONCE", 3)
    source = write("a", range(10))
    lines = Path(source.path).read_text().splitlines()
    Path(source.path).write_text("\n".join([*lines[:7], '{"messages": []}', *lines[8:]]))
    kept = check(source, on_bad="skip")
    assert [*kept.conversations()] == [row(n, "a") for n in range(10) if n != 7]


def test_rows_that_are_cut_short_are_refused(tmp_path, check, write):
    checked = check(write("a", range(10))).write(tmp_path / "out.json")
    rows = tmp_path / "out.arrow"
    rows.write_bytes(rows.read_bytes()[:-100])
    for damage in (lambda: None, rows.unlink):
        damage()
        with pytest.raises(ValueError, match=r"out\.json does not say which rows .*out\.arrow"):
            CheckedData.read(tmp_path / "out.json")
    assert checked.conversations()[0] == row(0, "a")  # the file that is open stays


def test_rows_are_kept_for_a_month_after_they_were_last_asked_for_and_those_of_folders_not(
    tmp_path, check, write
):
    kept = tmp_path / "rows"
    a, b = write("a", range(3)), write("b", range(3))
    check(a)
    [mine] = kept.glob("*.arrow")
    check(b)
    left = kept / "glm4v-checking-killed"
    left.mkdir()
    for days in (20, 31):
        for path in (*kept.glob("*.arrow"), left):
            if days == 20 or path != mine:
                os.utime(path, (time.time() - days * 24 * 3600,) * 2)
        check(a)  # which asks for its rows
        assert len([*kept.glob("*.arrow")]) == (2 if days == 20 else 1)
        assert mine.stat().st_mtime > time.time() - 3600
    folder = tmp_path / "folder"
    folder.mkdir()
    Path(a.path).rename(folder / "a.jsonl")
    checked = check(Source(str(folder)))
    assert [*kept.glob("*.arrow")] == [mine] and not left.exists()
    assert len(checked.rows) == 3 and len([*kept.glob("glm4v-checking-*")]) == 1
    del checked
    gc.collect()
    assert not [*kept.glob("glm4v-checking-*")]


def test_half_a_set_is_of_all_pictures_where_many_rows_have_the_same_words(tmp_path, check):
    rows = []
    for n in range(40):
        (tmp_path / f"{n}.png").write_bytes(png((n, 0, 0)))
        rows.append(turns("What is it?", "red" if n % 2 else "0", image=f"{n}.png"))
    source = Source(str(write_rows(tmp_path / "classes", *rows)), weight=0.5)
    answers = Counter(each[1]["content"] for each in check(source).conversations())
    assert answers.total() == 20 and min(answers["red"], answers["0"]) > 2


def test_a_file_that_changes_while_it_is_read_is_refused_and_nothing_is_kept(
    tmp_path, check, write, monkeypatch
):
    a = write("a", range(3))
    before = Path(a.path).read_text()
    read = checking.read_rows

    def replaced(source):
        Path(a.path).write_text(before.replace("What is 1a", "What is 9a"))
        yield from read(source)

    monkeypatch.setattr(checking, "read_rows", replaced)
    with pytest.raises(ValueError, match="a has changed while it was read"):
        check(a)
    monkeypatch.setattr(checking, "read_rows", read)
    Path(a.path).write_text(before)
    assert check(a).conversations()[1] == row(1, "a")


def test_pictures_that_rows_hold_are_written_again_where_the_cache_lacks_them(
    tmp_path, check, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    source = Source(str(write_rows(tmp_path / "held", turns("What is it?", "red", image=url))))
    first = found(check(source))
    shutil.rmtree(tmp_path / "cache" / "glm4v-patched" / "pictures")
    assert found(check(source)) == first


def test_two_checks_of_a_set_with_a_fault_are_not_in_each_others_way(tmp_path, check, write):
    a = write("a", range(200))
    with Path(a.path).open("a") as file:
        file.write("{}\n")
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(len(check(a, on_bad="skip").rows)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200, 200, 200]
