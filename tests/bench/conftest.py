"""What refuses a measurement, on a machine where none can run."""

import json
import shlex

import pytest

from glm4v_patched.bench import answers, generation, training
from glm4v_patched.cli import main
from glm4v_patched.engine import memory_check
from glm4v_patched.engine.gpus import Gpu, Gpus
from glm4v_patched.engine.options import REQUIRED_PACKAGES
from glm4v_patched.models import placement
from tests.helpers.tiny import golden_json

H200 = Gpu("NVIDIA H200", 150 * 10**9, (9, 0))


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """A command ends before anything runs or is printed, and names what is wrong with it."""
    for module in (answers, generation, training):
        monkeypatch.setattr(module, "run", lambda *_: pytest.fail("a process was started"))
    monkeypatch.setattr(memory_check, "free_ram", lambda: 100e9)
    for package in ("qlora", "4bit"):
        monkeypatch.setitem(REQUIRED_PACKAGES, package, ["not_there"])
    (tmp_path / "config.json").write_text(json.dumps(golden_json("config.json")))
    monkeypatch.chdir(tmp_path)

    def check(command: str, named: str, gpus: int = 0) -> None:
        found = Gpus((H200,) * gpus, "none here")
        for module in (training, placement):
            monkeypatch.setattr(module, "find_gpus", lambda: found)
        assert main(shlex.split(command)) == 1
        said = capsys.readouterr()
        # On a busy machine, what is being done is said before.
        told = f"\n{said.err.strip()}".partition("\nglm4v-patched: ")[2]
        assert named in told, told
        assert said.out == ""

    return check
