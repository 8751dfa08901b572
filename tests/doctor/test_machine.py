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
TWO_OF_FOUR_JOINED = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tSYS\tPXB\t0-47
GPU1\tNV18\t X \tSYS\tSYS\tPXB\t0-47
GPU2\tSYS\tSYS\t X \tNV18\tSYS\t48-95
GPU3\tSYS\tSYS\tNV18\t X \tSYS\t48-95
NIC0\tPXB\tPXB\tSYS\tSYS\t X \t

Legend:

  X    = Self
"""


@pytest.fixture
def sound(monkeypatch, tmp_path):
    """A machine with two GPUs on which nothing is wrong."""
    gpus = Gpus((Gpu("NVIDIA H200", 150 * 10**9, (9, 0)),) * 2)
    monkeypatch.setattr(machine, "find_gpus", lambda: gpus)
    monkeypatch.setattr(nvidia_driver, "cuda_of_driver", lambda: (13, 0))
    monkeypatch.setattr(nvidia_driver, "cuda_of_torch", lambda: (12, 8))
    uses = [Use(number, 0, 10**11) for number in range(2)]
    monkeypatch.setattr(nvidia_driver, "memory_in_use", lambda: uses)
    monkeypatch.setattr(nvidia_driver, "links", lambda: [(0, 1, "NV18")])
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**14, 0, 10**14))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (10**6, 10**6))
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/bin/{name}")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.0.1")
    for name in machine.STRANGE_VARIABLES:
        monkeypatch.delenv(name, raising=False)


GIB = 2**30


def faults(on_cpu: bool = False) -> dict[str, Finding]:
    """What is not in order, by its check."""
    found = {each.check: each for each in machine.check_machine(on_cpu) if each.verdict != "ok"}
    assert all(each.cure for name, each in found.items() if each.verdict == "fails"), found
    return found


def test_nothing_is_wrong_with_a_sound_machine(sound):
    assert faults() == {} and faults(on_cpu=True) == {}


def unresolved(name):
    raise OSError("Name or service not known")


# Each fault: what of the machine is replaced, and by what.
NO_GPU = (machine, "find_gpus", lambda: Gpus((), "NVIDIA's driver shows none"))
OLDER_DRIVER = (nvidia_driver, "cuda_of_driver", lambda: (11, 8))
VOLTAS = Gpus((Gpu("Tesla V100", 32 * 10**9, (7, 0)),) * 2)
VOLTA = (machine, "find_gpus", lambda: VOLTAS)
USES = [Use(0, 0, 150 * GIB), Use(1, 41 * GIB, 150 * GIB)]
TAKEN = (nvidia_driver, "memory_in_use", lambda: USES)
NO_NVLINK = (nvidia_driver, "links", lambda: parse_topology(TWO_OF_FOUR_JOINED))
NO_COMPILER = (shutil, "which", lambda name, path=None: None)
NO_HEADERS = (machine.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
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
        (NO_NVLINK, "links", "warning", "4 of 6 pairs"),
        (NO_COMPILER, "compiler", "fails", "gcc"),
        (NO_HEADERS, "compiler", "fails", "/nowhere/Python.h"),
        (SMALL_DISK, "/dev/shm", "warning", "0.06 of"),
        (SMALL_DISK, "disk: temporary files", "warning", "TMPDIR"),
        (FEW_FILES, "open files", "warning", "1,024"),
        (NO_NAMES, "host name", "fails", "localhost"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_of_the_machine_is_told_with_its_cure(
    sound, monkeypatch, words, fault, check, verdict, named
):
    monkeypatch.setattr(*fault)
    found = faults()[check]
    assert found.verdict == verdict
    text = f"{found.found}\n> {found.cure}"
    assert named in text
    words(text, temporary=tempfile.gettempdir())


def test_variables_of_another_program_s_start_are_told(sound, monkeypatch, words):
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = faults()["environment"]
    words(f"{found.found}\n> {found.cure}")


def test_a_limit_that_cannot_be_raised_is_no_fault(sound, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    assert "open files" not in faults()


def test_the_table_of_nvidia_smi_is_read():
    kinds = {(a, b): link for a, b, link in parse_topology(TWO_OF_FOUR_JOINED)}
    assert kinds[0, 1] == kinds[2, 3] == "NV18" and len(kinds) == 6
    assert {link for pair, link in kinds.items() if pair not in ((0, 1), (2, 3))} == {"SYS"}
    assert parse_topology("") == []


# Packages


def of_packages(monkeypatch, versions: dict[str, str | None]) -> dict[str, Finding]:
    real = packages.version

    def installed(name):
        if name in versions and versions[name] is None:
            raise PackageNotFoundError(name)
        return versions.get(name) or real(name)

    monkeypatch.setattr(packages, "version", installed)
    wanted = ["torch>=2.11", f"transformers{TESTED_TRANSFORMERS}", "deepspeed>=0.16.9,<0.20"]
    needs = {"glm4v-patched": wanted}
    if "torchvision" in versions:
        needs["torchvision"] = ["torch==2.11.0"]
    monkeypatch.setattr(packages, "requires", needs.get)
    monkeypatch.setattr(packages, "metadata", lambda name: {"Requires-Python": ">=3.11"})
    return {each.check: each for each in packages.check_packages() if each.verdict != "ok"}


@pytest.mark.parametrize(
    ("name", "found", "verdict"),
    [
        ("transformers", "4.44.2", "fails"),
        ("transformers", FIRST_UNTESTED_TRANSFORMERS, "warning"),
        ("deepspeed", "0.16.8", "fails"),
        ("deepspeed", "0.20.1", "fails"),
        ("torch", None, "fails"),
        ("torch", "2.10.0", "fails"),
        ("torch", "3.0", None),
    ],
)
def test_versions_outside_of_the_range_are_told(monkeypatch, name, found, verdict):
    told = of_packages(monkeypatch, {name: found})
    assert (told[name].verdict if verdict else told.get(name)) == verdict
    if verdict:
        assert f"install '{name}" in told[name].cure


def test_a_torchvision_of_another_torch_is_told(monkeypatch):
    told = of_packages(monkeypatch, {"torchvision": "0.26.0", "torch": "2.13.0"})
    assert told["versions together"].verdict == "fails"
    assert "torchvision 0.26.0 needs torch==2.11.0, and 2.13.0" in told["versions together"].found


def test_a_renamed_name_of_deepspeed_is_told_without_importing_it(monkeypatch, words):
    module, names = next(iter(private_names.DEFINED_IN.items()))
    changed = private_names.DEFINED_IN | {module: (*names, "ds_renamed")}
    monkeypatch.setattr(private_names, "DEFINED_IN", changed)
    (found,) = packages._check_private_names()
    assert found.verdict == "fails" and f"has no ds_renamed (of {module})" in found.found
    words(f"{found.found}\n> {found.cure}", pip=pip_install(), found=version("deepspeed"))


def test_every_private_name_has_a_module():
    listed = {name for names_ in private_names.DEFINED_IN.values() for name in names_}
    apart = {"DEFINED_IN", "OF_SOME_MODULES", "SUPPORTED_DEEPSPEED"}
    for name, value in vars(private_names).items():
        if name.isupper() and name[0] != "_" and name not in apart:
            each = [value] if isinstance(value, str) else value
            assert {entry.rpartition(":")[2] for entry in each} <= listed, name


# What is printed


def test_a_message_is_divided_into_what_is_wrong_and_the_cure():
    divided = finding("data", "fails", "out is a file: no folder; expected a folder")
    assert (divided.found, divided.cure) == ("out is a file: no folder", "expected a folder")


def test_what_will_fail_comes_last_and_commands_stay_whole():
    command = "pip install " + "x" * 120 + " y"
    found = [Finding("torch", "fails", "old " * 40, command), Finding("disk", "ok", "fine")]
    lines = table(found, 0.25).splitlines()
    assert lines[0] == "ok      disk   fine"
    assert lines[1].startswith("fails   torch  old old") and max(map(len, lines[:3])) <= 100
    assert f"> {command}" in lines[-2]
    assert lines[-1] == "2 checks in 0.2 s: 1 will fail, 0 warnings"


def test_doctor_is_quick_and_loads_no_torch():
    code = "import sys; sys.modules['torch'] = None; from glm4v_patched.cli import main; "
    done = subprocess.run(
        [sys.executable, "-c", code + "sys.exit(main(['doctor', '--json', '--device', 'cpu']))"],
        capture_output=True,
        text=True,
        check=False,
    )
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
