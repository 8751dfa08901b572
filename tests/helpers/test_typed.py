"""What is typed as a fork of a warm process ends, prints and is told as a fresh process is."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.processes import cpu_environment
from tests.helpers.typed import STARTED_FRESH, write_programs

pytestmark = pytest.mark.slow

TELL = """
import json, os, sys
told = [sys.argv, sys.path[0], os.getcwd(), os.environ.get("NEW"), __name__, sys.stdin.read()]
print(json.dumps([sys.executable, told]))
print("an error", file=sys.stderr)
sys.exit(int(os.environ.get("STATUS", 0)))
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("typed") / "bin"
    write_programs(folder, cpu_environment(), "torch")
    return folder


@pytest.fixture
def script(tmp_path) -> Path:
    (tmp_path / "script.py").write_text(TELL)
    return tmp_path / "script.py"


def typed(programs: Path, folder: Path, *arguments: str, **variables: str) -> tuple[bool, tuple]:
    """Whether it was a fork; what it was told, its status and its errors."""
    done = subprocess.run(
        [programs / "python", *arguments],
        cwd=folder,
        env=cpu_environment() | variables,
        input="given",
        capture_output=True,
        text=True,
        timeout=100,
    )
    executable, told = json.loads(done.stdout)
    return executable == str(programs / "python"), (told, done.returncode, done.stderr)


@pytest.mark.parametrize("options", [[], ["-P"], ["-u"], ["-P", "-u"]])
def test_a_fork_is_told_what_a_fresh_process_is(options, programs, script):
    variables = {"NEW": "value", "STATUS": "3"}
    asked = [programs, script.parent, *options, "script.py", "one", "-m", ""]
    warm, fork = typed(*asked, **variables)
    not_warm, fresh = typed(*asked, **variables | STARTED_FRESH)
    assert (warm, not_warm) == (True, False)
    assert fork == fresh and fork[1:] == (3, "an error\n")


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["-c", TELL], {}),
        (["-I", "script.py"], {}),
        (["-m", "script"], {}),
        (["-m", "glm4v_patched.run", "script.py"], {}),
        (["script.py"], {"GLM4V_PATCHED": "0"}),
        (["script.py"], {"OMP_NUM_THREADS": "2"}),
    ],
)
def test_what_a_fork_cannot_show_is_started_fresh(arguments, variables, programs, script):
    warm, (_, status, _) = typed(programs, script.parent, *arguments, **variables)
    assert (warm, status) == (False, 0)


def test_what_a_fork_starts_is_one_too(programs, script):
    (script.parent / "outer.py").write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, 'script.py'])"
    )
    assert typed(programs, script.parent, "outer.py")[0]


def test_a_signal_ends_the_fork_and_what_was_typed_ends_by_that_of_the_fork(programs, tmp_path):
    (tmp_path / "dies.py").write_text("import os; os.kill(os.getpid(), 15)")
    done = subprocess.run([programs / "python", "dies.py"], cwd=tmp_path, env=cpu_environment())
    assert done.returncode == -signal.SIGTERM

    (tmp_path / "sleeps.py").write_text(
        "import os, subprocess, time\nother = subprocess.Popen(['sleep', '1000'])\n"
        "print(os.getpid(), other.pid, flush=True)\ntime.sleep(1000)"
    )
    command, streams = [programs / "python", "sleeps.py"], {"stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, env=cpu_environment(), **streams) as running:
        fork, other = map(int, running.stdout.readline().split())
        assert fork != running.pid and os.getsid(fork) == fork
        running.terminate()
        end = time.monotonic() + 60
        while alive := [pid for pid in (fork, other) if psutil.pid_exists(pid)]:
            assert time.monotonic() < end, alive
            time.sleep(0.05)
