"""Refuse to answer from NaN or infinite logits, and find their cause.

The search for the cause reads all weights and repeats the forward pass with hooks. It starts only
after non-finite logits, so answers with finite logits take no longer.
"""

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

PEFT_PREFIX = "base_model.model."  # in front of the names of a peft model's modules
MAX_USUAL_SCALING = 100  # a LoRA adapter's lora_alpha / r; errors mention larger values
CHUNK_ROWS = 4096  # rows of a weight that are converted to fp32 at once
NONFINITE_LOGITS = "the logits are NaN or infinite"


class NonFiniteLogits(RuntimeError):
    """Raised because logits are NaN or infinite; the message is a single line."""

    def __init__(self, message: str = NONFINITE_LOGITS):
        super().__init__(message)


class RequireFiniteLogits(LogitsProcessor):
    """A logits processor that raises :class:`NonFiniteLogits`.

    Reading the logits synchronizes with the device, which transformers' own loop does anyway after
    each token.
    """

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        require_all_finite(has_finite_logits(scores))
        return scores


def has_finite_logits(logits_BV: Tensor) -> Tensor:
    """Return whether each sequence's logits are finite, ``(B,)`` bool.

    Minus infinity excludes a token. Some of a sequence's logits may have this value, but not all.
    """
    return logits_BV.amax(-1).isfinite()


def require_all_finite(finite_B: Tensor) -> None:
    """Raise :class:`NonFiniteLogits` unless all values are true; synchronizes with the device."""
    if not finite_B.all():
        raise NonFiniteLogits


def require_finite_logits(model: Any, batch: Any) -> None:
    """Raise :class:`NonFiniteLogits` if a forward pass of the batch computes NaN or infinity."""
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits
    if not has_finite_logits(logits).all():
        raise NonFiniteLogits(describe_cause(model, batch))


def describe_cause(model: Any, batch: Any) -> str:
    """Return a line about where NaN or infinity first occurs.

    The weights are checked first, then the inputs, then the outputs of the layers.
    """
    if name := _nonfinite_weight(model):
        return (
            f"{NONFINITE_LOGITS}, because the weight {name} is NaN or infinite. Either its file is "
            "damaged, or the training diverged: use an earlier checkpoint"
        )
    for name, tensor in batch.items():
        if isinstance(tensor, Tensor) and not _is_finite(tensor):
            return (
                f"{NONFINITE_LOGITS}, because the input {name} is NaN or infinite; all weights are "
                "finite"
            )
    if not (name := _first_nonfinite_layer(model, batch)):
        return (
            f"{NONFINITE_LOGITS} after the prompt; all weights are finite, and so are all outputs "
            "for the prompt"
        )
    message = (
        f"{NONFINITE_LOGITS}: all weights are finite, but the output of {name} is not, in "
        f"{model.dtype}"
    )
    if (scaling := _largest_scaling(model)) > MAX_USUAL_SCALING:
        message += f"; adapters are multiplied by {scaling:.3g} (lora_alpha / r)"
    return message.replace("torch.", "")


def _nonfinite_weight(model: Any) -> str:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not _is_finite(tensor):
            return name.removeprefix(PEFT_PREFIX)
    return ""


def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_meta or not tensor.is_floating_point():
        return True
    chunks = tensor.detach().split(CHUNK_ROWS) if tensor.ndim else (tensor.detach(),)
    return all(bool(chunk.float().isfinite().all()) for chunk in chunks)


def _first_nonfinite_layer(model: Any, batch: Any) -> str:
    """Return the name of the first module whose output is not finite, or an empty string."""
    names: list[str] = []

    def make_hook(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            if not names and not all(map(_is_finite, _iterate_tensors(output))):
                names.append(name.removeprefix(PEFT_PREFIX))

        return hook

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(make_hook(name)))
        # With gradients enabled, neither CUDA graphs nor fused inference kernels are used, so all
        # hooks are called. Errors that NaN causes in the model are ignored.
        with torch.enable_grad(), suppress(ValueError, RuntimeError):
            model(**batch, use_cache=False)
    return names[0] if names else ""


def _largest_scaling(model: Any) -> float:
    """Return the largest factor that peft multiplies an adapter's output by, or 0."""
    factors: list[float] = []
    for module in model.modules():
        scaling = getattr(module, "scaling", None)
        if isinstance(scaling, dict):  # peft's factors by name of the adapter
            factors += scaling.values()
    return max(map(abs, factors), default=0.0)


def _iterate_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _iterate_tensors(item)
