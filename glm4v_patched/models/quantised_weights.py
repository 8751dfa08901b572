"""Ways to hold the weights of the layers in fewer bytes; imports nothing, for ``--help``."""

from typing import NamedTuple


class Held(NamedTuple):
    """A way to hold the weights of the layers; ``package`` is one of :data:`options.PACKAGES`."""

    option: str
    package: str
    on_cpu: bool
    compiled: bool
    """Whether ``generate`` compiles steps: transformers does with no layers of bitsandbytes."""


WEIGHTS = {
    "4bit": Held("--load-in-4bit", "qlora", on_cpu=False, compiled=False),
    "8bit": Held("--load-in-8bit", "qlora", on_cpu=False, compiled=False),
    "int8": Held("--torchao int8", "torchao", on_cpu=True, compiled=True),
    "fp8": Held("--torchao fp8", "torchao", on_cpu=True, compiled=True),
}
"""bitsandbytes: 4 bits (NF4, as qlora trains them), or 8; torchao: weights of 8 bits, integers or
floating point, with which the computation is in the model's own dtype."""


def check_weights(weights: str | None, device: str, cache: str = "auto") -> None:
    """Raise ``ValueError`` if weights cannot be held so on a device, or with a cache."""
    if weights is None:
        return
    held = WEIGHTS[weights]
    if device == "cpu" and not held.on_cpu:
        raise ValueError(f"{held.option} needs a GPU, and --device is cpu: leave one of them out")
    if cache == "static" and not held.compiled:
        raise ValueError(
            f"--cache static with {held.option}: static is for compiled steps, and transformers "
            "compiles none of bitsandbytes's layers; leave out --cache"
        )


def kept_cache(cache: str, weights: str | None, otherwise: str) -> str:
    """``static`` or ``dynamic``; of ``auto``, what compiled steps would have ``otherwise``."""
    if cache != "auto":
        return cache
    return otherwise if weights is None or WEIGHTS[weights].compiled else "dynamic"
