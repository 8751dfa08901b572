<<<<<<< HEAD
"""Fine-tune glm-4v-9b with modeling code made for training. Importing it changes nothing."""
=======
"""Fine-tune glm-4v-9b with modeling code that can be trained. Importing this changes nothing."""
>>>>>>> m-w-patch

import importlib

__version__ = "0.1.0"
__all__ = ["__version__", "applied", "apply", "revert"]

<<<<<<< HEAD
_MODULES = {
=======
_DEFINING_MODULES = {
>>>>>>> m-w-patch
    "applied": "patch.auto_classes",
    "apply": "patch.auto_classes",
    "revert": "patch.auto_classes",
}


def __getattr__(name: str):
<<<<<<< HEAD
    # Imported on first use: they import torch and transformers.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
=======
    # Imported on first use, because these modules import torch and transformers.
    if name not in _DEFINING_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_DEFINING_MODULES[name]}", __name__), name)
>>>>>>> m-w-patch
