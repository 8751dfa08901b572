"""Counts how often ZeRO-3 gathers parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest import mock

NAMES = ("allgather_fn", "all_gather_into_tensor", "all_gather")


@contextmanager
def counted_gathers() -> Iterator[SimpleNamespace]:
    """Count the all-gathers that DeepSpeed starts inside, one for each group of parameters."""
    from deepspeed import comm

    count = SimpleNamespace(calls=0)

    def counting(function, *args, **kwargs):
        count.calls += 1
        return function(*args, **kwargs)

    counted = {name: partial(counting, getattr(comm, name)) for name in NAMES}
    with mock.patch.multiple(comm, **counted):
        yield count
