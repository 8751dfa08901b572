"""CI installs the versions that pyproject.toml claims."""

import re
from pathlib import Path

import yaml
from packaging.requirements import Requirement

import glm4v_patched
from glm4v_patched.remote.configuration_chatglm import TESTED_TRANSFORMERS
from tests import noxfile
from tests.distributed.cells import DEEPSPEED, TRANSFORMERS

ROOT = Path(__file__).resolve().parents[1]
# No build for CPUs is so old; the tests of GPUs run on it.
UNTESTED_ON_CPUS = {"torch": "2.11"}
IN_THE_MATRIX = {"transformers": TRANSFORMERS[0], "deepspeed": DEEPSPEED[0]}


def required(*extras: str) -> list[Requirement]:
    return [Requirement(text) for text in noxfile.requirements(*extras)]


def test_every_oldest_version_that_is_claimed_is_tested():
    claimed = {
        requirement.name: specifier.version
        for requirement in required("train")
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }
    installed = dict(floor.split("==") for floor in noxfile.floors())
    assert claimed == UNTESTED_ON_CPUS | IN_THE_MATRIX | installed


def test_on_the_oldest_versions_run_the_tests_of_all_that_uses_them():
    """A folder of tests for each one of the package, and nothing but the matrix of the rest."""
    older = "|".join(noxfile.OLDER)
    imports = re.compile(rf"^ *(?:from|import) (?:transformers|{older})\b", re.M)
    files = (ROOT / "glm4v_patched").glob("*/**/*.py")
    users = {
        file.relative_to(ROOT).parts[1] for file in files if imports.search(file.read_text("utf-8"))
    }
    assert {*noxfile.ON_THE_OLDEST} >= users
    assert all((ROOT / "tests" / folder).is_dir() for folder in noxfile.ON_THE_OLDEST)


def test_ci_runs_every_part_of_the_slow_tests():
    sessions = [*(ROOT / ".ci" / "run").read_text().splitlines(), *noxfile.IN_TURN]
    assert {f"slow({part})" for part in noxfile.SLOW} <= {*sessions}


def test_the_range_of_transformers_is_that_of_the_code():
    [transformers] = [one for one in required() if one.name == "transformers"]
    assert transformers.specifier == Requirement(f"x{TESTED_TRANSFORMERS}").specifier


def test_ruff_has_one_version():
    [ruff] = [str(one) for one in required("dev") if one.name == "ruff"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["additional_dependencies"] for hook in hooks[:2]] == [[ruff], [ruff]]
    assert ruff.startswith("ruff==")


def test_a_release_has_one_version_and_its_workflows_pin_what_they_run():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == glm4v_patched.__version__
    workflows = [*(ROOT / ".github" / "workflows").glob("*.yml")]
    used = re.findall(r"uses: (.*)", "\n".join(path.read_text() for path in workflows))
    assert used and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action) for action in used)


def test_every_message_has_a_test():
    for file in (ROOT / "tests").rglob("__snapshots__/messages.ambr"):
        entries = re.findall(r"^# name: (\w+).* in (\w+\.py)$", file.read_text(), re.M)
        assert entries, file
        for test, name in entries:
            assert f"def {test}(" in (file.parents[1] / name).read_text("utf-8"), (test, name)
