"""Apply activation checkpointing policies to layers, and compile layers."""

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
from .activation_policies import Policy, policies_of_layers

# Operators of linear layers, each with the index of its argument for the weight [in, out].
_LINEAR_OPERATORS = {torch.ops.aten.mm.default: -1, torch.ops.aten.addmm.default: -1}
if hasattr(torch.ops.aten, "_scaled_mm"):  # for fp8; require_fp8 checks that it exists
    _LINEAR_OPERATORS[torch.ops.aten._scaled_mm.default] = 1


def checkpoint_layers(
    model: nn.Module,
    tower: str = "full",
    language: str = "full",
    marks_every_operator: bool = False,
) -> None:
    """Set the checkpointing policy of each layer of the vision tower and of the language model.

    All policies give the same gradients. The layers themselves apply their policies, in training
    only, so policies work under ZeRO-3 and with compiled layers.

    Args:
        tower, language: A name of :data:`activation_policies.POLICIES`, or "every N".
        marks_every_operator: Whether each operator of a "full" layer is marked as recomputed.
            Compiled layers in fp8 need this: without it, torch 2.11's compiler saves the outputs of
            matrix products inside an ``autograd.Function``.
    """
    layers = list(transformer_layers(model))
    for policy_name, is_language in ((tower, False), (language, True)):
        part_layers = [layer for layer in layers if isinstance(layer, GLMBlock) is is_language]
        policies = policies_of_layers(policy_name, len(part_layers))
        for layer, policy in zip(part_layers, policies, strict=True):
            _set_policy(layer, policy, marks_every_operator)


def transformer_layers(model: nn.Module) -> Iterator[CheckpointedLayer]:
    """Yield the layers of vision tower and language model, whatever the model is wrapped in."""
    return (module for module in model.modules() if isinstance(module, CheckpointedLayer))


def compile_layers(model: nn.Module) -> None:
    """Compile every layer with torch.compile, including the recomputation.

    This fuses norms, rotary embeddings and activation functions into few kernels. Call it after
    the policies are set and adapters are in place.

    Layers of one class share compiled code. torch compiles them once for the first sequence, and
    once more, for any length, when a sequence has another length. Under ZeRO-3, the hooks that
    gather weights must stay outside compiled code. So ZeRO-3 gathers whole layers, and DeepSpeed
    must not replace ``F.linear``.
    """
    for layer in transformer_layers(model):
        # Not layer.compile(), which would compile the layer's hooks, too.
        layer.forward = torch.compile(layer.forward)  # type: ignore[method-assign]


def _set_policy(layer: CheckpointedLayer, policy: Policy, marks_every_operator: bool) -> None:
    layer.gradient_checkpointing = policy.name != "none"
    # Only LoRA's dropout uses random numbers, so save the RNG state only if there is dropout.
    has_dropout = any(isinstance(inner, nn.Dropout) and inner.p > 0 for inner in layer.modules())
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": has_dropout}
    policy_fn = None
    if policy.max_saved_width is not None:
        attention: Any = layer.self_attention if isinstance(layer, GLMBlock) else layer.attention
        hidden = attention.dense.out_features  # not from a weight, which may be sharded
        policy_fn = _save_linear_outputs(policy.max_saved_width * hidden, hidden // 4)
    elif marks_every_operator and policy.name != "none":
        policy_fn = _recompute_all
    if policy_fn is not None:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy_fn)
    layer._gradient_checkpointing_func = partial(checkpoint, **options)


def _save_linear_outputs(max_out: float, min_in: int) -> Callable[..., CheckpointPolicy]:
    """Return a ``policy_fn`` that saves the outputs of attention, and of linear layers with at most
    ``max_out`` output channels and at least ``min_in`` input channels."""

    def select(_context, operator, *arguments, **_options) -> CheckpointPolicy:
        if "scaled_dot_product" in str(operator) or "flash_attn" in str(operator):
            return CheckpointPolicy.MUST_SAVE
        if operator in _LINEAR_OPERATORS:
            in_channels, out_channels = arguments[_LINEAR_OPERATORS[operator]].shape
            # min_in excludes LoRA's second factor, whose output is cheap to recompute.
            if out_channels <= max_out and in_channels >= min_in:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return select


def _recompute_all(_context, _operator, *_arguments, **_options) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE
