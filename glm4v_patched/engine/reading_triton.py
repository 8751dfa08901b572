"""The kernels of :mod:`reading`; importing it takes Triton, which torch for GPUs brings."""

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor, nn

# A compiler that fuses steps would leave out roundings between them.
EXACT = {"enable_fp_fusion": False, "num_warps": 4}


@triton.jit
def triton_add_norm(  # profiles know kernels by their names
    x, y, weight, bias, out, width, eps, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)  # times the width it may pass 2**31
    at = tl.arange(0, block)
    inside = at < width
    value = tl.load(y + row * width + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=0) / width
    centred = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    # Rounded before it is added, as the norm's own output is.
    normed = (centred * scale * factor + shift).to(out.dtype.element_ty).to(tl.float32)
    added = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32) + normed
    tl.store(out + row * width + at, added.to(out.dtype.element_ty), mask=inside)


@triton.jit
def triton_rotate(
    heads,
    cos,
    sin,
    row_width,
    angle_width,
    rotated_heads,
    channels,
    pairs: tl.constexpr,
    block_heads: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, block_heads)[:, None]
    at = tl.arange(0, 2 * pairs)
    place = heads + row * row_width + head * channels + at[None, :]
    value = tl.load(place, mask=head < rotated_heads, other=0.0)
    even, odd = tl.split(tl.reshape(value, (block_heads, pairs, 2)))
    neighbour = tl.reshape(tl.join(odd, even), (block_heads, 2 * pairs))
    # Each product is rounded to the type of the angles, as the products of tensors are.
    kind: tl.constexpr = cos.dtype.element_ty
    cosine = tl.load(cos + row * angle_width + at).to(tl.float32)
    sine = tl.load(sin + row * angle_width + at).to(tl.float32)
    left = (value.to(tl.float32) * cosine[None, :]).to(kind).to(tl.float32)
    right = (neighbour.to(tl.float32) * sine[None, :]).to(kind).to(tl.float32)
    turned = (left + right).to(kind).to(heads.dtype.element_ty)
    tl.store(place, turned, mask=head < rotated_heads)


def add_norm(x: Tensor, norm: nn.LayerNorm, y: Tensor) -> Tensor:
    """``x + norm(y)``, of ``(..., width)`` in bf16 or fp16 each."""
    x, y = x.contiguous(), y.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    if rows := x.numel() // width:
        block = triton.next_power_of_2(width)
        with torch.cuda.device_of(x):
            triton_add_norm[(rows,)](
                x, y, norm.weight, norm.bias, out, width, norm.eps, block, **EXACT
            )
    return out


def rotate(heads_BRHC: Tensor, rotated_heads: int, cos_BR1C: Tensor, sin_BR1C: Tensor) -> None:
    """Rotate the first heads in place, as ``apply_rotary`` does, of contiguous ``(B, R, H, C)``."""
    batch, length, heads, channels = heads_BRHC.shape
    cos, sin = (x.expand(batch, -1, -1, -1).contiguous() for x in (cos_BR1C, sin_BR1C))
    if rows := batch * length:
        # Half of the channels is rotated, in pairs.
        sizes = channels // 4, triton.next_power_of_2(rotated_heads)
        with torch.cuda.device_of(heads_BRHC):
            triton_rotate[(rows,)](
                heads_BRHC, cos, sin, heads * channels, channels, rotated_heads, channels, *sizes,
                **EXACT,
            )  # fmt: skip
