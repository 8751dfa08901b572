"""Counts how often ZeRO-3 gathers parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

NAMES = ("allgather_fn", "all_gather_into_tensor", "all_gather")


class Count:
    calls = 0


@contextmanager
def counted_gathers() -> Iterator[Count]:
    """Count the all-gathers that DeepSpeed starts inside, one for each group of parameters."""
    from deepspeed import comm

    count = Count()

    def counting(function):
        def gather(*args, **kwargs):
            count.calls += 1
            return function(*args, **kwargs)

        return gather

    with mock.patch.multiple(comm, **{name: counting(getattr(comm, name)) for name in NAMES}):
        yield count
