"""DeepSpeed's part of a checkpoint is loaded as data: nothing in its pickles is run."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch

from ..engine.deepspeed.internals import CHECKPOINT_ENGINE, CHECKPOINT_CLASSES, import_deepspeed_name
from ..patch.patch_set import PatchSet, AttributePatch


@contextmanager
def loading_safely() -> Iterator[None]:
    """Have DeepSpeed load checkpoints with torch's ``weights_only``, which it turns off itself.

    Beside tensors and plain values its own three classes of numbers are let in.

    Raises:
        RuntimeError: DeepSpeed has moved what is replaced or let in here.
    """
    for name in (CHECKPOINT_ENGINE, *CHECKPOINT_CLASSES):
        import_deepspeed_name(name)
    patches = PatchSet([AttributePatch(CHECKPOINT_ENGINE, "load", lambda original: _load)])
    patches.apply()
    try:
        yield
    finally:
        patches.revert()


def _load(engine, path: str, map_location=None):
    try:
        let_in = [import_deepspeed_name(name) for name in CHECKPOINT_CLASSES]
        with torch.serialization.safe_globals([*let_in, (_member, "builtins.getattr")]):
            return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = str(error).partition("WeightsUnpickler error:")[2].strip() or str(error)
        raise ValueError(
            f"{path} asks to run more than a checkpoint of DeepSpeed needs, and was not loaded: "
            f"{wanted.splitlines()[0]}"
        ) from None


def _member(enum: object, name: str) -> Enum:
    """In place of ``getattr``, by which Python 3.11.0 to 3.11.3 pickle a member of an enum."""
    if isinstance(enum, type) and issubclass(enum, Enum) and name in enum.__members__:
        return enum[name]
    raise pickle.UnpicklingError(f"getattr of {enum!r}, {name!r}")
