"""Versions, read from what pip wrote: nothing is imported."""

import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of Python, and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
