"""Answers are refused where logits are NaN or infinite, with what is known of the cause.

The search for it costs nothing until it is needed: no weight is read, and no hook is there.
"""

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

PREFIX = "base_model.model."  # peft's, before the names of the model's modules
USUAL_SCALING = 100
ROWS_AT_ONCE = 4096  # of a weight: no second copy of a large one is made


TOLD = "the logits are NaN or infinite"


class NonFiniteLogits(RuntimeError):
    """The model gives NaN or infinity, and so no answer; the message is a single line."""

    def __init__(self, told: str = TOLD):
        super().__init__(told)


class RequireFinite(LogitsProcessor):
    """Raises :class:`NonFiniteLogits` in transformers' own loop, which waits for the device after
    each token anyway."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        require_finite(finite_rows(scores))
        return scores


def finite_rows(logits_BV: Tensor) -> Tensor:
    """Return for each row whether its logits are finite, ``(B,)``. Minus infinity is what excludes
    a token, and is allowed beside finite numbers."""
    return logits_BV.amax(-1).isfinite()


def require_finite(finite_B: Tensor) -> None:
    """Raise :class:`NonFiniteLogits` unless all are true. Waits for the device."""
    if not finite_B.all():
        raise NonFiniteLogits


def require_finite_logits(model: Any, batch: Any) -> None:
    """Raise :class:`NonFiniteLogits` if a model gives such logits for a batch."""
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits
    if not finite_rows(logits).all():
        raise NonFiniteLogits(describe_cause(model, batch))


def describe_cause(model: Any, batch: Any) -> str:
    """Return what makes the logits of a batch NaN or infinite, on one line: the first weight that
    is, the images, or the first layer whose output is."""
    told = TOLD
    if name := _nonfinite_weight(model):
        return (
            f"{told}, as is the weight {name}: is the file damaged, or did the training diverge? "
            "Give the model as it was before"
        )
    for name, tensor in batch.items():
        if isinstance(tensor, Tensor) and not _is_finite(tensor):
            return f"{told}, as are the {name} that were given; the weights are finite"
    if not (name := _first_layer(model, batch)):
        return f"{told} after the prompt, of which all is finite, as are the weights"
    told += f": all weights are finite, and the output of {name} is not, in {model.dtype}"
    if (scaling := _largest_scaling(model)) > USUAL_SCALING:
        told += f"; adapters are multiplied by {scaling:.3g} (lora_alpha / r)"
    return told.replace("torch.", "")


def _nonfinite_weight(model: Any) -> str:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not _is_finite(tensor):
            return name.removeprefix(PREFIX)
    return ""


def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_meta or not tensor.is_floating_point():
        return True
    parts = tensor.detach().split(ROWS_AT_ONCE) if tensor.ndim else (tensor.detach(),)
    return all(bool(part.float().isfinite().all()) for part in parts)


def _first_layer(model: Any, batch: Any) -> str:
    """Return the name of the first module to end with an output that is not finite."""
    found: list[str] = []

    def hook(name: str) -> Any:
        def look(module: Any, given: Any, output: Any) -> None:
            if not found and not all(map(_is_finite, _tensors(output))):
                found.append(name.removeprefix(PREFIX))

        return look

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(hook(name)))
        # With gradients, which frozen weights have none of, no recorded or fused call is made.
        with torch.enable_grad(), suppress(ValueError, RuntimeError):  # which NaN may raise, too
            model(**batch, use_cache=False)
    return found[0] if found else ""


def _largest_scaling(model: Any) -> float:
    """Return the most that peft multiplies the output of an adapter by."""
    of_modules = [getattr(module, "scaling", None) for module in model.modules()]
    scalings = [each for of in of_modules if isinstance(of, dict) for each in of.values()]
    return max(map(abs, scalings), default=0.0)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)
