"""FlashAttention-3's forward pass in the frozen vision tower, on Hopper GPUs, where ``fa3-fwd`` is
installed (``pip install "glm4v-patched[fa3]"``).

It takes the tower's heads of 112 channels as they are, which torch's kernels fill up to 128, and
adds no rounding beyond that of bf16. It has no backward pass, which a frozen tower does not need.
"""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...remote.visual import Attention
from ...terminal_text import pip_install

PACKAGE = "fa3_fwd_interface"
HOPPER = (9, 0)
# Relative, of random bf16 numbers; that of torch's own kernels is 0.0023, of a wrong kernel 1.
LARGEST_ERROR = 0.01


class FrozenTowerAttention(Attention):
    """Of a tower that no gradient reaches."""

    def forward(self, x_NTV: Tensor, attention_collector: list[Tensor] | None = None) -> Tensor:
        is_read_only = attention_collector is None and not x_NTV.requires_grad
        if not (is_read_only and x_NTV.is_cuda and x_NTV.dtype == torch.bfloat16):
            return super().forward(x_NTV, attention_collector)
        fused = self.query_key_value(x_NTV).unflatten(-1, (3, self.num_heads, -1))
        attend = _as_operator if torch.compiler.is_compiling() else _attend
        return self.dense(attend(*fused.unbind(2)).flatten(2))


@functools.cache
def fault(channels: int = 112) -> str | None:
    """Why it is not used here with heads of so many channels, or None; it is compared with torch's
    attention once a process."""
    if importlib.util.find_spec(PACKAGE) is None:
        return f"fa3-fwd is not installed: {pip_install('fa3-fwd')}"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER:
        return "FlashAttention-3 is for Hopper GPUs"
    generator = torch.Generator("cuda").manual_seed(0)
    made: dict[str, Any] = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    query, key, value = torch.randn(1, 257, 3, 2, channels, **made).unbind(2)
    try:
        found = _attend(query, key, value)
    except (ImportError, RuntimeError, TypeError, AttributeError) as error:
        return f"fa3-fwd fails here ({str(error).partition(chr(10))[0][:200]})"
    wide = [each.transpose(1, 2).float() for each in (query, key, value)]
    exact = scaled_dot_product_attention(wide[0], wide[1], wide[2]).transpose(1, 2)
    wrong = ((found.float() - exact).norm() / exact.norm()).item()
    if not wrong < LARGEST_ERROR:
        return f"its error on this GPU is {wrong:.3g}, where at most {LARGEST_ERROR} is expected"
    return None


def _attend(query_NTHC: Tensor, key_NTHC: Tensor, value_NTHC: Tensor) -> Tensor:
    from fa3_fwd_interface import flash_attn_func

    out = flash_attn_func(query_NTHC, key_NTHC, value_NTHC)
    return out[0] if isinstance(out, tuple) else out


# So that compilers call it as it is; they do not see through the package's function.
@torch.library.custom_op("glm4v_patched::flash_attention_3", mutates_args=(), device_types="cuda")
def _as_operator(query_NTHC: Tensor, key_NTHC: Tensor, value_NTHC: Tensor) -> Tensor:
    return _attend(query_NTHC, key_NTHC, value_NTHC)


@_as_operator.register_fake
def _(query_NTHC: Tensor, key_NTHC: Tensor, value_NTHC: Tensor) -> Tensor:
    return query_NTHC.new_empty(query_NTHC.shape)
