"""Finds what is to be loaded; needs no torch, so that mistakes are answered at once."""

from pathlib import Path
from typing import NamedTuple

from ..engine.options import require_packages
from ..finetune.identity import (
    ADAPTER_CONFIG,
    Base,
    base_of_adapters,
    pin,
    require_recorded_base,
)
from ..finetune.preflight import fault_of_model
from ..printed import own_command


class Held(NamedTuple):
    """A way to hold the weights of the layers; ``package`` is one of :data:`options.PACKAGES`."""

    option: str
    package: str
    on_cpu: bool


WEIGHTS = {
    "4bit": Held("--load-in-4bit", "qlora", on_cpu=False),
    "8bit": Held("--load-in-8bit", "qlora", on_cpu=False),
    "int8": Held("--torchao int8", "torchao", on_cpu=True),
    "fp8": Held("--torchao fp8", "torchao", on_cpu=True),
}
"""bitsandbytes: 4 bits (NF4, as qlora trains them), or 8; torchao: weights of 8 bits, integers or
floating point, with which the computation is in the model's own dtype."""


def check_weights(weights: str | None, device: str) -> None:
    """Raise ``ValueError`` if weights cannot be held so on a device."""
    if weights is not None and device == "cpu" and not WEIGHTS[weights].on_cpu:
        raise ValueError(
            f"{WEIGHTS[weights].option} needs a GPU, and --device is cpu: leave one of them out"
        )


def find_source(name: str, revision: str | None = None, weights: str | None = None) -> Base:
    """The model of that name, and the adapters on it, if the name is that of their folder.

    Args:
        name: Folder of a model or of LoRA adapters, or an id of the Hub.
        revision: Of an id of the Hub; of adapters, that of their model there.
        weights: How they will be held: one of :data:`WEIGHTS`, or as they are.

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
    if weights is not None:
        require_packages(WEIGHTS[weights].package)
        if WEIGHTS[weights].package == "torchao" and base.adapters is not None:
            merge = own_command("merge", str(folder), "--out", "merged")
            raise ValueError(
                f"{WEIGHTS[weights].option} does not take adapters ({folder}): merge them first "
                f"({merge}), or take --load-in-8bit"
            )
    base = pin(base)
    require_recorded_base(base)
    return base
