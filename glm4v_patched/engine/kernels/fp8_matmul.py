"""Row-wise quantization to fp8 (e4m3), and products of quantized matrices."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, pad

from .e4m3 import AMAX_FLOOR, E4M3, E4M3_MAX

# cuBLAS has no kernel for a small M with a large K (CUBLAS_STATUS_NOT_SUPPORTED). On Hopper, a K of
# 9,216 needs an M of at least 257; with a K of 3,072, an M of 127 works (issue 4582 of pytorch/ao).
# If K is above MAX_K_SMALL_M, a smaller M is padded to MIN_M_LARGE_K, 257 rounded up to a multiple
# of 16.
MIN_M_LARGE_K, MAX_K_SMALL_M = 272, 3072


class Fp8Tensor(NamedTuple):
    """Activations quantized to e4m3. Inference layers accept it in place of a bf16 tensor."""

    data: Tensor  # (..., channels) e4m3
    scale: Tensor  # (..., 1) fp32, or (..., groups) with one scale for each group of channels

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def reshape(self, *shape: int) -> "Fp8Tensor":
        groups = self.scale.shape[-1]
        return Fp8Tensor(self.data.reshape(*shape), self.scale.reshape(*shape[:-1], groups))


def quantize_rows(x: Tensor | Fp8Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row of ``(rows, channels)`` to e4m3.

    Returns:
        The contiguous quantized tensor ``(rows, channels)``, and the scales ``(rows, 1)`` in fp32.
        Their product approximates ``x``. NaN or infinity makes the whole row NaN. An
        :class:`Fp8Tensor` is returned unchanged.
    """
    if isinstance(x, Fp8Tensor):
        return x
    if x.is_cuda and not torch.compiler.is_compiling():
        from . import fp8_triton  # needs Triton

        return fp8_triton.activate_and_quantize_rows(x)
    amax = x.abs().amax(-1, keepdim=True).float().clamp(min=AMAX_FLOOR)
    # Multiplying by the inverse scale is safe: its rounding error is far below that of e4m3, so no
    # number exceeds E4M3_MAX.
    quantized = (x.float() * (E4M3_MAX / amax)).to(E4M3)
    return quantized.contiguous(), amax / E4M3_MAX


def gelu_and_quantize_rows(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``gelu(x + bias)`` and quantize each row, without a gradient.

    For rows as wide as the tower's (15,360 channels), torch.compile would compute GELU twice: once
    for the scale, and once to quantize. A thread block of the Triton kernel computes a whole row,
    and reads and writes it once.

    Args:
        x: ``(T, C)``, the output of a product without its bias.
        bias: ``(C,)``.

    Returns:
        Quantized rows ``(T, C)`` in e4m3, and their scales ``(T, 1)`` in fp32.
    """
    # In eager mode, dispatching a custom operator would take longer than the kernel itself.
    use_kernel = x.is_cuda and not torch.compiler.is_compiling()
    return (_gelu_kernel if use_kernel else _gelu_op)(x, bias)


# torch.compile does not trace a custom operator; it calls it as it is.
@torch.library.custom_op("glm4v_patched::gelu_and_quantize_rows", mutates_args=())
def _gelu_op(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_rows(gelu(x.float() + bias.float()))


@_gelu_op.register_fake
def _(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=E4M3), x.new_empty(len(x), 1, dtype=torch.float32)


def _gelu_kernel(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    from . import fp8_triton  # needs Triton

    return fp8_triton.activate_and_quantize_rows(x, bias, "gelu")


@_gelu_op.register_kernel("cuda")
def _(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return _gelu_kernel(x, bias)


def scaled_matmul(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``x @ weight.T + bias`` of two e4m3 matrices, in bf16.

    Args:
        x: ``(M, K)``, with scales ``(M, 1)`` in fp32.
        weight: ``(N, K)``, with scales ``(N, 1)`` in fp32.
        bias: ``(N,)``.

    Returns:
        ``(M, N)``.
    """
    m, k = x.shape
    if not m:
        return x_scale.new_empty(0, len(weight), dtype=torch.bfloat16)
    if m < MIN_M_LARGE_K and k > MAX_K_SMALL_M:
        padding = 0, 0, 0, MIN_M_LARGE_K - m
        padded = pad(x.view(torch.uint8), padding).view(E4M3)
        return scaled_matmul(padded, pad(x_scale, padding), weight, weight_scale, bias)[:m]
    if x.is_cpu:  # in tests; on a CPU torch 2.11 supports one scale per tensor only
        one = x_scale.new_ones(())
        product = torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.float32)
        return _scale_and_round(product, x_scale, weight_scale, bias)
    return torch._scaled_mm(
        x,
        weight.t(),  # column-major, as the GPU needs it: both operands are contiguous along K
        scale_a=x_scale,
        scale_b=weight_scale.t(),
        bias=None if bias is None else bias.bfloat16(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _scale_and_round(
    product: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    scaled = product * (x_scale * weight_scale.t())
    return (scaled if bias is None else scaled + bias.float()).bfloat16()
