"""Activation checkpointing that works under ZeRO-3 with frozen weights, for any model.

The problem with DeepSpeed ZeRO-3, frozen weights and non-reentrant checkpoints:

1. Backward recomputes a layer. ZeRO-3's forward hooks run again and partition the parameters of
   each finished submodule in place: ``param.data`` becomes an empty tensor.
2. Autograd saves tensors during the recomputation. It saves a trainable parameter as a detached
   alias, which keeps the gathered storage, but a frozen parameter as the parameter itself.
3. torch compares the saved tensors with those of the first forward and finds frozen parameters of
   shape [0]: "Recomputed values for the following tensors have different metadata".

The solution: a layer's frozen parameters stay gathered from the recomputation to the end of the
layer's backward. ZeRO-3 does not partition a parameter while its ``ds_active_sub_modules``, the set
of ids of the submodules that use it, is not empty. So during the recomputation this code adds an id
that no submodule has. DeepSpeed's own hook after the submodule's backward partitions the parameter.

DeepSpeed 0.19.3 and newer also keep these parameters gathered, but for longer: until the end of the
backward of an outer module. An outer module may contain many layers, so this code removes the ids
that DeepSpeed adds.
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

# No module has this id, because DeepSpeed's ids are not negative.
_KEEP_GATHERED_ID = -1


class _NoForwardWrapping:
    """Base that keeps ``GradientCheckpointingLayer`` from wrapping our ``forward``.

    Since transformers 5.23, that class's ``__init_subclass__`` wraps it.
    """

    def __init_subclass__(cls, **kwargs):
        pass


class CheckpointedLayer(_NoForwardWrapping, GradientCheckpointingLayer):
    """A layer that recomputes its activations in backward when checkpointing is enabled.

    Subclasses define ``layer_forward(hidden, *rest)``. The checkpointing function gets a bound
    method, ``hidden`` and ``*rest``. Some frameworks read the layer from the method's ``__self__``.

    The base class is ``GradientCheckpointingLayer``, because transformers counts its instances for
    ``every_n_layers``. That class wraps ``__call__`` (since 5.23 ``forward``) and passes a partial
    instead of a bound method, so this class bypasses the wrapper.
    """

    gradient_checkpointing = False
    _gradient_checkpointing_func: Callable  # set by transformers

    def __call__(self, hidden, *rest):
        is_training = self.training and torch.is_grad_enabled()
        if (
            is_training
            and not hidden.requires_grad
            and any(p.requires_grad for p in self.parameters())
        ):
            # The input has to require grad: reentrant checkpoints have gradients only through such
            # inputs, and ZeRO-3 partitions a layer's parameters in the backward of its input. This
            # comes before nn.Module.__call__, because ZeRO-3's hooks there see the input.
            hidden = hidden.detach().requires_grad_()
        return nn.Module.__call__(self, hidden, *rest)

    def layer_forward(self, hidden, *rest):
        """Compute the layer; subclasses define this method."""
        raise NotImplementedError

    def forward(self, hidden, *rest):
        """Run :meth:`layer_forward`, under checkpointing if that is enabled in training."""
        recomputes = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        # In training, __call__ has made the input require grad if any parameter does. So without
        # an input that requires grad there is no backward.
        if not (recomputes and hidden.requires_grad):
            return self.layer_forward(hidden, *rest)
        return self._gradient_checkpointing_func(self.recomputable_forward, hidden, *rest)

    def recomputable_forward(self, hidden, *rest):
        """Run :meth:`layer_forward` so that backward may recompute it."""
        if torch.compiler.is_compiling():
            # A compiled layer recomputes inside its own backward, where no hook partitions weights.
            return self.layer_forward(hidden, *rest)
        with keep_frozen_parameters_gathered(self):
            return self.layer_forward(hidden, *rest)


@contextmanager
def keep_frozen_parameters_gathered(layer: nn.Module):
    """Keep a layer's frozen ZeRO-3 parameters gathered after its recomputation in backward."""
    modules = list(layer.modules()) if _in_backward() else []
    owner_ids = _map_frozen_zero3_parameters(modules)
    for parameter in owner_ids:
        parameter.ds_active_sub_modules.add(_KEEP_GATHERED_ID)
    try:
        yield
    finally:
        for parameter, module_ids in owner_ids.items():
            # Remove our id, and the ids of outer modules that DeepSpeed 0.19.3 and newer add.
            parameter.ds_active_sub_modules.intersection_update(module_ids)
        if owner_ids:
            for module in modules:
                getattr(module, "ds_recompute_parameters", set()).clear()


def _in_backward() -> bool:
    """Return whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def _map_frozen_zero3_parameters(modules: list[nn.Module]) -> dict[Any, set[int]]:
    """Map each frozen ZeRO-3 parameter of the modules to the ids of the modules that own it."""
    owner_ids: dict[Any, set[int]] = {}  # Any, because DeepSpeed adds attributes to parameters
    for module in modules:
        if not hasattr(module, "ds_id"):
            continue  # part of a leaf module of ZeRO-3, which is gathered as a unit
        # Attributes and module.parameters() would make DeepSpeed gather parameters.
        for parameter in module._parameters.values():
            if parameter is None or parameter.requires_grad:
                continue
            if hasattr(parameter, "ds_active_sub_modules"):
                owner_ids.setdefault(parameter, set()).add(cast(int, module.ds_id))
    return owner_ids
