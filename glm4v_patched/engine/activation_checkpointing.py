"""Makes layers keep the activations that their policy names, and compute the others again."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..remote.checkpointing import CheckpointedLayer
from ..remote.modeling_chatglm import GLMBlock
from .activation_policies import Policy, check_policy, policies_of_layers

# Of linear layers, and which argument is the weight [in, out].
_LINEARS = {torch.ops.aten.mm.default: -1, torch.ops.aten.addmm.default: -1}
if hasattr(torch.ops.aten, "_scaled_mm"):  # in fp8, whose require_fp8 asks for it
    _LINEARS[torch.ops.aten._scaled_mm.default] = 1


def checkpoint_layers(
    model: nn.Module,
    tower: str = "full",
    language: str = "full",
    by_operation: bool = False,
) -> None:
    """Set the policy of the vision tower's layers and of the language model's.

    Policies are those of :mod:`activation_policies`, or "every N". All give the same gradients.
    They act in training only, and through the layers' own checkpointing, so they are safe under
    ZeRO-3 and may be compiled.

    Args:
        by_operation: Tell of each operation of a "full" layer that it is computed again. For
            layers that are compiled and multiply in fp8: torch 2.11's compiler keeps what matrix
            products inside of an autograd.Function give, unless it is told of each.

    Raises:
        ValueError: there is no such policy.
    """
    for part, asked in (("tower", tower), ("language", language)):
        check_policy(part, asked)
    layers: dict[bool, list[CheckpointedLayer]] = {True: [], False: []}
    for layer in checkpointed_layers(model):
        layers[isinstance(layer, GLMBlock)].append(layer)
    for is_language, name in ((False, tower), (True, language)):
        policies = policies_of_layers(name, len(layers[is_language]))
        for layer, policy in zip(layers[is_language], policies, strict=True):
            _set_policy(layer, policy, by_operation)


def checkpointed_layers(model: nn.Module) -> Iterator[CheckpointedLayer]:
    """The layers of vision tower and language model, whatever the model is wrapped in."""
    return (module for module in model.modules() if isinstance(module, CheckpointedLayer))


def _set_policy(layer: CheckpointedLayer, policy: Policy, by_operation: bool) -> None:
    layer.gradient_checkpointing = policy.name != "none"
    # The layers draw no random numbers, so none have to be put back; but for LoRA's dropout.
    draws = any(isinstance(inner, nn.Dropout) and inner.p > 0 for inner in layer.modules())
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
    if policy.widest_linear is not None:
        width = _width(layer)
        keep = _keep(policy.widest_linear * width, narrowest_input=width // 4)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep)
    elif by_operation and policy.name != "none":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_nothing)
    layer._gradient_checkpointing_func = partial(checkpoint, **options)


def _width(layer: CheckpointedLayer) -> int:
    attention: Any = layer.self_attention if isinstance(layer, GLMBlock) else layer.attention
    return attention.dense.out_features  # not from a weight, which may be sharded


def _keep(widest: float, narrowest_input: int) -> Callable[..., CheckpointPolicy]:
    """Keep attention outputs, and those of linear layers that have at most ``widest`` channels."""

    def policy(_context, operator, *arguments, **_options) -> CheckpointPolicy:
        if "scaled_dot_product" in str(operator) or "flash_attn" in str(operator):
            return CheckpointPolicy.MUST_SAVE
        if operator in _LINEARS:
            into, out = arguments[_LINEARS[operator]].shape
            # What LoRA adds comes from few channels and is cheaper to compute than to keep.
            if out <= widest and into >= narrowest_input:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _keep_nothing(_context, _operator, *_arguments, **_options) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE
