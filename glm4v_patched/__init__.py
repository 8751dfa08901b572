"""Fine-tuning glm-4v-9b: modeling code that people can train. Importing this changes nothing."""

import importlib

__version__ = "0.1.0"
__all__ = ["__version__", "applied", "apply", "revert"]

_HOMES = {
    "applied": "patch.auto_classes",
    "apply": "patch.auto_classes",
    "revert": "patch.auto_classes",
}


def __getattr__(name: str):
    # Late, because they import torch and transformers.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
