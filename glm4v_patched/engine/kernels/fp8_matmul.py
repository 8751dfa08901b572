"""Numbers of fp8 (e4m3) with a scale for each row, and their products."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, pad

from .e4m3 import E4M3, LARGEST, SMALLEST

# cuBLAS has no kernel for fewer rows of more channels (CUBLAS_STATUS_NOT_SUPPORTED; on Hopper 256
# rows of 9,216 are too few and 257 are not, and 127 of 3,072 are enough: issue 4582 of pytorch/ao).
FEWEST_WIDE_ROWS, WIDEST_OF_FEW = 272, 3072  # rows: 257, up to the next multiple of 16


class Quantized(NamedTuple):
    """What a layer of a model that is only read is given in the place of ``(..., channels)`` in
    bf16: numbers in e4m3, and the scales in fp32 that give it back, ``(..., 1)``, or of groups of
    channels ``(..., groups)``."""

    numbers: Tensor
    scale: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def reshape(self, *shape: int) -> "Quantized":
        groups = self.scale.shape[-1]
        return Quantized(self.numbers.reshape(*shape), self.scale.reshape(*shape[:-1], groups))


def quantize_rows(x: Tensor | Quantized) -> tuple[Tensor, Tensor]:
    """Return ``x`` of ``(rows, channels)`` in e4m3, contiguous, and the scales ``(rows, 1)`` in
    fp32 that give it back. NaN and infinity make their row NaN."""
    if isinstance(x, Quantized):
        return x
    if x.is_cuda and not torch.compiler.is_compiling():
        from . import fp8_triton  # takes Triton

        return fp8_triton.quantize_rows(x)
    largest = x.abs().amax(-1, keepdim=True).float().clamp(min=SMALLEST)
    # By a product: its rounding is far below that of e4m3, so nothing rounds beyond the largest.
    quantized = (x.float() * (LARGEST / largest)).to(E4M3)
    return quantized.contiguous(), largest / LARGEST


def gelu_and_quantize_rows(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """GELU of ``x + bias``, in e4m3 with a scale for each row. It has no gradient.

    Of rows as wide as the tower's (15,360) torch.compile computes GELU twice, once for a row's
    scale and once to quantize it. The kernel has a whole row at hand, and reads and writes it once.

    Args:
        x: ``(T, C)``, of a product.
        bias: ``(C,)``.

    Returns:
        As :func:`quantize_rows`: ``(T, C)`` and ``(T, 1)``.
    """
    # Outside of compilers the operator's dispatch would take longer than the kernel.
    is_kernel = x.is_cuda and not torch.compiler.is_compiling()
    return (_gelu_by_kernel if is_kernel else _gelu)(x, bias)


# So that compilers call it as it is.
@torch.library.custom_op("glm4v_patched::gelu_and_quantize_rows", mutates_args=())
def _gelu(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_rows(gelu(x.float() + bias.float()))


@_gelu.register_fake
def _(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=E4M3), x.new_empty(len(x), 1, dtype=torch.float32)


def _gelu_by_kernel(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    from . import fp8_triton  # takes Triton

    return fp8_triton.quantize_rows(x, bias, "gelu")


@_gelu.register_kernel("cuda")
def _(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return _gelu_by_kernel(x, bias)


def product(
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """bf16 ``(T, N)`` of two quantized tensors ``(T, K)`` and ``(N, K)``, with scales ``(T, 1)``
    and ``(N, 1)``, and a bias ``(N,)``."""
    rows, width = left.shape
    if not rows:
        return left_scale.new_empty(0, len(right), dtype=torch.bfloat16)
    if rows < FEWEST_WIDE_ROWS and width > WIDEST_OF_FEW:
        filling = 0, 0, 0, FEWEST_WIDE_ROWS - rows
        numbers = pad(left.view(torch.uint8), filling).view(E4M3)
        return product(numbers, pad(left_scale, filling), right, right_scale, bias)[:rows]
    if left.is_cpu:  # in tests; torch 2.11 takes one scale for all there
        one = left_scale.new_ones(())
        sums = torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.float32)
        return _rounded(sums, left_scale, right_scale, bias)
    return torch._scaled_mm(
        left,
        right.t(),  # the layout that the GPU takes: channels of a row side by side in both
        scale_a=left_scale,
        scale_b=right_scale.t(),
        bias=None if bias is None else bias.bfloat16(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _rounded(sums: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None) -> Tensor:
    scaled = sums * (left_scale * right_scale.t())
    return (scaled if bias is None else scaled + bias.float()).bfloat16()
