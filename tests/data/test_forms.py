"""Pictures in the forms that people have them in: each is read as it is, or by the one line that
its refusal prints, and is the same to the model."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.data.rows import Fault, Row, read_rows
from glm4v_patched.data.source import make_sources
from glm4v_patched.demo.tiny_model import build_processor

pytest.importorskip("datasets")
from tests.helpers.data_forms import FORMS, QUESTION, draw  # noqa: E402


@pytest.fixture(scope="module")
def collator():
    return ConversationCollator(build_processor([QUESTION, "red 007 NA blue, green"]))


@pytest.fixture
def examples(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.chdir(tmp_path)
    return draw(tmp_path, 6)


def read_by_the_printed_line(path: Path, fields: dict) -> tuple[list[Row], str | None]:
    """The rows of a set, and the value of ``data.columns`` that was printed, if one was."""
    given = {"path": str(path), **fields}
    rows = [row for source in make_sources([given], {}) for row in read_rows(source)]
    faults = {row.text for row in rows if isinstance(row, Fault)}
    if not faults:
        return rows, None
    (fault,) = faults
    (line,) = re.findall(r"'data\.columns=(.*?)'", fault)
    sources = make_sources([given | {"columns": yaml.safe_load(line)}], {})
    return [row for source in sources for row in read_rows(source)], line


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_read_as_it_is_or_by_the_line_that_is_printed(examples, tmp_path, collator, name):
    make, fields = FORMS[name]
    rows, _ = read_by_the_printed_line(make(tmp_path, examples), fields)
    assert [row for row in rows if isinstance(row, Fault)] == []
    answers = {row.messages[-1]["content"] for row in rows}
    assert answers == {example.answer for example in examples}
    assert len(rows) == len(examples)
    # In the order of classes, where these are folders.
    first = next(row for row in rows if row.messages[-1]["content"] == examples[0].answer)
    picture = str(tmp_path / "pictures" / examples[0].picture)
    asked = {"role": "user", "content": QUESTION, "image": picture}
    expected = collator([[asked, {"role": "assistant", "content": examples[0].answer}]])
    found = collator([first.messages])
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
