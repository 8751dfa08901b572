"""Linear layers whose matrix products run in fp8 (e4m3): twice as fast as bf16's on a Hopper GPU.

Both operands of a product are quantised, with one fp32 scale for each row of activations and for
each channel of a weight. What comes out is bf16. Of a layer with a weight ``W`` of ``[out, in]``:

- forward: input times ``W``, both in fp8;
- gradient of the input: gradient times ``W``, both in fp8;
- gradient of the weight: bf16, of operands that are not quantised.

A weight that is trained, or saved, stays the bf16 (or fp32) parameter that it is and is quantised
where it is used: under ZeRO-3 after it is gathered. A frozen one under LoRA is neither, and is held
in fp8 (:class:`HeldLinear`): half of the memory, and half of what ZeRO-3 gathers. Biases, norms,
LoRA's factors, embeddings, the adapter between the towers and the output layer stay as they are.

Quantising is plain torch, so that torch.compile puts it into the kernel that makes the activation.
"""

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.modeling_chatglm import GLMBlock
from ..remote.visual import MLP
from .activation_checkpointing import checkpointed_layers
from .deepspeed import internals
from .kernels import skinny_gemm
from .kernels.e4m3 import E4M3
from .kernels.fp8_gelu import quantise_rows_of_gelu
from .kernels.fp8_matmul import Quantised, product, quantise_rows
from .kernels.skinny_gemm import Parts
from .nvidia_driver import fault_of_fp8
from .options import LANGUAGE_TARGETS, TOWER_TARGETS, EngineOptions, trains_tower

# Shapes: T rows of activations (tokens), I channels in, O channels out.

MULTIPLE = 16
"""Channels of a layer are a multiple of it: what the GPU's products take."""

# Layers of the tower that stay in bf16, unless their layer is compiled or ever. On one H200, of
# 25,604 rows, in ms: bf16; fp8, and quantising the input where no kernel that makes it does that.
#   1,792 -> 1,792 (dense)   0.215; 0.119 + 0.128: attention makes its input, no kernel of ours
#   15,360 -> 1,792 (fc2)    1.996; 0.998 + 0.785: pays where GELU's kernel quantises
# The others gain 1.45 to 1.83 times, quantised by kernels of their own.
NEVER, IF_COMPILED = ("dense",), ("fc2",)

_on_cpu = False
"""For tests: products of fp8 on a CPU, which are slow there."""


def require_fp8(options: EngineOptions, config: ChatGLMConfig) -> None:
    """Raise if fp8 is asked for and this process cannot train the model with it.

    Raises:
        RuntimeError: no GPU, an old one, or a torch without what is used of it.
        ValueError: the model's sizes are not multiples of :data:`MULTIPLE`.
    """
    if not options.fp8:
        return
    require_products()
    for name, size in _sizes(config):
        if size % MULTIPLE:
            raise ValueError(
                f"fp8 with {name} {size}: its products take multiples of {MULTIPLE}; "
                "leave out fp8 for this model"
            )


def require_products() -> None:
    """Raise ``RuntimeError`` if this process cannot multiply in fp8."""
    if not hasattr(torch, "_scaled_mm"):
        raise RuntimeError(
            f"torch {torch.__version__} has no torch._scaled_mm, with which fp8 multiplies; "
            "install a tested one (README, What you need), or leave out fp8"
        )
    if not _on_cpu:
        if not torch.cuda.is_available():
            raise RuntimeError("fp8 runs on a GPU, and torch sees none; leave out fp8")
        found = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        if fault := fault_of_fp8(*found):
            raise RuntimeError(fault)


def _sizes(config: ChatGLMConfig) -> Iterator[tuple[str, int]]:
    yield "hidden_size", config.hidden_size
    yield "ffn_hidden_size", config.ffn_hidden_size
    yield "num_attention_heads * kv_channels", config.num_attention_heads * config.kv_channels
    yield "multi_query_group_num * kv_channels", config.multi_query_group_num * config.kv_channels
    yield "vision_config.hidden_size", config.vision.hidden_size
    yield "vision_config.intermediate_size", config.vision.intermediate_size


class _QuantisedWhereUsed(torch.autograd.Function):
    """A product with a weight that is a parameter; input ``(T, I)``, weight ``(O, I)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        # The parameter itself: what is made from it would keep a gathered one in memory.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.of_input = x.dtype
        return product(*quantise_rows(x), *quantise_rows(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            quantised = quantise_rows(gradient)
            transposed = quantise_rows(_after(quantised[1], weight).t())
            of_input = _cast(product(*quantised, *transposed), ctx.of_input)
        if ctx.needs_input_grad[1]:
            of_weight = _cast(gradient.t() @ _cast(x, gradient.dtype), weight.dtype)
        return of_input, of_weight


class _HeldProduct(torch.autograd.Function):
    """A product with a frozen weight that is held quantised: the bytes of its numbers ``(O, I)``,
    maybe also transposed, and the bits of its scales ``(O, 1)``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, transposed: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(weight, scale, transposed)
        ctx.of_input = x.dtype
        return product(*quantise_rows(x), weight.view(E4M3), scale.view(torch.float32))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, transposed = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        # The weight's scales belong to the channels that are summed here: they go to the gradient,
        # and the same numbers do for both products.
        quantised = quantise_rows(gradient.float() * scale.view(torch.float32).t())
        if transposed is None:
            transposed = _after(quantised[1], weight).t().contiguous()
        ones = quantised[1].new_ones(len(transposed), 1)
        of_input = product(*quantised, transposed.view(E4M3), ones)
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
    """As autocast casts the input of a linear layer; what is quantised stays."""
    if isinstance(x, Quantised):
        return x
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class Linear(nn.Linear):
    """Quantises its weight where it is used."""

    def forward(self, x: Tensor) -> Tensor:
        x = _in_computed_type(x)
        return _finish(self.without_bias(x.reshape(-1, self.in_features)), x, self.bias)

    def without_bias(self, x: Tensor) -> Tensor:
        return _QuantisedWhereUsed.apply(x, self.weight)

    def quantised(self) -> tuple[Tensor, Tensor]:
        return quantise_rows(self.weight)


class HeldLinear(nn.Linear):
    """Holds its frozen weight in fp8: ``weight`` ``(O, I)`` as bytes, ``weight_scale`` ``(O, 1)``
    as bits, types that no cast of a model changes. In the place of its input it takes
    :class:`fp8_matmul.Quantised`, where no gradient is wanted."""

    weight_scale: Tensor
    transposed: Tensor | None

    def forward(self, x: Any) -> Tensor:
        x = _in_computed_type(x)
        rows = x.reshape(-1, self.in_features)
        if torch.is_grad_enabled():
            return _finish(self.without_bias(rows), x, self.bias)
        if skinny_gemm.takes(rows.shape[0], self.weight):
            from .kernels.skinny_gemm_triton import sum_of_parts  # takes Triton

            return _finish(sum_of_parts(self.in_parts(rows)), x)
        return _finish(product(*quantise_rows(rows), *self.quantised(), bias=self.bias), x)

    def without_bias(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return product(*quantise_rows(x), *self.quantised())
        return _HeldProduct.apply(x, self.weight, self.weight_scale, self.transposed)

    def in_parts(self, x: Any) -> Parts:
        """The product of so few rows that :func:`skinny_gemm.takes` them, left in parts."""
        from .kernels.skinny_gemm_triton import parts_of_product  # takes Triton

        numbers, scales = quantise_rows(x.reshape(-1, self.in_features))
        weight, scale = self.quantised()
        shape = torch.Size((*x.shape[:-1], self.out_features))
        parts = parts_of_product(numbers, weight, scales)
        return Parts(parts, shape, torch.bfloat16, scale, self.bias)

    def quantised(self) -> tuple[Tensor, Tensor]:
        return self.weight.view(E4M3), self.weight_scale.view(torch.float32)


def is_bare(module: nn.Module) -> bool:
    """Whether a module has no hook and no replaced ``forward``, so that nothing is left out where
    something else computes what it does."""
    return "forward" not in module.__dict__ and not (
        module._forward_hooks or module._forward_pre_hooks
    )


class FrozenTowerMLP(MLP):
    """Of a tower that no gradient reaches: its activation function quantises for ``fc2``."""

    def forward(self, x_NTV: Tensor) -> Tensor:
        fc1: Any = self.fc1
        fc2: Any = self.fc2
        are_ours = all(isinstance(fc, (Linear, HeldLinear)) for fc in (fc1, fc2))  # no adapter's
        if not (are_ours and is_bare(fc1) and is_bare(self.activation_fn) and is_bare(fc2)):
            return super().forward(x_NTV)
        x = _in_computed_type(x_NTV)
        wide = fc1.without_bias(x.reshape(-1, fc1.in_features))
        quantised = quantise_rows_of_gelu(wide, fc1.bias)
        weight, scale = fc2.quantised()
        return _finish(product(*quantised, weight, scale, fc2.bias), x)


def _finish(found: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    found = _cast(found, x.dtype).view(*x.shape[:-1], found.shape[-1])
    return found if bias is None else found + bias.to(found.dtype)


def use_fp8(model: nn.Module, options: EngineOptions) -> None:
    """Have linear layers of both towers multiply in fp8, as the options ask. Call it when what is
    trained is chosen, adapters are in, and before ``deepspeed.initialize``.

    Under LoRA, frozen weights are replaced by quantised ones, layer by layer, and under ZeRO-3
    sharded again. Others stay as they are, and are saved as they are. Does nothing without fp8.
    """
    if not options.fp8:
        return
    for name, linear in linear_layers(model, options.compile is True):
        if options.holds_fp8 and not linear.weight.requires_grad:
            hold_layer(linear, keeps_transposed=_is_needed_transposed(name, options))
        else:
            linear.__class__ = Linear
    if options.compile is True and not trains_tower(options.trained):
        _fuse_activations(model)
    gc.collect()  # what DeepSpeed hung on weights refers to itself


def hold_in_fp8(model: nn.Module, device: torch.device) -> None:
    """Have a model that is only read multiply in fp8, in both towers, and move it to the device,
    layer by layer: a GPU never holds it in full. Adapters are in, and stay as they are."""
    for _, linear in linear_layers(model, compiled=True):
        if not any(size % MULTIPLE for size in linear.weight.shape):
            hold_layer(linear, keeps_transposed=False)
    _fuse_activations(model)
    model.to(device)


def _fuse_activations(model: nn.Module) -> None:
    # In training, of compiled layers: they are gathered whole under ZeRO-3, and fc1 and fc2 are not
    # called.
    for layer in checkpointed_layers(model):
        mlp = getattr(layer, "mlp", None)
        if type(mlp) is not MLP or type(mlp.activation_fn) is not type(ACT2FN["gelu"]):
            continue
        if {type(mlp.fc1), type(mlp.fc2)} <= {Linear, HeldLinear}:  # no adapter's
            mlp.__class__ = FrozenTowerMLP


def linear_layers(model: nn.Module, compiled: bool) -> Iterator[tuple[str, nn.Linear]]:
    """The layers that multiply in fp8, with names that begin with their tower: "language", or
    "tower"."""
    for layer in checkpointed_layers(model):
        tower, targets = "tower", {*TOWER_TARGETS} - {*NEVER}
        if isinstance(layer, GLMBlock):
            tower, targets = "language", {*LANGUAGE_TARGETS}
        elif not compiled:
            targets -= {*IF_COMPILED}
        for name, module in [*layer.named_modules()]:
            inner = name.removesuffix(".base_layer").rpartition(".")[2]  # of LoRA's
            if type(module) is nn.Linear and inner in targets:
                yield f"{tower}.{inner}", module


def _is_needed_transposed(name: str, options: EngineOptions) -> bool:
    has_gradient = name.startswith("language") or trains_tower(options.trained)
    return options.keeps_transposed and has_gradient


def hold_layer(linear: nn.Linear, keeps_transposed: bool) -> None:
    """Quantise a layer's frozen weight, and make it a :class:`HeldLinear`."""
    old: Any = linear.weight
    with internals.gathered(old), torch.no_grad():
        numbers, scale = quantise_rows(old.detach().to(_device_to_quantise_on(old)))
    held = numbers.view(torch.uint8)
    new = nn.Parameter(held, requires_grad=False)
    if internals.is_sharded(old):
        internals.attribute(old, "convert_to_zero_parameters")([new])
        shard = internals.shard_of(old)
        shard.data = shard.data.new_empty(0)
    linear.__class__ = HeldLinear
    linear.weight = new
    linear.register_buffer("weight_scale", scale.view(torch.int32), persistent=False)
    transposed = held.t().contiguous() if keeps_transposed else None
    linear.register_buffer("transposed", transposed, persistent=False)


def _device_to_quantise_on(weight: Tensor) -> torch.device:
    """The GPU, layer by layer, for a model that is loaded into the machine's memory."""
    if weight.is_cuda or not torch.cuda.is_available():
        return weight.device
    return torch.device("cuda", torch.cuda.current_device())
