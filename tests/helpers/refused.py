"""Mistakes are refused by an error that names what of the input is wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(kind: type[BaseException], *named: str) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error of class ``kind`` with each of ``named`` in its message."""
    with pytest.raises(kind) as caught:
        yield caught
    for part in named:
        assert part in str(caught.value), str(caught.value)
