"""Finds what is to be loaded; needs no torch, so that mistakes are answered at once."""

from pathlib import Path

from ..engine.options import require_packages
from ..finetune.identity import (
    ADAPTER_CONFIG,
    Base,
    base_of_adapters,
    pin,
    require_recorded_base,
)
from ..finetune.preflight import fault_of_model


def find_source(name: str, revision: str | None = None, in_4_bit: bool = False) -> Base:
    """The model of that name, and the adapters on it, if the name is that of their folder.

    Args:
        name: Folder of a model or of LoRA adapters, or an id of the Hub.
        revision: Of an id of the Hub; of adapters, that of their model there.
        in_4_bit: Whether the weights will be held in 4 bits.

    Raises:
        ValueError: it is not there, not whole or no glm-4v, its adapters are of a model that has
            changed since, or the Hub does not answer.
        RuntimeError: a package is missing.
    """
    if fault := fault_of_model(name):
        raise ValueError(f"{name}: {fault}")
    folder = Path(name)
    base = Base(name, revision)
    if (folder / ADAPTER_CONFIG).is_file():
        base = base_of_adapters(folder, revision)
        if fault := fault_of_model(base.model):
            raise ValueError(
                f"{folder} holds adapters of the model {base.model}: {fault}; if that was moved, "
                f"write where it is now as base_model_name_or_path in {folder / ADAPTER_CONFIG}"
            )
        require_packages("lora_lm")
    elif revision is not None and folder.is_dir():
        raise ValueError(f"--revision {revision}: {name} is a folder, and has no revisions")
    if in_4_bit:
        require_packages("qlora")
    base = pin(base)
    require_recorded_base(base)
    return base
