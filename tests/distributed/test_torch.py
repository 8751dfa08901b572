"""Two real processes under torch's own DDP and FSDP2, with an image on one of them only."""

import pytest
import torch
from processes import run_two_processes
from test_zero import RTOL, largest, unsharded_run
from tiny import tiny_model


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch")
    tiny_model().save_pretrained(folder / "model")
    run_two_processes("torch_worker.py", str(folder), seconds=120)
    return folder


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_checkpointed_gradients_equal_those_of_one_process(kind, results):
    got, want = torch.load(results / f"{kind}.pt"), unsharded_run("all")["gradients"][0]
    assert got.keys() == want.keys()
    assert largest({name: got[name] - want[name] for name in want}) <= RTOL * largest(want)
