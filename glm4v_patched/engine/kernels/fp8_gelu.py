"""GELU of a frozen vision tower, which hands on its output quantised.

Of rows as wide as the tower's (15,360) torch.compile computes GELU twice, once for a row's scale
and once to quantise it. The kernel here has a whole row at hand, and reads and writes it once.
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu

from .e4m3 import E4M3
from .fp8_matmul import quantise_rows


def quantise_rows_of_gelu(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """GELU of ``x + bias``, in e4m3 with a scale for each row. It has no gradient.

    Args:
        x: ``(T, C)``, of a product.
        bias: ``(C,)``.

    Returns:
        As :func:`fp8_matmul.quantise_rows`: ``(T, C)`` and ``(T, 1)``.
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
