"""FlashAttention-3's forward pass in a frozen vision tower.

FlashAttention-3 needs a Hopper GPU and the package ``fa3-fwd`` (``pip install
"glm4v-patched[fa3]"``). Unlike torch's kernels, it does not pad the tower's heads from 112 channels
to 128, and it rounds no more than bf16 does. The package has no backward pass, which a frozen tower
does not need.
"""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...remote.visual import Attention
from ...terminal_text import pip_install

# Shapes: N images, T tower tokens, V hidden size of the tower, H heads, C channels of a head.

PACKAGE = "fa3_fwd_interface"
HOPPER = (9, 0)
# On random bf16 inputs, torch's own kernels have a relative error of 0.0023, a wrong one about 1.
MAX_RELATIVE_ERROR = 0.01


class FrozenTowerAttention(Attention):
    """Attention of a vision tower that receives no gradient."""

    def forward(self, x_NTV: Tensor, attention_collector: list[Tensor] | None = None) -> Tensor:
        needs_output_only = attention_collector is None and not x_NTV.requires_grad
        if not (needs_output_only and x_NTV.is_cuda and x_NTV.dtype == torch.bfloat16):
            return super().forward(x_NTV, attention_collector)
        qkv = self.query_key_value(x_NTV).unflatten(-1, (3, self.num_heads, -1))
        attend = _flash_attention_op if torch.compiler.is_compiling() else _flash_attention
        return self.dense(attend(*qkv.unbind(2)).flatten(2))


@functools.cache
def find_fa3_problem(head_dim: int = 112) -> str | None:
    """Return why FlashAttention-3 cannot be used with heads of ``head_dim`` channels, or None.

    The check runs the kernel and compares it with torch's attention, so its result is cached.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        return f"fa3-fwd is not installed: {pip_install('fa3-fwd')}"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER:
        return "FlashAttention-3 needs a Hopper GPU"
    generator = torch.Generator("cuda").manual_seed(0)
    factory: dict[str, Any] = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    query, key, value = torch.randn(1, 257, 3, 2, head_dim, **factory).unbind(2)
    try:
        output = _flash_attention(query, key, value)
    except (ImportError, RuntimeError, TypeError, AttributeError) as error:
        return f"fa3-fwd fails here ({str(error).partition(chr(10))[0][:200]})"
    inputs = [tensor.transpose(1, 2).float() for tensor in (query, key, value)]
    exact = scaled_dot_product_attention(inputs[0], inputs[1], inputs[2]).transpose(1, 2)
    relative_error = ((output.float() - exact).norm() / exact.norm()).item()
    if not relative_error < MAX_RELATIVE_ERROR:
        return (
            f"its relative error on this GPU is {relative_error:.3g}; expected at most "
            f"{MAX_RELATIVE_ERROR}"
        )
    return None


def _flash_attention(query_NTHC: Tensor, key_NTHC: Tensor, value_NTHC: Tensor) -> Tensor:
    from fa3_fwd_interface import flash_attn_func

    out = flash_attn_func(query_NTHC, key_NTHC, value_NTHC)
    return out[0] if isinstance(out, tuple) else out


# torch.compile cannot trace the package's function, but it calls a custom operator as it is.
@torch.library.custom_op("glm4v_patched::flash_attention_3", mutates_args=(), device_types="cuda")
def _flash_attention_op(query_NTHC: Tensor, key_NTHC: Tensor, value_NTHC: Tensor) -> Tensor:
    return _flash_attention(query_NTHC, key_NTHC, value_NTHC)


@_flash_attention_op.register_fake
def _(query_NTHC: Tensor, key_NTHC: Tensor, value_NTHC: Tensor) -> Tensor:
    return query_NTHC.new_empty(query_NTHC.shape)
