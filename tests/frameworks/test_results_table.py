"""The record of frameworks: the page has its rows, and a failure is a row that is told."""

import pytest

from tests.frameworks.jobs import JOBS
from tests.frameworks.results_table import PAGE, RESULTS, Row, job, merge, read, table
from tests.tables import on_page


def test_the_page_has_the_rows_of_the_file_which_are_those_of_jobs():
    page, rows = PAGE.read_text(), read(RESULTS)
    assert page == on_page(page, RESULTS, table(rows)), (
        "python -m tests.frameworks.results_table --page"
    )
    jobs = [(one.system, one.name) for one in JOBS]
    assert len({*jobs}) == len(jobs)
    assert {(row.system, row.job) for row in rows if row.system != "peft"} <= {*jobs}


@pytest.mark.parametrize("error", [RuntimeError, pytest.fail.Exception, KeyboardInterrupt])
def test_a_job_that_fails_is_told_and_its_row_replaces_the_older_one(tmp_path, monkeypatch, error):
    """One that was interrupted says nothing about its system: the older row stays."""
    file = tmp_path / "frameworks.json"
    monkeypatch.setenv("FRAMEWORKS_RECORD", str(file))
    older = Row(system="X", job="sft", command="x", version="not installed", right=0.95)
    merge([older, Row(system="Y", job="sft", command="y")], file)
    with pytest.raises(error), job("X", "sft", "x", "nothing-of-this-name"):
        raise error("first\n\nno weights in /tmp/some-1/place.bin | none")
    row, other = read(file)
    assert other.outcome == "works"
    if error is KeyboardInterrupt:
        assert row.right == 0.95
    else:
        assert row.right is None
        assert row.outcome.endswith("no weights in place.bin | none")
        assert r"place.bin \| none" in table([row])
