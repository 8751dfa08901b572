"""Two machines, as two agents of torchrun on this one that meet over the loopback."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from glm4v_patched.finetune.checkpoints import MANIFEST, find_faults
from glm4v_patched.finetune.run_folder import LOCK
from tests.helpers.processes import cpu_environment
from tests.helpers.recipes import drawn_recipe

pytestmark = pytest.mark.slow
STEPS = {"trainer.max_steps": 4, "trainer.save_steps": 2}


def on_two_machines(*arguments: str) -> list[str]:
    """What each agent printed, once both have ended well."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    command += ["--nproc_per_node", "1", "--master-addr", "localhost", "--master-port", str(port)]
    agents = [
        subprocess.Popen(
            [*command, "--node-rank", node, "-m", "glm4v_patched.finetune", *arguments],
            env=cpu_environment() | {"LOCAL_SIZE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in ("0", "1")
    ]
    try:
        printed = [agent.communicate(timeout=300)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(printed)[-8000:]
    return printed


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("machines")
    recipe = drawn_recipe(folder, STEPS)
    recipe.write(folder / "recipe.json")
    on_two_machines(str(folder / "recipe.json"), "--device", "cpu")
    return folder / "out"


def test_both_machines_train_one_model(trained):
    report = json.loads((trained / "training.json").read_text())
    assert report["finished"] and report["world_size"] == 2
    losses = [entry["loss"] for entry in report["history"]]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert find_faults(trained / "checkpoint-2") == []
    written = json.loads((trained / "checkpoint-2" / MANIFEST).read_text())["files"]
    # Each process writes a part of its own.
    assert {name for name in written if "rank_0_" in name and "rank_1_" not in name}
    assert {name for name in written if "rank_1_" in name}
    assert not (trained / LOCK).exists()


def test_a_resumed_run_ends_where_one_ends_that_never_stopped(trained, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    shutil.copytree(trained / "checkpoint-2", out / "checkpoint-2")
    for name in ("recipe.json", "data.json"):
        shutil.copy(trained / name, out)
    (out / "run.json").write_text('{"written": ["checkpoint-2", "recipe.json", "data.json"]}')
    again = str(trained / "recipe.json"), f"out={out}", "--resume", "--device", "cpu"
    printed = on_two_machines(*again)
    assert "training continues from" in printed[0] and "after step 2" in printed[0]
    want, got = (load_file(folder / "model.safetensors") for folder in (trained, out))
    assert got.keys() == want.keys()
    assert [name for name in want if not (got[name] == want[name]).all()] == []
    histories = [
        json.loads((folder / "training.json").read_text())["history"] for folder in (trained, out)
    ]
    assert histories[0] == histories[1]
