"""Layers of a model that is only read, on a GPU, whose element-wise steps are one kernel each.

In training these are compiled. Answers compile only the steps after the first token, for compiling
what reads the prompt would take longer than most runs do.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.activations import ACT2FN

from ..remote.modeling_chatglm import MLP, GLMBlock, RMSNorm, SelfAttention
from ..remote.visual import MLP as TowerMLP
from ..remote.visual import PatchEmbedding, TransformerLayer
from .few_rows import multiprocessors
from .fp8 import FrozenTowerMLP, HeldLinear
from .fp8_activations import quantise_rows_of_swiglu
from .fp8_numbers import product_to_read

DTYPES = (torch.bfloat16, torch.float16)
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

    def forward(self, x: Tensor) -> Tensor:
        last: Any = self.dense_4h_to_h
        is_held = type(last) is HeldLinear  # no adapter's
        if torch.is_grad_enabled() or not (is_held or _takes(x)):
            return super().forward(x)
        wide = self.dense_h_to_4h(x)
        if is_held:
            quantised = quantise_rows_of_swiglu(wide.flatten(0, -2))
            weight, scale = last.quantised()
            out = product_to_read(*quantised, weight, scale, last.bias)
            return out.to(wide.dtype).unflatten(0, wide.shape[:-1])
        from .fp8_triton import activate  # takes Triton

        return last(activate(wide, "swiglu"))


class ReadBlock(GLMBlock):
    """Adds, normalises and quantises in one step."""

    def layer_forward(self, x_BRD: Tensor, *attention_inputs) -> Tensor:
        first, second = self.input_layernorm, self.post_attention_layernorm
        is_ours = type(first) is type(second) is RMSNorm and x_BRD.dtype == first.weight.dtype
        if not is_ours or not _takes(x_BRD):
            return super().layer_forward(x_BRD, *attention_inputs)
        from .reading_triton import add_rms_norm  # takes Triton

        attention, mlp = self.self_attention, self.mlp
        quantises = _is_held(attention.query_key_value, x_BRD)
        _, given = add_rms_norm(x_BRD, first, None, quantises)
        attended = attention(given, *attention_inputs)
        quantises = _is_held(mlp.dense_h_to_4h, x_BRD)
        x_BRD, given = add_rms_norm(x_BRD, second, attended, quantises)
        return x_BRD + mlp(given)


class ReadSelfAttention(SelfAttention):
    """Rotates queries and keys where they are. Of a drawn id, attends to the parts of a cache of
    fixed size side by side; compiled steps do, too."""

    def attend(
        self, query_BHRC, key_BGKC, value_BGKC, attention_mask, **attention_kwargs
    ) -> Tensor:
        given = query_BHRC, key_BGKC, value_BGKC, attention_mask
        if self.config._attn_implementation == "sdpa" and _are_of_one_id(*given):
            return attend_to_parts(*given)
        return super().attend(*given, **attention_kwargs)

    def rotate(self, heads_BRHC: Tensor, cos: Tensor, sin: Tensor) -> Any:
        if not _takes(heads_BRHC) or not heads_BRHC.is_contiguous():
            return super().rotate(heads_BRHC, cos, sin)
        from .reading_triton import rotate  # takes Triton

        queries, groups, _ = self.split_sizes
        rotate(heads_BRHC, queries + groups, cos, sin)
        return heads_BRHC.split(self.split_sizes, dim=2)


def _is_held(layer: nn.Module, x: Tensor) -> bool:
    """Whether the layer takes :class:`fp8_numbers.Quantised` in the place of ``x``."""
    return type(layer) is HeldLinear and x.dtype == torch.bfloat16


def _are_of_one_id(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> bool:
    """Whether a query of each row, at most 16 heads of which share a key, looks where a mask for
    all heads lets it."""
    has_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim == 4
    heads, channels = query.shape[1], query.shape[3]
    return (
        has_mask
        and mask.shape[1] == query.shape[2] == 1
        and heads <= MOST_HEADS * key.shape[1]
        and channels in (16, 32, 64, 128)
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
        if (kind := READ.get(type(module))) is not None:
            module.__class__ = kind


READ: dict[type, type] = {
    PatchEmbedding: ReadPatchEmbedding,
    TransformerLayer: ReadTowerLayer,
    GLMBlock: ReadBlock,
    SelfAttention: ReadSelfAttention,
    MLP: ReadMLP,
    TowerMLP: ReadTowerMLP,
}
