"""Layers of a model that is only read, on a GPU, whose element-wise steps are one kernel each.

In training these are compiled. Answers compile only the steps after the first token, for compiling
what reads the prompt would take longer than most runs do.
"""

import importlib.util
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.activations import ACT2FN

from ..remote.modeling_chatglm import MLP, GLMBlock, RMSNorm, SelfAttention
from ..remote.visual import MLP as TowerMLP
from ..remote.visual import PatchEmbedding, TransformerLayer
from .few_rows import COLUMNS, MOST_ROWS, WIDTH, Parts, multiprocessors, parts_of_product
from .fp8 import FrozenTowerMLP, HeldLinear
from .fp8_activations import quantise_rows_of_swiglu
from .fp8_numbers import Quantised, product_to_read, quantise_rows

DTYPES = (torch.bfloat16, torch.float16)
MOST_ROWS_IN_BF16 = 16  # cuBLAS is as fast with more
HEAD_CHANNELS = (16, 32, 64, 128)
MOST_HEADS = 16
"""That share keys: the smallest block of a tensor core's left factor."""


class ReadPatchEmbedding(PatchEmbedding):
    """Multiplies by the patches: cuDNN's convolution of three channels takes ten times as long."""

    def project(self, pixels_N3SS: Tensor) -> Tensor:
        proj = self.proj
        if not _takes(pixels_N3SS) or type(proj) is not nn.Conv2d:
            return super().project(pixels_N3SS)
        side = proj.kernel_size[0]
        patches = pixels_N3SS.unfold(2, side, side).unfold(3, side, side)
        patches_NPI = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return linear(patches_NPI, proj.weight.flatten(1), proj.bias)


class ReadTowerLayer(TransformerLayer):
    """Normalises, adds and quantises in one step."""

    def layer_forward(self, x_NTV: Tensor, *kept_weights: list[Tensor]) -> Tensor:
        if not _takes(x_NTV) or x_NTV.dtype != self.input_layernorm.weight.dtype:
            return super().layer_forward(x_NTV, *kept_weights)
        from .reading_triton import add_norm  # takes Triton

        mlp = self.mlp
        quantises = type(mlp) is FrozenTowerMLP and _is_held(mlp.fc1, x_NTV)
        attended = self.attention(x_NTV, *kept_weights)
        x_NTV, given = add_norm(x_NTV, self.input_layernorm, attended, quantises)
        return add_norm(x_NTV, self.post_attention_layernorm, mlp(given), False)[0]


class ReadTowerMLP(TowerMLP):
    """GELU in the memory of its input."""

    def forward(self, x_NTV: Tensor) -> Tensor:
        wide = self.fc1(x_NTV)
        if not _takes(wide) or type(self.activation_fn) is not type(ACT2FN["gelu"]):
            return self.fc2(self.activation_fn(wide))
        from .fp8_triton import activate  # takes Triton

        return self.fc2(activate(wide, "gelu"))


class ReadMLP(MLP):
    """SwiGLU in one step, which quantises if the second product is in fp8."""

    def forward(self, x: Any) -> Any:
        last: Any = self.dense_4h_to_h
        is_held = type(last) is HeldLinear  # no adapter's
        is_read = isinstance(x, Quantised) or _takes(x)
        if torch.is_grad_enabled() or not (is_held or is_read):
            return super().forward(x)
        if not is_read:
            wide = self.dense_h_to_4h(x)
            weight, scale = last.quantised()
            quantised = quantise_rows_of_swiglu(wide.reshape(-1, wide.shape[-1]))
            out = product_to_read(*quantised, weight, scale, last.bias)
            return out.to(wide.dtype).unflatten(0, wide.shape[:-1])
        from .fp8_triton import activate  # takes Triton

        wide = in_parts(self.dense_h_to_4h, x)
        if not is_held or wide.dtype != torch.bfloat16:
            return in_parts(last, activate(wide, "swiglu"))
        *leading, width = wide.shape
        rows = wide if isinstance(wide, Parts) else wide.reshape(-1, width)
        quantised = quantise_rows_of_swiglu(rows)
        return in_parts(last, Quantised(*quantised).reshape(*leading, width // 2))


class ReadBlock(GLMBlock):
    """Adds, normalises and quantises in one step."""

    def layer_forward(self, x_BRD: Tensor, *attention_inputs) -> Tensor:
        if not _takes(x_BRD):
            return super().layer_forward(x_BRD, *attention_inputs)
        from .few_rows_triton import sum_of_parts
        from .reading_triton import add_rms_norm  # takes Triton

        attention, mlp = self.self_attention, self.mlp
        quantises = _is_held(attention.query_key_value, x_BRD)
        _, given = add_rms_norm(x_BRD, self.input_layernorm, None, quantises)
        attended = attention(given, *attention_inputs)
        quantises = _is_held(mlp.dense_h_to_4h, x_BRD)
        norm = self.post_attention_layernorm
        x_BRD, given = add_rms_norm(x_BRD, norm, attended, quantises)
        out = mlp(given)
        return sum_of_parts(out, x_BRD) if isinstance(out, Parts) else x_BRD + out


class ReadSelfAttention(SelfAttention):
    """Rotates queries and keys where they are. Of a drawn id, attends to the parts of a cache of
    fixed size side by side; compiled steps do, too."""

    def project(self, layer: nn.Module, x: Any) -> Any:
        # Kernels take blocks of whole heads.
        return in_parts(layer, x) if self.head_dim in HEAD_CHANNELS else layer(x)

    def attend(
        self, query_BHRC, key_BGKC, value_BGKC, attention_mask, **attention_kwargs
    ) -> Tensor:
        given = query_BHRC, key_BGKC, value_BGKC, attention_mask
        if self.config._attn_implementation == "sdpa" and _are_of_one_id(*given):
            return attend_to_parts(*given)
        return super().attend(*given, **attention_kwargs)

    def rotate(self, heads_BRHC: Any, cos: Tensor, sin: Tensor) -> Any:
        queries, groups, _ = self.split_sizes
        if isinstance(heads_BRHC, Parts):
            from .reading_triton import rotate_parts

            given = heads_BRHC, queries + groups, cos, sin, self.head_dim
            return rotate_parts(*given).split(self.split_sizes, dim=2)
        if not _takes(heads_BRHC) or not heads_BRHC.is_contiguous():
            return super().rotate(heads_BRHC, cos, sin)
        from .reading_triton import rotate  # takes Triton

        rotate(heads_BRHC, queries + groups, cos, sin)
        return heads_BRHC.split(self.split_sizes, dim=2)


def _is_held(layer: nn.Module, x: Tensor) -> bool:
    """Whether the layer takes :class:`fp8_numbers.Quantised` in the place of ``x``."""
    return type(layer) is HeldLinear and x.dtype == torch.bfloat16


def in_parts(layer: nn.Module, x: Any) -> Any:
    """``layer(x)``; of a few rows, if nothing is wrapped around the layer, left in parts to the
    kernel that takes them next."""
    *leading, width = x.shape
    rows, kind = math.prod(leading), type(layer)
    most: dict[type, int] = {nn.Linear: MOST_ROWS_IN_BF16, HeldLinear: MOST_ROWS}
    is_bare = "forward" not in vars(layer) and not (
        layer._forward_hooks or layer._forward_pre_hooks
    )
    if not (0 < rows <= most.get(kind, 0) and is_bare and (isinstance(x, Quantised) or _takes(x))):
        return layer(x)
    linear: Any = layer
    if not _has_kernel(linear):
        return layer(x)
    shape = torch.Size((*leading, linear.out_features))
    if kind is nn.Linear and x.dtype == linear.weight.dtype:
        parts = parts_of_product(x.reshape(rows, width), linear.weight, 0)
        return Parts(parts, shape, x.dtype, None, None, linear.bias)
    if kind is nn.Linear or x.dtype != torch.bfloat16:
        return layer(x)
    numbers, left_scale = quantise_rows(x.reshape(rows, width))
    weight, right_scale = linear.quantised()
    parts = parts_of_product(numbers, weight, 0)
    return Parts(parts, shape, x.dtype, left_scale, right_scale, linear.bias)


def _has_kernel(linear: nn.Linear) -> bool:
    """Whether the kernel for few rows takes the layer's sizes, and runs on its device."""
    fits = not linear.out_features % COLUMNS and not linear.in_features % WIDTH
    return fits and multiprocessors(linear.weight.device) > 0


def _are_of_one_id(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> bool:
    """Whether a query of each row, at most 16 heads of which share a key, looks where a mask for
    all heads lets it."""
    has_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim == 4
    heads, channels = query.shape[1], query.shape[3]
    return (
        has_mask
        and mask.shape[1] == query.shape[2] == 1
        and heads <= MOST_HEADS * key.shape[1]
        and channels in HEAD_CHANNELS
        and query.is_cuda
        and multiprocessors(query.device) > 0
        and query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and not torch.is_grad_enabled()
    )


@torch.library.custom_op("glm4v_patched::attend_to_parts", mutates_args=(), device_types="cuda")
def attend_to_parts(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """``(B, 1, H * C)`` of attention of one query a row ``(B, H, 1, C)`` to keys and values ``(B,
    G, K, C)``, under a mask ``(B or 1, 1, 1, K)`` that is true where it looks."""
    from .reading_triton import attend_to_parts  # takes Triton

    return attend_to_parts(query, key, value, mask)


@attend_to_parts.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    batch, heads, _, channels = query.shape
    return query.new_empty(batch, 1, heads * channels)


def _takes(x: Any) -> bool:
    """Compilers make such kernels themselves, and see what they are made of."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not isinstance(x, Tensor):
        return False
    # Under autocast a norm's output is fp32.
    return x.is_cuda and x.dtype in DTYPES and not torch.is_autocast_enabled("cuda")


def read_only(model: nn.Module) -> None:
    """Have the layers of a model that no gradient reaches compute so, where Triton is there. Their
    classes change, no weight does."""
    if importlib.util.find_spec("triton") is None:
        return
    for module in model.modules():
        if isinstance(module, GLMBlock):
            norms = module.input_layernorm, module.post_attention_layernorm
            if {*map(type, norms)} != {RMSNorm}:
                continue
        module.__class__ = READ.get(type(module), type(module))


READ: dict[type, type] = {
    PatchEmbedding: ReadPatchEmbedding,
    TransformerLayer: ReadTowerLayer,
    GLMBlock: ReadBlock,
    SelfAttention: ReadSelfAttention,
    MLP: ReadMLP,
    TowerMLP: ReadTowerMLP,
}
