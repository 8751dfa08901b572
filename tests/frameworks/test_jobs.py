"""Each job of jobs.py learns from images, and makes a row of the table in docs/frameworks.md.

They take minutes and packages of their own: the sessions of tests/noxfile.py with the tag "table"
run those of each system in an environment of its own, and print the table.
"""

import importlib.util
import os
import re
from importlib.metadata import version

import pytest
import torch

from tests.frameworks import drawn_task
from tests.frameworks.jobs import JOBS, Job
from tests.frameworks.results_table import PAGE, RESULTS, job, table
from tests.helpers.processes import cpu_environment, gpu_environment
from tests.tables import on_page, read_rows


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> drawn_task.Models:
    return drawn_task.Models(tmp_path_factory.mktemp("models"))


def missing(wanted: Job) -> str:
    module = {"ms-swift": "swift"}.get(wanted.package, wanted.package)
    for package in filter(None, (module, wanted.beside)):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    if wanted.deepspeed not in ("", version("deepspeed")):
        return f"needs deepspeed {wanted.deepspeed}, found {version('deepspeed')}"
    if (gpus := torch.cuda.device_count()) < wanted.gpus:
        return f"needs {wanted.gpus} GPUs on one machine, and has {gpus}"
    return ""


MARKS = [
    pytest.mark.skipif(
        "FRAMEWORKS_RECORD" not in os.environ,
        reason="takes minutes and packages of its own: nox -f tests/noxfile.py -t table",
    ),
    pytest.mark.gpu,
    pytest.mark.two_gpu,
]


@pytest.mark.parametrize(
    "wanted", [pytest.param(one, marks=MARKS[one.gpus], id=str(one)) for one in JOBS]
)
def test_a_job_learns_from_images(wanted, models, tmp_path):
    if why := missing(wanted):
        pytest.skip(why)
    (tmp_path / "model").symlink_to(models(wanted.model))
    (tmp_path / "published").symlink_to(models("published"))
    drawn_task.put_data(tmp_path, models.conversations)
    for name, text in wanted.files.items():
        (tmp_path / name).write_text(text)
    environment = gpu_environment() if wanted.gpus else cpu_environment()
    environment |= wanted.environment
    with job(wanted.system, wanted.name, wanted.reads, wanted.package) as done:
        done["note"] = wanted.note
        ended = drawn_task.run(tmp_path, *wanted.command, environment=environment)
        if wanted.fails:
            error = re.search(wanted.fails, ended.output)
            assert ended.status and error, ended.output[-6000:]
            done["outcome"] = error[0][:300]
            return
        assert ended.status == 0, ended.output[-6000:]
        if wanted.then:
            drawn_task.succeed(tmp_path, *wanted.then, environment=environment)
        seen = models.conversations
        drawn_task.measure(wanted.measure, tmp_path, wanted.out, seen, done, wanted.logged)


def test_the_page_has_the_rows_of_the_file_which_are_those_of_jobs():
    page, rows = PAGE.read_text("utf-8"), read_rows(RESULTS)
    assert page == on_page(page, RESULTS, table(rows)), (
        "python -m tests.frameworks.results_table --page"
    )
    jobs = [(one.system, one.name) for one in JOBS]
    assert len({*jobs}) == len(jobs)
    assert {(row["system"], row["job"]) for row in rows if row["system"] != "peft"} <= {*jobs}
