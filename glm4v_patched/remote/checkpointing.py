"""Activation checkpointing that survives ZeRO-3. Knows nothing of this model.

What goes wrong without it, with DeepSpeed ZeRO-3, frozen weights and non-reentrant checkpoints:

1. The backward pass recomputes a layer; ZeRO-3's forward hooks fire again and, when a submodule is
   done, partition its parameters in place: ``param.data`` becomes an empty tensor.
2. torch keeps what autograd saves during the recomputation. A trainable parameter is kept detached,
   an alias that still holds the gathered storage; a frozen one is kept as the live object.
3. So when torch compares what was saved with the first forward, frozen parameters have shape [0]:
   "Recomputed values for the following tensors have different metadata".

The cure: a layer's frozen parameters stay gathered from its recomputation to the end of its own
backward. ZeRO-3 does not partition a parameter that some submodule still uses, so a token among
those users (``ds_active_sub_modules``) holds it; DeepSpeed's own hook after the submodule's
backward partitions it. Nothing is gathered twice, and torch's comparison stays on.

Newer DeepSpeed (0.19.3) holds such parameters itself, for the module whose backward is under way,
which may be far outside of the layer; that attribution is undone here, as it is not needed.
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

# A user that is no module: module ids are non-negative.
_HOLDER = -1


class _PlainSubclasses:
    """Keeps ``GradientCheckpointingLayer`` (transformers 5.23) from wrapping our ``forward``."""

    def __init_subclass__(cls, **kwargs):
        pass


class CheckpointedLayer(_PlainSubclasses, GradientCheckpointingLayer):
    """A layer that recomputes its activations in backward when checkpointing is enabled.

    Subclasses define ``layer_forward(hidden, *rest)``. The checkpointing function receives a bound
    method, so that frameworks find the layer as its ``__self__``, and the hidden states first.

    It is a ``GradientCheckpointingLayer`` because transformers counts those for
    ``every_n_layers``; that class's own wrapping (of ``__call__``, from 5.23 on of ``forward``)
    hands over a partial that is bound to nothing, so neither is used.
    """

    gradient_checkpointing = False
    _gradient_checkpointing_func: Callable  # set by transformers

    def __call__(self, hidden, *rest):
        learns = self.training and torch.is_grad_enabled()
        if learns and not hidden.requires_grad and any(p.requires_grad for p in self.parameters()):
            # Reentrant checkpoints differentiate only through inputs that require grad, and
            # ZeRO-3 releases a layer in the backward of its input. Before the layer's own hooks,
            # for where it is gathered as a whole (a leaf module) they are what releases it.
            hidden = hidden.detach().requires_grad_()
        return nn.Module.__call__(self, hidden, *rest)

    def layer_forward(self, hidden, *rest):
        raise NotImplementedError

    def forward(self, hidden, *rest):
        recomputes = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        # An input without grad: nothing is kept, nothing to recompute.
        if not (recomputes and hidden.requires_grad):
            return self.layer_forward(hidden, *rest)
        return self._gradient_checkpointing_func(self.recomputable_forward, hidden, *rest)

    def recomputable_forward(self, hidden, *rest):
        """``layer_forward``, safe to run a second time inside a backward pass."""
        if torch.compiler.is_compiling():
            # A compiled layer recomputes within its own backward, where no hook releases anything.
            return self.layer_forward(hidden, *rest)
        with keep_frozen_parameters_gathered(self):
            return self.layer_forward(hidden, *rest)


@contextmanager
def keep_frozen_parameters_gathered(layer: nn.Module):
    """Keep the frozen ZeRO-3 parameters of ``layer`` gathered after a recomputation in backward."""
    modules = list(layer.modules()) if _in_backward() else []
    owners = _frozen_zero3_parameters(modules)
    for parameter in owners:
        parameter.ds_active_sub_modules.add(_HOLDER)
    try:
        yield
    finally:
        for parameter, module_ids in owners.items():
            # Also drops the modules outside this layer that DeepSpeed 0.19.3 and newer entered.
            parameter.ds_active_sub_modules.intersection_update(module_ids)
        if owners:
            for module in modules:
                getattr(module, "ds_recompute_parameters", set()).clear()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _frozen_zero3_parameters(modules: list[nn.Module]) -> dict[Any, set[int]]:
    """Their frozen ZeRO-3 parameters, each with the ids of the modules that own it."""
    owners: dict[Any, set[int]] = {}  # parameters, with the attributes that DeepSpeed adds
    for module in modules:
        if not hasattr(module, "ds_id"):
            continue  # inside of a leaf module, which is gathered and released from outside
        # Not module.parameters() or attributes: DeepSpeed's getters gather what is asked for.
        for parameter in module._parameters.values():
            if parameter is None or parameter.requires_grad:
                continue
            if hasattr(parameter, "ds_active_sub_modules"):
                owners.setdefault(parameter, set()).add(cast(int, module.ds_id))
    return owners
