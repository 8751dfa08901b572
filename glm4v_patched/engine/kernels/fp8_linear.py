"""Linear layers whose matrix products run in fp8 (e4m3): twice as fast as bf16's on a Hopper GPU.

Both operands of a product are quantized, with one fp32 scale for each row of activations and for
each channel of a weight. What comes out is bf16. Of a layer with a weight ``W`` of ``[out, in]``:

- forward: input times ``W``, both in fp8;
- gradient of the input: gradient times ``W``, both in fp8;
- gradient of the weight: bf16, of operands that are not quantized.

A weight that is trained, or saved, stays the bf16 (or fp32) parameter that it is and is quantized
where it is used: under ZeRO-3 after it is gathered. A frozen one under LoRA is neither, and is held
in fp8 (:class:`Fp8StoredLinear`): half of the memory, and half of what ZeRO-3 gathers. Biases, norms,
LoRA's factors, embeddings, the projector between the towers and the output layer stay as they are.

Quantizing is plain torch, so that torch.compile puts it into the kernel that makes the activation.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ...remote.visual import VisionMLP as MLP
from ..deepspeed import internals
from . import skinny_gemm
from .e4m3 import E4M3
from .fp8_matmul import Quantized, product, quantize_rows, gelu_and_quantize_rows
from .skinny_gemm import Parts

# Shapes: T rows of activations (tokens), I channels in, O channels out.


class _QuantizedWhereUsed(torch.autograd.Function):
    """A product with a weight that is a parameter; input ``(T, I)``, weight ``(O, I)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        # The parameter itself: what is made from it would keep a gathered one in memory.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.of_input = x.dtype
        return product(*quantize_rows(x), *quantize_rows(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            quantized = quantize_rows(gradient)
            transposed = quantize_rows(_after(quantized[1], weight).t())
            of_input = _cast(product(*quantized, *transposed), ctx.of_input)
        if ctx.needs_input_grad[1]:
            of_weight = _cast(gradient.t() @ _cast(x, gradient.dtype), weight.dtype)
        return of_input, of_weight


class _HeldProduct(torch.autograd.Function):
    """A product with a frozen weight that is held quantized: the bytes of its numbers ``(O, I)``,
    maybe also transposed, and the bits of its scales ``(O, 1)``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, transposed: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(weight, scale, transposed)
        ctx.of_input = x.dtype
        return product(*quantize_rows(x), weight.view(E4M3), scale.view(torch.float32))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, transposed = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        # The weight's scales belong to the channels that are summed here: they go to the gradient,
        # and the same numbers do for both products.
        quantized = quantize_rows(gradient.float() * scale.view(torch.float32).t())
        if transposed is None:
            transposed = _after(quantized[1], weight).t().contiguous()
        ones = quantized[1].new_ones(len(transposed), 1)
        of_input = product(*quantized, transposed.view(E4M3), ones)
        return _cast(of_input, ctx.of_input), None, None, None


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    # A cast that changes nothing, of what a Function returns, makes compilers of torch 2.11 take
    # the gradient for zero.
    return x if x.dtype is dtype else x.to(dtype)


def _after(scale: Tensor, weight: Tensor) -> Tensor:
    """``weight``, to a compiler made with a gradient's ``scale``.

    Otherwise it would make in forward what backward needs of the weight, and keep it until then,
    wherever it does not take the weight for a parameter, which is there in any case.
    """
    if not torch.compiler.is_compiling() or not len(scale):
        return weight
    bits = weight.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[weight.element_size()])
    nothing = scale[:1].view(torch.int32) & 0
    return (bits | nothing.to(bits.dtype)).view(weight.dtype)


def _in_computed_type(x: Any) -> Any:
    """As autocast casts the input of a linear layer; what is quantized stays."""
    if isinstance(x, Quantized):
        return x
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class Linear(nn.Linear):
    """Quantizes its weight where it is used."""

    def forward(self, x: Tensor) -> Tensor:
        x = _in_computed_type(x)
        return _finish(self.without_bias(x.reshape(-1, self.in_features)), x, self.bias)

    def without_bias(self, x: Tensor) -> Tensor:
        return _QuantizedWhereUsed.apply(x, self.weight)

    def quantized(self) -> tuple[Tensor, Tensor]:
        return quantize_rows(self.weight)


class Fp8StoredLinear(nn.Linear):
    """Holds its frozen weight in fp8: ``weight`` ``(O, I)`` as bytes, ``weight_scale`` ``(O, 1)``
    as bits, types that no cast of a model changes. In the place of its input it takes
    :class:`fp8_matmul.Quantized`, where no gradient is wanted."""

    weight_scale: Tensor
    transposed: Tensor | None

    def quantize_weight(self, stores_transposed: bool) -> None:
        """Quantize the frozen weight of a linear layer that has become one of this class."""
        old: Any = self.weight
        with internals.gathered(old), torch.no_grad():
            numbers, scale = quantize_rows(old.detach().to(_device_to_quantize_on(old)))
        held = numbers.view(torch.uint8)
        new = nn.Parameter(held, requires_grad=False)
        if internals.is_sharded(old):
            internals.attribute(old, "convert_to_zero_parameters")([new])
            shard = internals.local_shard(old)
            shard.data = shard.data.new_empty(0)
        self.weight = new
        self.register_buffer("weight_scale", scale.view(torch.int32), persistent=False)
        transposed = held.t().contiguous() if stores_transposed else None
        self.register_buffer("transposed", transposed, persistent=False)

    def forward(self, x: Any) -> Tensor:
        x = _in_computed_type(x)
        rows = x.reshape(-1, self.in_features)
        if torch.is_grad_enabled():
            return _finish(self.without_bias(rows), x, self.bias)
        if skinny_gemm.is_supported(rows.shape[0], self.weight):
            from .skinny_gemm_triton import reduce_partials  # takes Triton

            return _finish(reduce_partials(self.in_parts(rows)), x)
        return _finish(product(*quantize_rows(rows), *self.quantized(), bias=self.bias), x)

    def without_bias(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return product(*quantize_rows(x), *self.quantized())
        return _HeldProduct.apply(x, self.weight, self.weight_scale, self.transposed)

    def in_parts(self, x: Any) -> Parts:
        """The product of so few rows that :func:`skinny_gemm.is_supported` them, left in parts."""
        from .skinny_gemm_triton import split_k_matmul  # takes Triton

        numbers, scales = quantize_rows(x.reshape(-1, self.in_features))
        weight, scale = self.quantized()
        shape = torch.Size((*x.shape[:-1], self.out_features))
        parts = split_k_matmul(numbers, weight, scales)
        return Parts(parts, shape, torch.bfloat16, scale, self.bias)

    def quantized(self) -> tuple[Tensor, Tensor]:
        return self.weight.view(E4M3), self.weight_scale.view(torch.float32)


class FrozenTowerMLP(MLP):
    """Of a tower that no gradient reaches: its activation function quantizes for ``fc2``."""

    def forward(self, x_NTV: Tensor) -> Tensor:
        fc1: Any = self.fc1
        fc2: Any = self.fc2
        x = _in_computed_type(x_NTV)
        wide = fc1.without_bias(x.reshape(-1, fc1.in_features))
        quantized = gelu_and_quantize_rows(wide, fc1.bias)
        weight, scale = fc2.quantized()
        return _finish(product(*quantized, weight, scale, fc2.bias), x)


def _finish(found: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    found = _cast(found, x.dtype).view(*x.shape[:-1], found.shape[-1])
    return found if bias is None else found + bias.to(found.dtype)


def _device_to_quantize_on(weight: Tensor) -> torch.device:
    """The GPU, layer by layer, for a model that is loaded into the machine's memory."""
    if weight.device.type != "cpu" or not torch.cuda.is_available():
        return weight.device
    return torch.device("cuda", torch.cuda.current_device())
