"""The jobs of two_gpus.py: on two GPUs what they learn, on a CPU how their outcomes are told."""

import importlib.metadata
import importlib.util
import json
from dataclasses import replace

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


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    pytest.importorskip("datasets")
    return Place(tmp_path_factory.mktemp("two_gpus"), on_cpu=True, packages=None)


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """What was written."""
    path = tmp_path / "rows.json"
    monkeypatch.setenv("FRAMEWORKS_RECORD", str(path))
    return lambda: json.loads(path.read_text())


DIES = Job(
    "dies",
    "transformers",
    "dies",
    "transformers",
    ("-c", "raise ValueError('the weights\\nhave gone')"),
    "python dies.py",
    fails=r"ValueError: the \w+",
)


def test_an_expected_failure_is_the_outcome(place, rows):
    assert perform(DIES, place).outcome == "ValueError: the weights"
    [row] = rows()
    assert row["outcome"] == "ValueError: the weights" and row["loss"] is None
    assert row["version"] == row["transformers"] == importlib.metadata.version("transformers")


@pytest.mark.parametrize(
    "command", [("-c", "print('it trained')"), ("-c", "raise ValueError('another')")]
)
def test_a_failure_that_does_not_come_is_a_failure(command, place, rows):
    wanted = replace(DIES, short=f"lives{command[1][:1]}", command=command)
    with pytest.raises(AssertionError):
        perform(wanted, place)
    [row] = rows()
    assert row["outcome"].startswith("AssertionError")


def test_a_job_that_hangs_is_ended(place, rows):
    wanted = replace(DIES, short="hangs", command=("-c", "import time; time.sleep(60)"))
    with pytest.raises(AssertionError, match="not done after 1 s"):
        perform(wanted, place, left=0.5)
    assert rows()[0]["outcome"] == "AssertionError: not done after 1 s"


STATE = {"log_history": [{"loss": 6.0}, {"loss": 0.5}]}


@pytest.mark.parametrize("said, silent", [("an old format", False), ("an old format", True)])
def test_what_is_printed_counts(said, silent, place, rows):
    code = f"open('state.json', 'w').write('''{json.dumps(STATE)}'''); print({said!r})"
    wanted = replace(DIES, short=f"says{silent}", command=("-c", code), fails="", measure="nothing")
    if silent:
        with pytest.raises(AssertionError, match="old format"):
            perform(replace(wanted, silent="old format"), place)
    else:
        done = perform(replace(wanted, says="old format"), place)
        assert done.loss == (6.0, 0.5) and done.note.startswith('it says "old format"')
