"""How answers are compared, and which pictures are swapped."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from glm4v_patched.data.messages import pictures_of
from glm4v_patched.inference.questions import Question, digest_pictures
from glm4v_patched.inference.scoring import (
    exact_match,
    load_metric,
    mean_score,
    swap_pictures,
    token_f1,
)


def question(row: int, reference: str, text: str = "q", pictures: int = 1) -> Question:
    prompt = [{"role": "user", "content": text, "image": f"{row}-{i}.png"} for i in range(pictures)]
    return Question(row, prompt or [{"role": "user", "content": text}], reference)


@pytest.mark.parametrize(
    ("answer", "reference", "exact", "f1"),
    [
        (" a red cross\n", "a red cross", 1, 1),
        ("A red cross.", "a red cross", 0, 1),
        ("red red", "a red cross", 0, 0.4),
        ("", "a red cross", 0, 0),
        ("", "", 1, 1),
        ("一张图片", "这是一张图片。", 0, 0.8),
    ],
)
def test_answers_are_compared(answer, reference, exact, f1):
    assert exact_match(answer, reference) == exact
    assert token_f1(answer, reference) == pytest.approx(f1)


def test_pictures_are_other_pictures_by_their_bytes(tmp_path):
    for name, colour in {"a": "red", "b": "blue", "copy of a": "red"}.items():
        Image.new("RGB", (2, 2), colour).save(tmp_path / f"{name}.png")
    rows = []
    for row, name in enumerate(["a", "a", "copy of a", "b"]):
        path = str(tmp_path / f"{name}.png")
        rows.append(Question(row, [{"role": "user", "content": "q", "image": path}], str(row)))
    digests = digest_pictures(rows)
    swapped = swap_pictures(rows, digests)
    assert [Path(*pictures_of(each.prompt)).stem for each in swapped][:3] == ["b"] * 3
    assert all(each.swapped for each in swapped) and len(swapped) == 4
    assert [each.reference for each in swapped] == [each.reference for each in rows]
    assert swap_pictures(rows[:3], digests) == []


ANSWERS = st.tuples(
    st.sampled_from("abc"),
    st.sampled_from("qr"),
    st.lists(st.integers(0, 3), max_size=2),
)


@given(st.lists(ANSWERS))
@settings(max_examples=100, deadline=None)
def test_swapped_pictures_are_never_of_the_same_answer_nor_the_same(rows):
    asked = [question(n, answer, text, len(of)) for n, (answer, text, of) in enumerate(rows)]
    digests = {f"{n}-{i}.png": str(d) for n, (*_, of) in enumerate(rows) for i, d in enumerate(of)}

    def shown(of: Question) -> set[str]:
        return {digests[path] for path in pictures_of(of.prompt)}

    swapped = {each.row: each for each in swap_pictures(asked, digests)}
    for each in asked:
        number = len(pictures_of(each.prompt))
        others = [
            other
            for other in asked
            if other.reference != each.reference
            and len(pictures_of(other.prompt)) == number
            and not shown(other) & shown(each)
        ]
        assert (each.row in swapped) == bool(number and others)
        if each.row in swapped:
            [name, *_] = pictures_of(swapped[each.row].prompt)
            partner = asked[int(name.split("-")[0])]
            assert partner in others
            same = [o for o in others if o.prompt[-1]["content"] == each.prompt[-1]["content"]]
            assert partner in same or not same


def test_a_metric_of_ones_own(tmp_path, words):
    (tmp_path / "helper.py").write_text("factor = 2\n")
    (tmp_path / "mine.py").write_text(
        "from helper import factor\n"
        "def length(answer, reference): return factor * len(answer)\n"
        "def fails(answer, reference): return {}['x']\n"
        "def nothing(answer, reference): return float('nan')\n"
    )
    name, metric = load_metric(f"{tmp_path / 'mine.py'}:length")
    assert name == "length"
    assert mean_score(name, metric, [("a", "b"), ("abc", "b")]) == 4
    assert mean_score(name, metric, []) is None
    for name, named in (("fails", "KeyError"), ("nothing", "nan")):
        with words.refused(ValueError, f"the metric {name} ", named):
            mean_score(name, load_metric(f"{tmp_path / 'mine.py'}:{name}")[1], [("a", "b")])


def test_a_metric_that_is_not_there_is_named(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(answer, reference): return 1\n")
    (tmp_path / "broken.py").write_text("nonsense\n")
    for text in ("mine.py", "none.py:f", "mine.py:g", "broken.py:f", "mine.py:token_f1"):
        with words.refused(ValueError, f"--metric {text}: "):
            load_metric(text)
