"""Linear layers whose matrix products run in fp8 (e4m3), twice as fast as in bf16 on a Hopper GPU.

Both operands of a product are quantized: each row of activations and each output channel of a
weight has one fp32 scale. The output is bf16. With a weight ``W`` of shape ``[out, in]``:

- forward: input times ``W``, both in fp8;
- gradient of the input: gradient times ``W``, both in fp8;
- gradient of the weight: bf16, from operands that are not quantized.

A weight that is trained or saved stays a bf16 (or fp32) parameter. :class:`Fp8DynamicLinear`
quantizes it in each call, under ZeRO-3 after the weight is gathered. A frozen weight under LoRA is
stored in fp8 (:class:`Fp8StoredLinear`), which halves its memory and the bytes that ZeRO-3 gathers.
Biases, norms, LoRA's factors, embeddings, the projector and the output layer are not quantized.

In compiled code, quantization is plain torch, so that torch.compile fuses it with the operation
before it; only GELU in a frozen tower has its own kernel. In eager mode, a Triton kernel quantizes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ...remote.visual import VisionMLP
from ..deepspeed import internals
from . import skinny_gemm
from .e4m3 import E4M3
from .fp8_matmul import Fp8Tensor, gelu_and_quantize_rows, quantize_rows, scaled_matmul
from .skinny_gemm import SplitKPartials

# Shapes: T tokens (the rows of activations), I input channels, O output channels; in the tower, N
# images, T tokens of one image, V hidden size.


class DynamicFp8MatmulFn(torch.autograd.Function):
    """Product of ``x`` ``(T, I)`` with a parameter ``(O, I)``, which is quantized in each call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        # Save the parameter itself: a tensor made from it would keep a gathered weight in memory.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.input_dtype = x.dtype
        return scaled_matmul(*quantize_rows(x), *quantize_rows(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            quantized = quantize_rows(gradient)
            transposed = quantize_rows(_add_fake_dependency(weight, quantized[1]).t())
            x_grad = _cast(scaled_matmul(*quantized, *transposed), ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            weight_grad = _cast(gradient.t() @ _cast(x, gradient.dtype), weight.dtype)
        return x_grad, weight_grad


class StoredFp8MatmulFn(torch.autograd.Function):
    """Product of ``x`` ``(T, I)`` with a frozen weight that is stored in fp8.

    ``weight`` ``(O, I)`` and ``transposed`` ``(I, O)`` contain the bits of e4m3 numbers as uint8;
    ``transposed`` may be None. ``scale`` ``(O, 1)`` contains the bits of fp32 numbers as int32.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, transposed: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(weight, scale, transposed)
        ctx.input_dtype = x.dtype
        return scaled_matmul(*quantize_rows(x), weight.view(E4M3), scale.view(torch.float32))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, transposed = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        # This product sums over the output channels, and each of them has its own scale. So the
        # gradient is multiplied by the scales, and the weight's e4m3 numbers are used unchanged.
        quantized = quantize_rows(gradient.float() * scale.view(torch.float32).t())
        if transposed is None:
            transposed = _add_fake_dependency(weight, quantized[1]).t().contiguous()
        ones = quantized[1].new_ones(len(transposed), 1)
        x_grad = scaled_matmul(*quantized, transposed.view(E4M3), ones)
        return _cast(x_grad, ctx.input_dtype), None, None, None


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    # A cast to the dtype that the output of a Function already has makes torch 2.11's compiler take
    # the gradient for zero.
    return x if x.dtype is dtype else x.to(dtype)


def _add_fake_dependency(weight: Tensor, scale: Tensor) -> Tensor:
    """Return ``weight`` as a tensor that, for the compiler, depends on a gradient's ``scale``.

    Without this dependency, the compiler would transpose or quantize the weight in forward and save
    the result for backward, unless it knows that the weight is a parameter.
    """
    if not torch.compiler.is_compiling() or not len(scale):
        return weight
    bits = weight.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[weight.element_size()])
    zero = scale[:1].view(torch.int32) & 0
    return (bits | zero.to(bits.dtype)).view(weight.dtype)


def _autocast(x: Any) -> Any:
    """Cast the input of a linear layer as autocast does; return an :class:`Fp8Tensor` unchanged."""
    if isinstance(x, Fp8Tensor):
        return x
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class Fp8DynamicLinear(nn.Linear):
    """Linear layer in fp8 whose bf16 or fp32 weight is quantized in each call."""

    def forward(self, x: Tensor) -> Tensor:
        x = _autocast(x)
        return _reshape_and_add_bias(self.matmul(x.reshape(-1, self.in_features)), x, self.bias)

    def matmul(self, x: Tensor) -> Tensor:
        """Return the product ``(T, O)`` of ``x`` ``(T, I)``, in bf16."""
        return DynamicFp8MatmulFn.apply(x, self.weight)

    def weight_and_scale(self) -> tuple[Tensor, Tensor]:
        """Return the weight in e4m3 ``(O, I)`` and its scales ``(O, 1)``."""
        return quantize_rows(self.weight)


class Fp8StoredLinear(nn.Linear):
    """Linear layer in fp8 whose frozen weight is stored in fp8.

    ``weight`` ``(O, I)`` contains the bits of e4m3 numbers as uint8, and ``weight_scale``
    ``(O, 1)`` the bits of fp32 numbers as int32: ``model.to(dtype)`` does not change integers. In
    inference, the layer's input may also be an :class:`fp8_matmul.Fp8Tensor`.
    """

    weight_scale: Tensor
    transposed: Tensor | None

    def quantize_weight(self, stores_transposed: bool) -> None:
        """Quantize the frozen weight of a linear layer whose class was changed to this one.

        Args:
            stores_transposed: Also store the transposed weight, for the backward pass.
        """
        old: Any = self.weight
        with internals.gathered_weight(old), torch.no_grad():
            quantized, scale = quantize_rows(old.detach().to(_quantization_device(old)))
        stored = quantized.view(torch.uint8)
        new = nn.Parameter(stored, requires_grad=False)
        if internals.is_sharded(old):
            internals.get_deepspeed_attribute(old, "convert_to_zero_parameters")([new])
            shard = internals.local_shard(old)
            shard.data = shard.data.new_empty(0)
        self.weight = new
        self.register_buffer("weight_scale", scale.view(torch.int32), persistent=False)
        transposed = stored.t().contiguous() if stores_transposed else None
        self.register_buffer("transposed", transposed, persistent=False)

    def forward(self, x: Any) -> Tensor:
        x = _autocast(x)
        rows = x.reshape(-1, self.in_features)
        if torch.is_grad_enabled():
            return _reshape_and_add_bias(self.matmul(rows), x, self.bias)
        if skinny_gemm.is_supported(rows.shape[0], self.weight):
            from .skinny_gemm_triton import reduce_partials  # needs Triton

            return _reshape_and_add_bias(reduce_partials(self.matmul_partials(rows)), x)
        return _reshape_and_add_bias(
            scaled_matmul(*quantize_rows(rows), *self.weight_and_scale(), bias=self.bias), x
        )

    def matmul(self, x: Tensor) -> Tensor:
        """Return the product ``(T, O)`` of ``x`` ``(T, I)``, in bf16."""
        if not torch.is_grad_enabled():
            return scaled_matmul(*quantize_rows(x), *self.weight_and_scale())
        return StoredFp8MatmulFn.apply(x, self.weight, self.weight_scale, self.transposed)

    def matmul_partials(self, x: Any) -> SplitKPartials:
        """Return the product as split-K partial sums; :func:`skinny_gemm.is_supported` must hold
        for the rows of ``x``."""
        from .skinny_gemm_triton import split_k_matmul  # needs Triton

        quantized, x_scale = quantize_rows(x.reshape(-1, self.in_features))
        weight, scale = self.weight_and_scale()
        shape = torch.Size((*x.shape[:-1], self.out_features))
        partials = split_k_matmul(quantized, weight, x_scale)
        return SplitKPartials(partials, shape, torch.bfloat16, scale, self.bias)

    def weight_and_scale(self) -> tuple[Tensor, Tensor]:
        """Return the weight in e4m3 ``(O, I)`` and its scales ``(O, 1)``."""
        return self.weight.view(E4M3), self.weight_scale.view(torch.float32)


class FrozenTowerMLP(VisionMLP):
    """MLP of a vision tower that receives no gradient; GELU's kernel quantizes the input of
    ``fc2``."""

    def forward(self, x_NTV: Tensor) -> Tensor:
        fc1: Any = self.fc1
        fc2: Any = self.fc2
        x = _autocast(x_NTV)
        fc1_output = fc1.matmul(x.reshape(-1, fc1.in_features))  # without the bias
        quantized = gelu_and_quantize_rows(fc1_output, fc1.bias)
        weight, scale = fc2.weight_and_scale()
        return _reshape_and_add_bias(scaled_matmul(*quantized, weight, scale, fc2.bias), x)


def _reshape_and_add_bias(out: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Give a product the dtype and leading dimensions of the layer's input ``x``; add the bias."""
    out = _cast(out, x.dtype).view(*x.shape[:-1], out.shape[-1])
    return out if bias is None else out + bias.to(out.dtype)


def _quantization_device(weight: Tensor) -> torch.device:
    """Return the GPU for a weight that is still on the CPU, else the weight's device."""
    if weight.device.type != "cpu" or not torch.cuda.is_available():
        return weight.device
    return torch.device("cuda", torch.cuda.current_device())
