"""DeepSpeed's part of a checkpoint is loaded as data: nothing in its pickles is run."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..patch.swap import PatchSet, Swap

ENGINE = "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine:TorchCheckpointEngine"


@contextmanager
def loading_safely() -> Iterator[None]:
    """Have DeepSpeed load checkpoints with torch's ``weights_only``, which it turns off itself.

    Beside tensors and plain values its own three classes of numbers are let in.

    Raises:
        AttributeError: DeepSpeed has moved what is replaced here.
    """
    patches = PatchSet([Swap(ENGINE, "load", lambda original: _load)])
    patches.apply()
    try:
        yield
    finally:
        patches.revert()


def _load(engine, path: str, map_location=None):
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = str(error).partition("WeightsUnpickler error:")[2].strip() or str(error)
        raise ValueError(
            f"{path} asks to run more than a checkpoint of DeepSpeed needs, and was not loaded: "
            f"{wanted.splitlines()[0]}"
        ) from None
