"""Which activations layers keep for their backward pass, and which they compute again."""

from collections.abc import Callable, Iterator
from functools import partial
from math import inf

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..remote.checkpointing import CheckpointedLayer
from ..remote.modeling_chatglm import GLMBlock
from .options import check_policy

_LINEARS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def checkpoint_layers(model: nn.Module, tower: str = "full", language: str = "full") -> None:
    """Set the policy of the vision tower's layers and of the language model's.

    A policy is one of

    - ``none``: all activations are kept, that is what autograd or the compiler asks for;
    - ``linear``: kept are a layer's input and what attention and every linear layer give: norms,
      rotations and activation functions are computed again;
    - ``selective``: kept are a layer's input, the attention's output, and what linear layers give
      that is no wider than a layer (query, key and value of the language model, both towers'
      ``dense``, the tower's ``fc2``): the inside of the MLPs is computed again;
    - ``attention``: kept are a layer's input and the attention's output;
    - ``full``: kept is a layer's input;
    - ``every N``: every Nth layer, from the first, is ``full``, the others ``none``.

    All give the same gradients. They act in training only, and through the layers' own
    checkpointing, so they are safe under ZeRO-3 and may be compiled.
    """
    for name, policy in (("tower", tower), ("language", language)):
        check_policy(name, policy)
    layers = {GLMBlock: [], CheckpointedLayer: []}
    for layer in checkpointed_layers(model):
        layers[GLMBlock if isinstance(layer, GLMBlock) else CheckpointedLayer].append(layer)
    for of_tower, policy in ((layers[CheckpointedLayer], tower), (layers[GLMBlock], language)):
        every = int(policy.split()[1]) if policy.startswith("every ") else 1
        for index, layer in enumerate(of_tower):
            _set_policy(layer, policy if index % every == 0 else "none")


def checkpointed_layers(model: nn.Module) -> Iterator[CheckpointedLayer]:
    """The layers of both towers, whatever the model is wrapped in."""
    return (module for module in model.modules() if isinstance(module, CheckpointedLayer))


def _set_policy(layer: CheckpointedLayer, policy: str) -> None:
    layer.gradient_checkpointing = policy != "none"
    # The layers draw no random numbers, so none have to be put back.
    options = {"use_reentrant": False, "preserve_rng_state": False}
    if policy in ("linear", "selective", "attention"):
        width = _width(layer)
        widest = {"linear": inf, "selective": 1.25 * width, "attention": 0}[policy]
        keep = _keep(widest, narrowest_input=width // 4)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep)
    layer._gradient_checkpointing_func = partial(checkpoint, **options)


def _width(layer: CheckpointedLayer) -> int:
    attention = layer.self_attention if isinstance(layer, GLMBlock) else layer.attention
    return attention.dense.out_features  # not from a weight, which may be sharded


def _keep(widest: float, narrowest_input: int) -> Callable[..., CheckpointPolicy]:
    """Keep attention outputs, and those of linear layers that have at most ``widest`` channels."""

    def policy(_context, operator, *arguments, **_options) -> CheckpointPolicy:
        if "scaled_dot_product" in str(operator) or "flash_attn" in str(operator):
            return CheckpointPolicy.MUST_SAVE
        if operator in _LINEARS:
            into, out = arguments[-1].shape
            # What LoRA adds comes from few channels and is cheaper to compute than to keep.
            if out <= widest and into >= narrowest_input:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy
