"""The record of frameworks: rows replace their like, failures are rows, the page says the same."""

import json

import pytest

from tests.frameworks.drawn_task import check_shares
from tests.frameworks.results_table import (
    BEGIN,
    END,
    PAGE,
    RESULTS,
    Missed,
    Row,
    cannot,
    job,
    merge,
    on_page,
    read,
)


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "frameworks.json"
    monkeypatch.setenv("FRAMEWORKS_RECORD", str(path))
    return path


def test_the_page_has_the_rows_of_the_file():
    page = PAGE.read_text()
    assert page == on_page(page, read(RESULTS)), "python -m tests.frameworks.results_table --page"


def test_a_row_replaces_that_of_the_same_job_alone(file):
    rows = [Row(system=s, version=v, job=j, command="") for s, v, j in ("a1x", "b1x", "a1y", "a2x")]
    merge(rows, file)
    assert [row.key for row in read(file)] == [tuple(key) for key in ("a1x", "a1y", "a2x", "b1x")]
    merge([Row(system="a", version="1", job="y", command="new", right=0.95)], file)
    assert [row.command for row in read(file)] == ["", "new", "", ""]
    assert list(file.parent.iterdir()) == [file]


def test_a_job_leaves_what_was_measured(file):
    with job("TRL", "SFT", "trl sft", packages=["torch"]) as done:
        done.loss = 6.12345, 0.001234
        done.right, done.swapped, done.reloaded = 23 / 24, 0.0, True
    [row] = json.loads(file.read_text())
    assert row["outcome"] == "works" and row["loss"] == [6.12, 0.00123]
    assert (row["right"], row["swapped"], row["reloaded"]) == (0.958, 0.0, True)
    assert row["version"] == row["torch"] != ""
    assert "6.12 to 0.001 | 0.96 / 0.00 | yes" in on_page(BEGIN + END, read(file))


def test_a_job_that_fails_is_a_row_and_a_failure(file):
    with (
        pytest.raises(RuntimeError, match="first"),
        job("TRL", "SFT", "trl sft", packages=["nothing-of-this-name"]),
    ):
        raise RuntimeError("first\n\nno weights in /tmp/some-1/place.bin | none")
    [row] = read(file)
    assert row.outcome == "RuntimeError: no weights in place.bin | none"
    assert row.version == "not installed"
    assert r"place.bin \| none" in on_page(BEGIN + END, [row])


def test_a_job_that_pytest_is_told_to_fail_has_failed(file):
    with pytest.raises(pytest.fail.Exception), job("X", "sft", "x", ["pytest"]):
        pytest.fail("no answer after 300 s")
    assert [row.outcome for row in read(file)] == ["Failed: no answer after 300 s"]


def test_a_job_that_learns_too_little_is_a_row_that_says_so(file):
    with pytest.raises(Missed), job("TRL", "KTO", "trl kto", packages=["torch"]) as done:
        done.right, done.swapped = 0.95, 0.2
        check_shares(done)
    [row] = read(file)
    assert row.outcome == "trains, and misses a mark of its test: swapped 0.20, not at most 0.10"
    assert (row.right, row.swapped) == (0.95, 0.2)
    with pytest.raises(Missed, match=r"right 0\.85, not at least 0\.90"):
        check_shares(Row(system="", job="", command="", right=0.85, swapped=0.0))
    check_shares(Row(system="", job="", command="", right=0.9, swapped=0.1))


def test_what_cannot_run_has_its_reason(file):
    cannot("verl", "GRPO", "asks for a GPU", packages=["verl"])
    assert [row.outcome for row in read(file)] == ["asks for a GPU"]


def test_nothing_is_written_unless_asked(file, monkeypatch):
    monkeypatch.delenv("FRAMEWORKS_RECORD")
    cannot("verl", "GRPO", "asks for a GPU", packages=["verl"])
    assert not file.exists()


def test_what_was_interrupted_writes_no_row(file):
    """A skipped or stopped job says nothing about its system: an older row stays."""
    for ending in (KeyboardInterrupt, pytest.skip.Exception):
        with pytest.raises(ending), job("X", "sft", "x", ["pytest"]):
            raise ending
    assert not file.exists()
