"""Fine-tune glm-4v-9b with modeling code that can be trained. The import alone patches nothing."""

import importlib

__version__ = "0.1.0"
__all__ = ["__version__", "applied", "apply", "revert"]

_DEFINING_MODULES = {
    "applied": "patch.auto_classes",
    "apply": "patch.auto_classes",
    "revert": "patch.auto_classes",
}


def __getattr__(name: str):
    # The module is imported on first use, because it imports torch and transformers.
    if name not in _DEFINING_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_DEFINING_MODULES[name]}", __name__), name)
