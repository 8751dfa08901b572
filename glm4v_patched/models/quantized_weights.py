"""Ways to hold the weights of the layers in fewer bytes; imports nothing, for ``--help``."""

WEIGHT_FORMATS = ("4bit", "8bit", "fp8")
"""bitsandbytes: 4 bits (NF4, as qlora trains them), or 8 (LLM.int8); fp8: as training with
``engine.fp8`` holds frozen ones, and multiplies by them (:mod:`..engine.fp8`)."""


def check_weights_option(weights: str | None, device: str, cache: str = "auto") -> None:
    """Raise ``ValueError`` if weights cannot be held so on a device, or with a cache."""
    if weights is None:
        return
    if device == "cpu":
        raise ValueError(f"--weights {weights} needs a GPU, and --device is cpu: leave one out")
    resolve_cache(cache, weights, "dynamic")


def resolve_cache(cache: str, weights: str | None, otherwise: str) -> str:
    """``cache``; of ``auto``, what a cache of fixed size would be ``otherwise``.

    Args:
        weights: How they are held, or the method that the model was saved quantized by. With fp8
            alone a cache may be of fixed size: of bitsandbytes' layers those of 8 bits wait for the
            device, and those of compressed-tensors copy between the host and the GPU in every step.

    Raises:
        ValueError: steps with such weights cannot have the cache.
    """
    fixed = weights in (None, "fp8")
    if cache == "auto":
        return otherwise if fixed else "dynamic"
    if cache != "dynamic" and not fixed:
        told = f"--weights {weights}" if weights in WEIGHT_FORMATS else f"a model saved by {weights}"
        raise ValueError(
            f"--cache {cache} with {told}: it is for steps that are recorded, and "
            "those of such layers are not; leave out --cache"
        )
    return cache
