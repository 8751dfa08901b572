"""DeepSpeed's checkpoints are data: what asks to run is refused, and named."""

import os
import pickle

import pytest
import torch

pytest.importorskip("deepspeed")
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import (  # noqa: E402
    TorchCheckpointEngine,
)
from deepspeed.runtime.fp16.loss_scaler import LossScaler  # noqa: E402
from deepspeed.runtime.zero.config import ZeroStageEnum  # noqa: E402
from deepspeed.utils.tensor_fragment import fragment_address  # noqa: E402

from glm4v_patched.finetune.safe_unpickling import loading_safely  # noqa: E402


class Payload:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def engine() -> TorchCheckpointEngine:
    engine = TorchCheckpointEngine.__new__(TorchCheckpointEngine)
    engine.zipfile_serialization = False
    return engine


@pytest.mark.parametrize("zipped", [False, True])
def test_what_deepspeed_writes_is_loaded_as_it_was(engine, tmp_path, zipped):
    engine.zipfile_serialization = zipped
    scaler = LossScaler(3.0)
    written = {
        "state": {0: {"exp_avg": torch.arange(3.0), "step": 4}},
        "stage": ZeroStageEnum.weights,
        "scaler": scaler,
        "at": fragment_address(numel=3, start=5),
        "shapes": [torch.Size([2, 3])],
    }
    engine.save(written, str(tmp_path / "shard.pt"))
    with loading_safely():
        loaded = engine.load(str(tmp_path / "shard.pt"), map_location="cpu")
    assert torch.equal(loaded["state"][0]["exp_avg"], torch.arange(3.0))
    assert loaded["stage"] is ZeroStageEnum.weights and loaded["at"] == written["at"]
    assert type(loaded["scaler"]) is LossScaler and vars(loaded["scaler"]) == vars(scaler)
    assert loaded["shapes"] == [torch.Size([2, 3])]


class ByName:
    """Pickled as Python 3.11.0 to 3.11.3 pickle a member of an enum."""

    def __init__(self, of, name):
        self.named = of, name

    def __reduce__(self):
        return getattr, self.named


@pytest.mark.parametrize("zipped", [False, True])
def test_a_member_of_an_enum_may_be_asked_for_by_its_name_and_nothing_else(
    engine, tmp_path, zipped
):
    engine.zipfile_serialization = zipped
    file = str(tmp_path / "shard.pt")
    engine.save({"stage": ByName(ZeroStageEnum, "weights")}, file)
    with loading_safely():
        assert engine.load(file)["stage"] is ZeroStageEnum.weights
    for of, name in ((ZeroStageEnum, "mro"), (LossScaler, "__init__"), ({}, "clear")):
        engine.save({"stage": ByName(of, name)}, file)
        with loading_safely(), pytest.raises(ValueError, match=f"to run more than .*'{name}'"):
            engine.load(file)


@pytest.mark.parametrize("form", ["torch", "zip", *range(6)])
def test_a_file_that_asks_to_run_is_refused_and_not_run(engine, tmp_path, form):
    file, made = tmp_path / "shard.pt", tmp_path / "made"
    payload = {"state": Payload(made)}
    if isinstance(form, int):
        file.write_bytes(pickle.dumps(payload, protocol=form))
    else:
        torch.save(payload, file, _use_new_zipfile_serialization=form == "zip")
    with loading_safely(), pytest.raises(ValueError, match="shard.pt asks to run more than"):
        engine.load(str(file))
    assert not made.exists()


def test_afterwards_deepspeed_loads_as_before(engine):
    load = TorchCheckpointEngine.load
    with pytest.raises(KeyError), loading_safely():
        assert TorchCheckpointEngine.load is not load
        raise KeyError
    assert TorchCheckpointEngine.load is load
