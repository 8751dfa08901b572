"""Forks of warm processes are what fresh processes of torch's launcher would be."""

import time

import pytest

from tests.helpers.fresh_process import run_without_package
from tests.helpers.processes import cpu_environment, run_warm

TELL = """
import builtins, os, random, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
mark = getattr(builtins, "mark", None)
builtins.mark = "set"
told = [os.environ.get(name) for name in names], sys.argv[1:], mark, os.environ.get("NEW")
print("told", told, "unlike", hash("x"), random.random())
"""
FAIL = """
import os, time
if os.environ["RANK"] == "1":
    print("rank 1 fails")
    raise SystemExit(3)
time.sleep(60)
"""


def run(tmp_path, code: str, *arguments: str, **options):
    script = tmp_path / "script.py"
    script.write_text(code)
    return run_warm(str(script), *arguments, **{"seconds": 100} | options)


def test_each_rank_is_told_which_it_is_and_knows_nothing_of_earlier_ones(tmp_path):
    for _ in range(2):
        ended = run(tmp_path, TELL, "one", environment=cpu_environment() | {"NEW": "value"})
        assert ended.status == 0, ended.output
        told = [line.partition(" unlike ") for line in ended.output.splitlines() if "told" in line]
        wanted = [f"told ({[str(r), '2', str(r)]}, ['one'], None, 'value')" for r in range(2)]
        assert sorted(line for line, _, _ in told) == wanted
        first, second = (unlike.split() for _, _, unlike in told)
        assert first[0] != second[0] and first[1] != second[1]


def test_a_process_that_no_launcher_started_is_no_rank(tmp_path):
    ended = run(tmp_path, TELL, processes=None)
    assert ended.status == 0 and "told ([None, None, None], [], None, None)" in ended.output


def test_a_rank_that_fails_ends_the_others(tmp_path):
    start = time.monotonic()
    ended = run(tmp_path, FAIL)
    assert ended.status == 3 and "rank 1 fails" in ended.output
    assert time.monotonic() - start < 50


def test_ranks_that_hang_are_killed(tmp_path):
    ended = run(tmp_path, "import time\nprint('begun', flush=True)\ntime.sleep(60)", seconds=5)
    assert ended.status is None and ended.output.count("begun") == 2


def test_what_imports_have_read_cannot_be_changed(tmp_path):
    with pytest.raises(AssertionError, match="/elsewhere.*start it fresh"):
        run(tmp_path, "", environment=cpu_environment() | {"HF_HOME": "/elsewhere"})


def test_without_the_package_nothing_that_has_to_do_with_models_is_imported_yet(tmp_path):
    code = "import sys; assert not {'transformers', 'huggingface_hub'} & {*sys.modules}"
    code += "\nprint(sys.path[0] == '', sys.argv)"
    assert "True ['-c', 'one']" in run_without_package(code, tmp_path, "one")
    with pytest.raises(AssertionError, match="ValueError: of the code"):
        run_without_package("raise ValueError('of the code')", tmp_path)
