"""Layers of a model that is only read, on a GPU, whose element-wise steps are one kernel each.

In training these are compiled. Answers compile only the steps after the first token, for compiling
what reads the prompt would take longer than most runs do.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from ..remote.modeling_chatglm import SelfAttention
from ..remote.visual import TransformerLayer

DTYPES = (torch.bfloat16, torch.float16)


class ReadTowerLayer(TransformerLayer):
    """Normalises and adds in one step."""

    def layer_forward(self, x_NTV: Tensor, *kept_weights: list[Tensor]) -> Tensor:
        if not _takes(x_NTV) or x_NTV.dtype != self.input_layernorm.weight.dtype:
            return super().layer_forward(x_NTV, *kept_weights)
        from .reading_triton import add_norm  # takes Triton

        x_NTV = add_norm(x_NTV, self.input_layernorm, self.attention(x_NTV, *kept_weights))
        return add_norm(x_NTV, self.post_attention_layernorm, self.mlp(x_NTV))


class ReadSelfAttention(SelfAttention):
    """Rotates queries and keys where they are."""

    def rotate(self, heads_BRHC: Tensor, cos: Tensor, sin: Tensor) -> Any:
        if not _takes(heads_BRHC) or not heads_BRHC.is_contiguous():
            return super().rotate(heads_BRHC, cos, sin)
        from .reading_triton import rotate  # takes Triton

        queries, groups, _ = self.split_sizes
        rotate(heads_BRHC, queries + groups, cos, sin)
        return heads_BRHC.split(self.split_sizes, dim=2)


def _takes(x: Tensor) -> bool:
    """Compilers make such kernels themselves, and see what they are made of."""
    is_eager = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    # Under autocast a norm's output is fp32.
    return is_eager and x.is_cuda and x.dtype in DTYPES and not torch.is_autocast_enabled("cuda")


def read_only(model: nn.Module) -> None:
    """Have the layers of a model that no gradient reaches compute so, where Triton is there. Their
    classes change, no weight does."""
    if importlib.util.find_spec("triton") is None:
        return
    for module in model.modules():
        if type(module) is TransformerLayer:
            module.__class__ = ReadTowerLayer
        elif type(module) is SelfAttention:
            module.__class__ = ReadSelfAttention
