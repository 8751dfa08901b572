"""Each job of jobs.py learns from pictures, and makes a row of the table in docs/frameworks.md.

They take minutes and packages of their own: the sessions of tests/noxfile.py with the tag "table"
run those of each system in an environment of its own, and print the table.
"""

import importlib.util
import os
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from tests.frameworks import drawn_task
from tests.frameworks.jobs import JOBS, Job
from tests.frameworks.results_table import job
from tests.helpers.processes import cpu_environment, gpu_environment


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> drawn_task.Models:
    return drawn_task.Models(tmp_path_factory.mktemp("models"))


def missing(wanted: Job) -> str:
    module = {"ms-swift": "swift"}.get(wanted.package, wanted.package)
    if importlib.util.find_spec(module) is None:
        return f"{wanted.package} is not installed"
    if wanted.deepspeed not in ("", version("deepspeed")):
        return f"needs deepspeed {wanted.deepspeed}, found {version('deepspeed')}"
    if wanted.beside and importlib.util.find_spec(wanted.beside) is None:
        return f"{wanted.beside} is not installed"
    if (found := torch.cuda.device_count()) < wanted.gpus:
        return f"needs {wanted.gpus} GPUs on one machine, found {found}"
    return ""


def perform(wanted: Job, models: drawn_task.Models, folder: Path) -> None:
    if why := missing(wanted):
        pytest.skip(why)
    (folder / "model").symlink_to(models(wanted.model))
    (folder / "published").symlink_to(models("published"))
    drawn_task.put_data(folder, models.conversations)
    for name, text in wanted.files.items():
        (folder / name).write_text(text)
    environment = gpu_environment() if wanted.gpus else cpu_environment()
    environment |= wanted.environment
    with job(wanted.system, wanted.name, wanted.reads, wanted.package) as done:
        done.note = wanted.note
        if wanted.fails:
            ended = drawn_task.run(folder, *wanted.command, environment=environment)
            found = re.search(wanted.fails, ended.output)
            assert ended.status and found, ended.output[-6000:]
            done.outcome = found[0][:300]
            return
        drawn_task.succeed(folder, *wanted.command, environment=environment)
        if wanted.then:
            drawn_task.succeed(folder, *wanted.then, environment=environment)
        seen = models.conversations
        drawn_task.measure(wanted.measure, folder, wanted.out, seen, done, wanted.logged)


@pytest.mark.skipif(
    "FRAMEWORKS_RECORD" not in os.environ,
    reason="takes minutes and packages of its own: nox -f tests/noxfile.py -t table",
)
@pytest.mark.parametrize("wanted", [one for one in JOBS if not one.gpus], ids=str)
def test_a_job_learns_from_pictures(wanted, models, tmp_path):
    perform(wanted, models, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", [one for one in JOBS if one.gpus == 1], ids=str)
def test_a_job_on_a_gpu_learns_from_pictures(wanted, models, tmp_path):
    perform(wanted, models, tmp_path)


@pytest.mark.two_gpu
@pytest.mark.parametrize("wanted", [one for one in JOBS if one.gpus == 2], ids=str)
def test_a_job_on_two_gpus_learns_from_pictures(wanted, models, tmp_path):
    perform(wanted, models, tmp_path)
