"""Check that a framework still has the names that its plug-in overrides or calls."""

import importlib.metadata
from collections.abc import Iterable

from ..terminal_text import pip_install

# The versions of the frameworks that the plug-ins are tested with.
TESTED_AXOLOTL, TESTED_LLAMAFACTORY, TESTED_MS_SWIFT = "0.19.0", "0.9.5", "4.6.0"


def require_members(owner: object, names: Iterable[str], package: str, tested: str) -> None:
    """Require that a class or module of a framework has these attributes.

    If the framework has renamed a method, it would never call the plug-in's override.

    Args:
        owner: The class or module.
        names: Attributes that the plug-in overrides or calls.
        package: The framework's distribution.
        tested: The framework's version that the plug-in is tested with.

    Raises:
        RuntimeError: An attribute is missing.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        installed = importlib.metadata.version(package)
        owner_name = getattr(owner, "__qualname__", getattr(owner, "__name__", owner))
        raise RuntimeError(
            f"{package} {installed} has no {', '.join(missing)} in {owner_name}, which "
            "glm4v_patched needs; install the version it is tested with: "
            f"{pip_install(f'{package}=={tested}')}"
        )
