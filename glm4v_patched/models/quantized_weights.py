"""Options for quantizing the weights of the layers; imports nothing, so that ``--help`` is fast."""

WEIGHT_FORMATS = ("4bit", "8bit", "fp8")
"""4bit is NF4 of bitsandbytes, which qlora uses, too; 8bit is LLM.int8 of bitsandbytes. fp8 is the
format in which a training with ``engine.fp8`` stores frozen weights (:mod:`..engine.fp8`)."""


def check_weights_option(weights: str | None, device: str, cache: str = "auto") -> None:
    """Raise ``ValueError`` if quantized weights do not work on a device or with a kind of cache."""
    if weights is None:
        return
    if device == "cpu":
        raise ValueError(
            f"--weights {weights} needs a GPU, but --device is cpu: remove one of them"
        )
    choose_cache_implementation(cache, weights, "dynamic")


def choose_cache_implementation(cache: str, weights: str | None, default: str) -> str:
    """Return the kind of cache to use: ``cache``, or for ``auto`` a kind that the weights support.

    Args:
        weights: One of :data:`WEIGHT_FORMATS`, or the method by which the model was saved
            quantized, or None. Only unquantized and fp8 weights support a cache of fixed size,
            which is used with CUDA graphs: in every step, the 8-bit layers of bitsandbytes
            synchronize with the device, and the layers of compressed-tensors copy between host and
            GPU.
        default: The kind of cache for ``auto``, if the weights support all kinds.

    Raises:
        ValueError: The cache does not work with these weights.
    """
    supports_static = weights in (None, "fp8")
    if cache == "auto":
        return default if supports_static else "dynamic"
    if cache != "dynamic" and not supports_static:
        is_option = weights in WEIGHT_FORMATS
        model = f"--weights {weights}" if is_option else f"a model saved by {weights}"
        raise ValueError(
            f"--cache {cache} with {model}: a cache of fixed size needs CUDA graphs, which these "
            "layers do not support; remove --cache"
        )
    return cache
