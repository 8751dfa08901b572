"""Checks that an error names the wrong part of the input."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(kind: type[BaseException], *named: str) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error ``kind`` whose message contains each of ``named``."""
    with pytest.raises(kind) as caught:
        yield caught
    for part in named:
        assert part in str(caught.value), str(caught.value)
