"""What doctor says of a machine: each fault that can be seen beforehand, with its cure."""

import json
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import namedtuple
from importlib.metadata import PackageNotFoundError, version

import pytest

from glm4v_patched.cli import main
from glm4v_patched.doctor import machine, packages
from glm4v_patched.doctor.findings import Finding, finding, table
from glm4v_patched.engine import nvidia_driver
from glm4v_patched.engine.deepspeed import private_names
from glm4v_patched.engine.gpus import Gpu, Gpus
from glm4v_patched.engine.nvidia_driver import Use, parse_topology
from glm4v_patched.remote.configuration_chatglm import (
    FIRST_UNTESTED_TRANSFORMERS,
    TESTED_TRANSFORMERS,
)
from glm4v_patched.terminal_text import pip_install

Usage = namedtuple("Usage", "total used free")
TWO_OF_THREE_JOINED = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-47
GPU1\tNV18\t X \tSYS\tPXB\t0-47
GPU2\tSYS\tSYS\t X \tSYS\t48-95
NIC0\tPXB\tPXB\tSYS\t X \t

Legend:
"""


@pytest.fixture
def sound(monkeypatch, tmp_path):
    """A machine with two GPUs on which nothing is wrong."""
    (tmp_path / "Python.h").touch()
    for place, name, value in (
        (machine, "find_gpus", Gpus((Gpu("NVIDIA H200", 150 * 10**9, (9, 0)),) * 2)),
        (nvidia_driver, "cuda_of_driver", (13, 0)),
        (nvidia_driver, "cuda_of_torch", (12, 8)),
        (nvidia_driver, "memory_in_use", [Use(number, 0, 10**11) for number in range(2)]),
        (nvidia_driver, "links", [(0, 1, "NV18")]),
        (shutil, "disk_usage", Usage(10**14, 0, 10**14)),
        (resource, "getrlimit", (10**6, 10**6)),
        (shutil, "which", "/bin/true"),
        (machine.sysconfig, "get_paths", {"include": str(tmp_path)}),
        (socket, "gethostbyname", "127.0.0.1"),
    ):
        monkeypatch.setattr(place, name, lambda *given, value=value, **options: value)
    for name in machine.STRANGE_VARIABLES:
        monkeypatch.delenv(name, raising=False)


GIB = 2**30


def faults(on_cpu: bool = False) -> dict[str, Finding]:
    """What is not in order, by its check."""
    found = {each.check: each for each in machine.check_machine(on_cpu) if each.verdict != "ok"}
    assert all(each.cure for name, each in found.items() if each.verdict == "fails"), found
    return found


def test_nothing_is_wrong_with_a_sound_machine(sound, monkeypatch):
    assert faults() == {} and faults(on_cpu=True) == {}
    # A limit that cannot be raised is no fault.
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    assert faults() == {}


def unresolved(name):
    raise OSError("Name or service not known")


# Each fault: what of the machine is replaced, and by what.
NO_GPU = (machine, "find_gpus", lambda: Gpus((), "NVIDIA's driver shows none"))
OLDER_DRIVER = (nvidia_driver, "cuda_of_driver", lambda: (11, 8))
VOLTAS = Gpus((Gpu("Tesla V100", 32 * 10**9, (7, 0)),) * 2)
VOLTA = (machine, "find_gpus", lambda: VOLTAS)
USES = [Use(0, 0, 150 * GIB), Use(1, 41 * GIB, 150 * GIB)]
TAKEN = (nvidia_driver, "memory_in_use", lambda: USES)
NO_NVLINK = (nvidia_driver, "links", lambda: parse_topology(TWO_OF_THREE_JOINED))
NO_COMPILER = (shutil, "which", lambda name, path=None: None)
SMALL_DISK = (shutil, "disk_usage", lambda folder: Usage(10**14, 0, 2**26))
FEW_FILES = (resource, "getrlimit", lambda kind: (1024, 1048576))
NO_NAMES = (socket, "gethostbyname", unresolved)


@pytest.mark.parametrize(
    ("fault", "check", "verdict", "named"),
    [
        (NO_GPU, "GPUs", "warning", "NVIDIA's driver shows none"),
        (OLDER_DRIVER, "driver", "fails", "11.8"),
        (VOLTA, "bf16", "warning", "GPU 1"),
        (TAKEN, "GPU 1", "warning", "41 of 150 GiB"),
        (NO_NVLINK, "links", "warning", "2 of 3 pairs"),
        (NO_COMPILER, "compiler", "fails", "gcc"),
        (SMALL_DISK, "/dev/shm", "warning", "0.06 of"),
        (FEW_FILES, "open files", "warning", "1,024"),
        (NO_NAMES, "host name", "fails", "localhost"),
        (NO_GPU, "environment", "warning", "WORLD_SIZE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_of_the_machine_is_told_with_its_cure(
    sound, monkeypatch, words, fault, check, verdict, named
):
    monkeypatch.setattr(*fault)
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = faults()[check]
    assert found.verdict == verdict
    text = f"{found.found}\n> {found.cure}"
    assert named in text
    words(text, temporary=tempfile.gettempdir())


def test_the_table_of_nvidia_smi_is_read():
    found = [(0, 1, "NV18"), (0, 2, "SYS"), (1, 2, "SYS")]
    assert parse_topology(TWO_OF_THREE_JOINED) == found and parse_topology("") == []


@pytest.mark.parametrize(
    ("name", "found", "verdict"),
    [
        ("transformers", "4.44.2", "fails"),
        ("transformers", FIRST_UNTESTED_TRANSFORMERS, "warning"),
        ("torch", None, "fails"),
        ("torch", "2.10.0", "fails"),
        ("torch", "3.0", None),
    ],
)
def test_versions_outside_of_the_range_are_told(monkeypatch, name, found, verdict):
    def installed(asked):
        if asked == name and found is None:
            raise PackageNotFoundError(asked)
        return {name: found, "torchvision": "0.26.0"}.get(asked) or version(asked)

    ours = ["torch>=2.11", f"transformers{TESTED_TRANSFORMERS}", "deepspeed>=0.16.9,<0.20"]
    needs = {"glm4v-patched": ours, "torchvision": ["torch==2.11.0"]}
    monkeypatch.setattr(packages, "version", installed)
    monkeypatch.setattr(packages, "requires", needs.get)
    monkeypatch.setattr(packages, "metadata", lambda name: {"Requires-Python": ">=3.11"})
    told = {each.check: each for each in packages.check_packages() if each.verdict != "ok"}
    assert (told[name].verdict if verdict else told.get(name)) == verdict
    assert verdict is None or f"install '{name}" in told[name].cure
    if name == "torch" and found:
        needed = f"torchvision 0.26.0 needs torch==2.11.0, and {found}"
        assert needed in told["versions together"].found


def test_a_renamed_name_of_deepspeed_is_told_without_importing_it(monkeypatch, words):
    module, names = next(iter(private_names.DEFINED_IN.items()))
    changed = private_names.DEFINED_IN | {module: (*names, "ds_renamed")}
    monkeypatch.setattr(private_names, "DEFINED_IN", changed)
    (found,) = packages._check_private_names()
    assert found.verdict == "fails" and f"has no ds_renamed (of {module})" in found.found
    words(f"{found.found}\n> {found.cure}", pip=pip_install(), found=version("deepspeed"))


def test_what_will_fail_comes_last_and_commands_stay_whole():
    command = "pip install " + "x" * 120 + " y"
    failing = finding("torch", "fails", f"{'old ' * 40}: {command}")
    assert failing.cure == command
    found = [failing, Finding("disk", "ok", "fine")]
    lines = table(found, 0.25).splitlines()
    assert lines[0] == "ok      disk   fine"
    assert lines[1].startswith("fails   torch  old old") and max(map(len, lines[:3])) <= 100
    assert f"> {command}" in lines[-2]
    assert lines[-1] == "2 checks in 0.2 s: 1 will fail, 0 warnings"


def test_doctor_is_quick_and_loads_no_torch():
    code = "import sys; sys.modules['torch'] = None; from glm4v_patched.cli import main; "
    code += "sys.exit(main(['doctor', '--json', '--device', 'cpu']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    told = json.loads(done.stdout)
    assert told["seconds"] < 3 and done.returncode == int(told["fails"])
    assert {"Python", "deepspeed", "/dev/shm"} <= {each["check"] for each in told["findings"]}


def test_the_status_says_whether_something_will_fail(sound, monkeypatch, capsys):
    monkeypatch.setattr(packages, "requires", lambda name: [])
    monkeypatch.setattr(packages, "metadata", lambda name: {"Requires-Python": ">=3.11"})
    assert main(["doctor"]) == 0
    monkeypatch.setattr(*VOLTA)
    assert main(["doctor"]) == 0  # a warning
    monkeypatch.setattr(*OLDER_DRIVER)
    assert main(["doctor"]) == 1
    assert "1 will fail, 1 warning" in capsys.readouterr().out
