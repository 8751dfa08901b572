"""GELU of a frozen vision tower, and SwiGLU of a model that is only read, which hand on their
output quantised.

Of rows as wide as the tower's (15,360) torch.compile computes GELU twice, once for a row's scale
and once to quantise it. The kernel here has a whole row at hand, and reads and writes it once.
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from .e4m3 import E4M3
from .few_rows import Parts
from .fp8_numbers import quantise_rows


def quantise_rows_of_gelu(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """GELU of ``x + bias``, in e4m3 with a scale for each row. It has no gradient.

    Args:
        x: ``(T, C)``, of a product.
        bias: ``(C,)``.

    Returns:
        As :func:`fp8_numbers.quantise_rows`: ``(T, C)`` and ``(T, 1)``.
    """
    # Outside of compilers the operator's dispatch would take longer than the kernel.
    is_kernel = x.is_cuda and not torch.compiler.is_compiling()
    return (_gelu_by_kernel if is_kernel else _gelu)(x, bias)


# So that compilers call it as it is.
@torch.library.custom_op("glm4v_patched::quantise_rows_of_gelu", mutates_args=())
def _gelu(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return quantise_rows(gelu(x.float() + bias.float()))


@_gelu.register_fake
def _(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=E4M3), x.new_empty(len(x), 1, dtype=torch.float32)


def _gelu_by_kernel(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    from . import fp8_triton  # takes Triton

    return fp8_triton.quantise_rows(x, bias, "gelu")


@_gelu.register_kernel("cuda")
def _(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return _gelu_by_kernel(x, bias)


def quantise_rows_of_swiglu(x: Tensor | Parts, group: int | None = None) -> tuple[Tensor, Tensor]:
    """SiLU of the first half of the channels times the second, in e4m3. It has no gradient.

    Args:
        x: ``(T, 2 * C)``, or a product in parts of such a shape.
        group: Channels that share a scale, all if None. On a GPU, where several blocks compute a
            row then; the last group may have less.

    Returns:
        As :func:`fp8_numbers.quantise_rows`: ``(T, C)`` and ``(T, 1)`` or ``(T, groups)``.
    """
    if isinstance(x, Parts) or x.is_cuda:
        from . import fp8_triton  # takes Triton

        return fp8_triton.quantise_rows(x, None, "swiglu", group)
    gate, up = x.float().chunk(2, dim=-1)
    return quantise_rows(silu(gate) * up)
