"""Versions of installed packages, read from their metadata without importing them."""

import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of Python, and of each given package that is installed, by name."""
    by_name = {"python": platform.python_version()}
    for name in packages:
        with suppress(PackageNotFoundError):
            by_name[name] = version(name)
    return by_name
