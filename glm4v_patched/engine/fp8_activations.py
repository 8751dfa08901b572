"""GELU of a frozen vision tower, and SwiGLU of a model that is only read, which hand on their
output quantised.

Of rows as wide as the tower's (15,360) torch.compile computes GELU twice, once for a row's scale
and once to quantise it. The kernel here has a whole row at hand, and reads and writes it once.
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from .fp8_numbers import quantise_rows


def quantise_rows_of_gelu(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """GELU of ``x + bias``, in e4m3 with a scale for each row. It has no gradient.

    Args:
        x: ``(T, C)``, of a product.
        bias: ``(C,)``.

    Returns:
        As :func:`fp8_numbers.quantise_rows`: ``(T, C)`` and ``(T, 1)``.
    """
    if x.is_cuda and not torch.compiler.is_compiling():
        from . import fp8_triton  # takes Triton

        return fp8_triton.quantise_rows_of_gelu(x, bias)
    return _quantise_rows_of_gelu(x, bias)


# An operator, so that compilers call it as it is; without one, its dispatch would take longer than
# the kernel.
@torch.library.custom_op("glm4v_patched::quantise_rows_of_gelu", mutates_args=())
def _quantise_rows_of_gelu(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return quantise_rows(gelu(x.float() + bias.float()))


@_quantise_rows_of_gelu.register_fake
def _(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(
        len(x), 1, dtype=torch.float32
    )


@_quantise_rows_of_gelu.register_kernel("cuda")
def _(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    from . import fp8_triton  # takes Triton

    return fp8_triton.quantise_rows_of_gelu(x, bias)


def quantise_rows_of_swiglu(x: Tensor) -> tuple[Tensor, Tensor]:
    """SiLU of the first half of the channels times the second, in e4m3 with a scale for each row.
    It has no gradient. Compilers make three kernels of it where rows are few.

    Args:
        x: ``(T, 2 * C)``.

    Returns:
        As :func:`fp8_numbers.quantise_rows`: ``(T, C)`` and ``(T, 1)``.
    """
    if x.is_cuda and not torch.compiler.is_compiling():
        from . import fp8_triton  # takes Triton

        return fp8_triton.quantise_rows_of_swiglu(x)
    return _quantise_rows_of_swiglu(x)


@torch.library.custom_op("glm4v_patched::quantise_rows_of_swiglu", mutates_args=())
def _quantise_rows_of_swiglu(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.float().chunk(2, dim=-1)
    return quantise_rows(silu(gate) * up)


@_quantise_rows_of_swiglu.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    numbers = x.new_empty(len(x), x.shape[1] // 2, dtype=torch.float8_e4m3fn)
    return numbers, x.new_empty(len(x), 1, dtype=torch.float32)


@_quantise_rows_of_swiglu.register_kernel("cuda")
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    from . import fp8_triton  # takes Triton

    return fp8_triton.quantise_rows_of_swiglu(x)
