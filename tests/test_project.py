"""What pyproject.toml claims is what CI installs."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from glm4v_patched.remote.configuration_chatglm import TESTED_TRANSFORMERS
from tests.helpers.cells import DEEPSPEED, TRANSFORMERS

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CI = (ROOT / ".ci" / "run").read_text()
# No build for CPUs is so old; the tests of GPUs run on it.
UNTESTED_ON_CPUS = {"torch": "2.11"}
IN_THE_MATRIX = {"transformers": TRANSFORMERS[0], "deepspeed": DEEPSPEED[0]}


def required(*extras: str) -> list[Requirement]:
    optional = PROJECT["project"]["optional-dependencies"]
    of_extras = [text for extra in extras for text in optional[extra]]
    return [Requirement(text) for text in [*PROJECT["project"]["dependencies"], *of_extras]]


def test_ci_ends_with_what_fails():
    first = next(line for line in CI.splitlines() if line and not line.startswith("#"))
    assert first == "set -euo pipefail"


def test_what_python_compiles_in_ci_is_kept():
    """pip compiles nothing there, and many a container says that Python is to keep nothing."""
    begin, end = "export PIP_COMPILE", "if ! command"
    asked = (
        "python3 -c 'import os, sys; print(os.environ[\"PIP_COMPILE\"], sys.dont_write_bytecode)'"
    )
    assert (
        run_part_of_ci(begin, end, "export PYTHONDONTWRITEBYTECODE=1", "/", asked) == "0 0 False\n"
    )


def run_part_of_ci(begin: str, end: str, before: str, folder: Path, after: str = "") -> str:
    """Run the lines of .ci/run from one to before another; returns the status and what was
    printed."""
    [part] = re.findall(rf"^{re.escape(begin)}.*?(?=^{re.escape(end)})", CI, re.M | re.S)
    script = f"set -euo pipefail\ntools={folder}\n{before}\n{part}\n{after}"
    ended = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    return f"{ended.returncode} {ended.stdout}"


@pytest.mark.parametrize("failing", ["oldest", "types", "framework_of_the_day", None])
def test_what_fails_in_the_second_lane_of_ci_fails_all(tmp_path, failing):
    [rest] = re.findall(r'^rest="(.*)"$', CI, re.M)
    parts = ["oldest", *rest.split()]
    assert failing is None or failing in parts
    stand_ins = (
        f"{part}() {{ {'false' if part == failing else ':'}; echo on; }}" for part in parts
    )
    lane = "rest=", "set -m", "; ".join(stand_ins), tmp_path, "second_lane"
    assert run_part_of_ci(*lane) == f"{int(failing is not None)} "
    logs = {part: (tmp_path / f"{part}.log").read_text() for part in parts}
    assert logs == {part: "" if part == failing else "on\n" for part in parts}


def test_a_part_that_no_lane_took_fails_ci(tmp_path):
    """As on a full disk, where no folder can be made."""
    part = "status=0\nwait", "exit", "rest=types; sleep 0 & second=$!", tmp_path, 'exit "$status"'
    assert run_part_of_ci(*part) == "1 == types: no lane could take it\n"
    (tmp_path / "types.taken").mkdir()
    assert run_part_of_ci(*part) == "0 "


def test_ci_does_not_go_on_without_the_test_command(tmp_path):
    part = "block_of_readme 2", "WARM_PROCESSES"
    assert run_part_of_ci(*part, "block_of_readme() { :; }", tmp_path) == "1 "
    asked = run_part_of_ci(*part, "block_of_readme() { echo .venv/bin/pytest; }", tmp_path)
    assert asked.startswith("0 ") and asked.endswith("/pytest\n")


def test_every_oldest_version_that_is_claimed_is_tested():
    claimed = {
        requirement.name: specifier.version
        for requirement in required("train")
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }
    [command] = re.findall(r"floors=\$\((.*)\)$", CI, re.M)
    printed = subprocess.check_output(command, shell=True, cwd=ROOT, text=True)
    installed = dict(line.split("==") for line in printed.splitlines())
    assert claimed == UNTESTED_ON_CPUS | IN_THE_MATRIX | installed
    assert f'install -q -e ".[dev]" transformers=={TRANSFORMERS[0]} $floors' in CI


def test_on_the_oldest_versions_run_the_tests_of_all_that_uses_them():
    """A folder of tests for each one of the package, and nothing but the matrix of the rest."""
    [older] = re.findall(r"\((accelerate\|.*)\)>=", CI)
    imports = re.compile(rf"^ *(?:from|import) (?:transformers|{older})\b", re.M)
    files = (ROOT / "glm4v_patched").glob("*/**/*.py")
    users = {file.relative_to(ROOT).parts[1] for file in files if imports.search(file.read_text())}
    [folders] = re.findall(r'^on_the_oldest="(.*?)"$', CI, re.M | re.S)
    assert {*folders.split()} >= {f"tests/{folder}" for folder in users}
    assert all((ROOT / folder).is_dir() for folder in folders.split())


def test_the_test_command_installs_all_that_the_first_command_does():
    """For .ci/run types both in one environment."""
    [of_us] = [one for one in required("dev") if one.name == PROJECT["project"]["name"]]
    assert "train" in of_us.extras


def test_the_range_of_transformers_is_that_of_the_code():
    [transformers] = [one for one in required() if one.name == "transformers"]
    assert transformers.specifier == Requirement(f"x{TESTED_TRANSFORMERS}").specifier


def test_python_is_as_old_everywhere():
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"


def test_ruff_has_one_version():
    [ruff] = [str(one) for one in required("dev") if one.name == "ruff"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["additional_dependencies"] for hook in hooks] == [[ruff], [ruff]]
    # .ci/run reads it from pyproject.toml.
    assert not re.search(r"ruff==\d", CI)
    assert ruff.startswith("ruff==")
