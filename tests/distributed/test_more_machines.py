"""Training on two machines, simulated by two torchrun agents on this one."""

import json
import shutil
import socket

import pytest
import torch.distributed.run
from safetensors.torch import load_file

from glm4v_patched.finetune.checkpoints import CHECKPOINT_MANIFEST, find_checkpoint_problems
from glm4v_patched.finetune.run_folder import LOCK
from tests.helpers.processes import run_ranks
from tests.helpers.recipes import drawn_recipe, write_recipe
from tests.remote.inputs import assert_close


def on_two_machines(*arguments: str) -> str:
    """Run the training with two agents; return their output."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [torch.distributed.run.__file__, "--nnodes", "2", "--nproc_per_node", "1"]
    command += ["--master-addr", "localhost", "--master-port", port]
    command += ["-m", "glm4v_patched.finetune", *arguments]
    agents = [{"LOCAL_SIZE": "1", "PET_NODE_RANK": node} for node in ("0", "1")]
    ended = run_ranks(*command, seconds=300, ranks=agents)
    assert ended.status == 0, ended.output[-8000:]
    return ended.output


@pytest.mark.slow
def test_both_machines_train_one_model_and_resume_it_to_the_same_bits(tmp_path):
    recipe = drawn_recipe(tmp_path, {"trainer.max_steps": 4, "trainer.save_steps": 2})
    write_recipe(recipe, tmp_path / "recipe.json")
    on_two_machines(str(tmp_path / "recipe.json"), "--device", "cpu")
    trained, out = tmp_path / "out", tmp_path / "again"
    report = json.loads((trained / "training.json").read_text())
    assert report["finished"] and report["world_size"] == 2
    losses = [entry["loss"] for entry in report["history"]]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert find_checkpoint_problems(trained / "checkpoint-2") == []
    written = json.loads((trained / "checkpoint-2" / CHECKPOINT_MANIFEST).read_text())["files"]
    # Each process writes its own files.
    assert all(any(f"rank_{rank}_" in name for name in written) for rank in (0, 1))
    assert not (trained / LOCK).exists()

    out.mkdir()
    shutil.copytree(trained / "checkpoint-2", out / "checkpoint-2")
    for name in ("recipe.json", "data.json"):
        shutil.copy(trained / name, out)
    (out / "run.json").write_text('{"written": ["checkpoint-2", "recipe.json", "data.json"]}')
    again = (str(trained / "recipe.json"), f"out={out}", "--resume", "--device", "cpu")
    printed = on_two_machines(*again)
    assert "training resumes from" in printed and "after step 2" in printed
    assert_close(*(load_file(folder / "model.safetensors") for folder in (out, trained)))
    assert json.loads((out / "training.json").read_text())["history"] == report["history"]
