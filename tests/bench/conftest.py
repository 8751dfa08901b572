"""A fixture that checks how bench refuses measurements, on a machine where none can run."""

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
    """Check that a command ends with an error before anything runs or is printed."""
    for module in (answers, generation, training):
        monkeypatch.setattr(module, "run_and_log", lambda *_: pytest.fail("a process was started"))
    monkeypatch.setattr(memory_check, "free_ram", lambda: 100e9)
    for package in ("qlora", "4bit"):
        monkeypatch.setitem(REQUIRED_PACKAGES, package, ["not_there"])
    (tmp_path / "config.json").write_text(json.dumps(golden_json("config.json")))
    monkeypatch.chdir(tmp_path)

    def check(command: str, message: str, num_gpus: int = 0) -> None:
        gpus = Gpus((H200,) * num_gpus, "none here")
        for module in (training, placement):
            monkeypatch.setattr(module, "find_gpus", lambda: gpus)
        assert main(shlex.split(command)) == 1
        printed = capsys.readouterr()
        # On a busy machine, progress is printed before the error.
        error = f"\n{printed.err.strip()}".partition("\nglm4v-patched: ")[2]
        assert message in error, error
        assert printed.out == ""

    return check
