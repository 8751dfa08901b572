"""DeepSpeed's checkpoints are data: what asks to run is refused, and named."""

import os
import pickle

import pytest
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from glm4v_patched.finetune.safe_unpickling import loading_safely


class Calls:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.fixture
def engine() -> TorchCheckpointEngine:
    engine = TorchCheckpointEngine.__new__(TorchCheckpointEngine)
    engine.zipfile_serialization = False
    return engine


@pytest.fixture
def file(tmp_path) -> str:
    return str(tmp_path / "shard.pt")


def test_what_deepspeed_writes_is_loaded_as_it_was(engine, file):
    load, scaler = TorchCheckpointEngine.load, LossScaler(3.0)
    written = {
        "state": {0: {"exp_avg": torch.arange(3.0), "step": 4}},
        "stage": ZeroStageEnum.weights,
        "scaler": scaler,
        "at": fragment_address(numel=3, start=5),
        "shapes": [torch.Size([2, 3])],
    }
    engine.save(written, file)
    with pytest.raises(ZeroDivisionError), loading_safely():
        _ = 1 / 0
    assert TorchCheckpointEngine.load is load
    with loading_safely():
        loaded = engine.load(file, map_location="cpu")
        elsewhere = engine.load(file, map_location="meta")
    assert elsewhere["state"][0]["exp_avg"].is_meta
    assert TorchCheckpointEngine.load is load
    assert torch.equal(loaded["state"][0]["exp_avg"], torch.arange(3.0))
    assert loaded["stage"] is ZeroStageEnum.weights and loaded["at"] == written["at"]
    assert type(loaded["scaler"]) is LossScaler and vars(loaded["scaler"]) == vars(scaler)
    assert loaded["shapes"] == [torch.Size([2, 3])]


def test_a_member_of_an_enum_may_be_asked_for_by_its_name_and_nothing_else(engine, file):
    """Python 3.11.0 to 3.11.3 pickle a member of an enum by getattr."""
    engine.save({"stage": Calls(getattr, ZeroStageEnum, "weights")}, file)
    with loading_safely():
        assert engine.load(file)["stage"] is ZeroStageEnum.weights
    for owner, name in ((ZeroStageEnum, "mro"), (LossScaler, "__init__"), ({}, "clear")):
        engine.save({"stage": Calls(getattr, owner, name)}, file)
        with loading_safely(), pytest.raises(ValueError, match=f"would run code .*'{name}'"):
            engine.load(file)


@pytest.mark.parametrize("form", ["torch", 0, 2, 5])
def test_a_file_that_asks_to_run_is_refused_and_not_run(engine, tmp_path, file, form):
    payload = {"state": Calls(os.mkdir, str(tmp_path / "made"))}
    if form == "torch":
        engine.save(payload, file)
    else:
        (tmp_path / "shard.pt").write_bytes(pickle.dumps(payload, protocol=form))
    with loading_safely(), pytest.raises(ValueError, match="shard.pt would run code that"):
        engine.load(file)
    assert not (tmp_path / "made").exists()
