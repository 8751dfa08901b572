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

    Policies are those of :mod:`activation_policies`, or "every N"; ``ValueError`` if there is no
    such. All give the same gradients. They act in training only, and through the layers' own
    checkpointing, so they are safe under ZeRO-3 and may be compiled.

    Args:
        by_operation: Tell of each operation of a "full" layer that it is computed again. For
            layers that are compiled and multiply in fp8: torch 2.11's compiler keeps what matrix
            products inside of an autograd.Function give, unless it is told of each.
    """
    layers = list(checkpointed_layers(model))
    for part, asked, kind in (("tower", tower, False), ("language", language, True)):
        check_policy(part, asked)
        of_part = [layer for layer in layers if isinstance(layer, GLMBlock) is kind]
        for layer, policy in zip(of_part, policies_of_layers(asked, len(of_part)), strict=True):
            _set_policy(layer, policy, by_operation)


def checkpointed_layers(model: nn.Module) -> Iterator[CheckpointedLayer]:
    """The layers of vision tower and language model, whatever the model is wrapped in."""
    return (module for module in model.modules() if isinstance(module, CheckpointedLayer))


def compile_layers(model: nn.Module) -> None:
    """Compile every layer of the model, recomputation included: its norms, rotations and
    activations become few kernels. Call it after the policy is set and adapters are in.

    The layers of a tower share their compiled code; a first new length of rows compiles once more,
    for any length. Under ZeRO-3 it helps only if the hooks that gather weights are outside of
    compiled code: layers are gathered as wholes, and DeepSpeed leaves ``F.linear`` alone.
    """
    for layer in checkpointed_layers(model):
        # Not layer.compile(), which would take the layer's hooks in.
        layer.forward = torch.compile(layer.forward)  # type: ignore[method-assign]


def _set_policy(layer: CheckpointedLayer, policy: Policy, by_operation: bool) -> None:
    layer.gradient_checkpointing = policy.name != "none"
    # The layers draw no random numbers, so none have to be put back; but for LoRA's dropout.
    draws = any(isinstance(inner, nn.Dropout) and inner.p > 0 for inner in layer.modules())
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
    keep = None
    if policy.widest_linear is not None:
        attention: Any = layer.self_attention if isinstance(layer, GLMBlock) else layer.attention
        width = attention.dense.out_features  # not from a weight, which may be sharded
        keep = _keep(policy.widest_linear * width, narrowest_input=width // 4)
    elif by_operation and policy.name != "none":
        keep = _keep_nothing
    if keep is not None:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep)
    layer._gradient_checkpointing_func = partial(checkpoint, **options)


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
