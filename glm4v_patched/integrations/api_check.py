"""Checks that a framework still has what its plug-in overrides."""

import importlib.metadata
from collections.abc import Iterable

from ..terminal_text import pip_install


def require_members(owner: object, names: Iterable[str], package: str, tested: str) -> None:
    """An overridden method that was renamed would never be called, in silence.

    Args:
        owner: A class or module of the package.
        tested: The version that the plug-in was tested with.

    Raises:
        RuntimeError: ``owner`` lacks some of the names.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        found = importlib.metadata.version(package)
        shown = getattr(owner, "__qualname__", getattr(owner, "__name__", owner))
        raise RuntimeError(
            f"{package} {found} has no {', '.join(missing)} in {shown}, which glm4v_patched needs; "
            f"install the version it is tested with: {pip_install(f'{package}=={tested}')}"
        )
