"""Load DeepSpeed's checkpoints without running code from their pickles."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch

from ..engine.deepspeed.internals import (
    CHECKPOINT_CLASSES,
    CHECKPOINT_ENGINE,
    import_deepspeed_name,
)
from ..patch.patch_set import AttributePatch, PatchSet


@contextmanager
def loading_safely() -> Iterator[None]:
    """During the block, make DeepSpeed load checkpoints with torch's ``weights_only=True``.

    Besides tensors and plain values, the classes in ``CHECKPOINT_CLASSES`` are allowed.

    Raises:
        RuntimeError: DeepSpeed has moved the function that is replaced, or one of the classes.
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
        allowed = [import_deepspeed_name(name) for name in CHECKPOINT_CLASSES]
        with torch.serialization.safe_globals([*allowed, (_enum_member, "builtins.getattr")]):
            return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("WeightsUnpickler error:")[2].strip() or str(error)
        raise ValueError(
            f"{path} would run code that no checkpoint of DeepSpeed needs, and was not loaded: "
            f"{reason.splitlines()[0]}"
        ) from None


def _enum_member(enum: object, name: str) -> Enum:
    """Replace ``getattr`` in unpickling: pickles of Python 3.11.0 to 3.11.3 call it for enums."""
    if isinstance(enum, type) and issubclass(enum, Enum) and name in enum.__members__:
        return enum[name]
    raise pickle.UnpicklingError(f"getattr of {enum!r}, {name!r}")
