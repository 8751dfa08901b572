"""Checks that a framework still has what its plug-in overrides."""

import importlib.metadata
from collections.abc import Iterable

from ..terminal_text import pip_install


def require_members(owner: object, names: Iterable[str], package: str, tested: str) -> None:
    """Raise ``RuntimeError`` if a class or module of a package lacks some of the names, with the
    version that the plug-in was tested with: a renamed method would never be called, in silence."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        found = importlib.metadata.version(package)
        shown = getattr(owner, "__qualname__", getattr(owner, "__name__", owner))
        raise RuntimeError(
            f"{package} {found} has no {', '.join(missing)} in {shown}, which glm4v_patched needs; "
            f"install the version it is tested with: {pip_install(f'{package}=={tested}')}"
        )
