"""Compiles layers one by one: their norms, rotations and activations become few kernels.

Under ZeRO-3 this helps only if the hooks that gather weights are outside of compiled code: each
layer is gathered as a whole (:mod:`deepspeed.gather`), and DeepSpeed must leave ``F.linear`` alone
(:mod:`deepspeed.config`), because its own one asks every weight for its number, and each layer
would be compiled anew.
"""

import torch
from torch import nn

from .activation_checkpointing import checkpointed_layers


def compile_layers(model: nn.Module) -> None:
    """Compile every layer of the model, recomputation included. Call it after the policy is set
    and adapters are in.

    The layers of a tower share their compiled code. A first new length of rows compiles once more,
    for any length.
    """
    for layer in checkpointed_layers(model):
        # Not layer.compile(), which would take the layer's hooks in.
        layer.forward = torch.compile(layer.forward)  # type: ignore[method-assign]
