"""The jobs of two_gpus.py, on two GPUs: each learns, or fails as it is expected to."""

import importlib.metadata
import importlib.util

import pytest
import torch

from tests.frameworks.two_gpus import Place, perform
from tests.frameworks.two_gpus_jobs import JOBS, Job

MODULES = {"factory": "llamafactory", "openrlhf": "openrlhf", "main": "deepspeed"}


def missing(wanted: Job) -> list[str]:
    modules = [MODULES[name] for name in wanted.packages if name in MODULES]
    if wanted.system == "TRL":
        modules.append("trl")
    found = [name for name in modules if importlib.util.find_spec(name) is None]
    if not found:
        found = [
            f"{package}=={version}"
            for package, version in wanted.versions
            if importlib.metadata.version(package) != version
        ]
    return found


@pytest.mark.two_gpu
@pytest.mark.parametrize("wanted", JOBS, ids=lambda each: each.short)
def test_a_job_on_two_gpus_ends_as_expected(wanted, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs on one machine, found {torch.cuda.device_count()}")
    if names := missing(wanted):
        pytest.skip(f"not installed: {', '.join(names)}")
    perform(wanted, Place(tmp_path / "place", on_cpu=False, packages=None))


def test_every_job_has_a_row_of_its_own():
    assert len({each.short for each in JOBS}) == len(JOBS)
    assert len({(each.system, each.name) for each in JOBS}) == len(JOBS)
