"""Layers of a model that is only read, on a GPU, whose element-wise steps are one kernel each.

In training layers are compiled, which would take longer than most runs of answers do.

Each class computes by itself what submodules compute: those that :mod:`..implementations` names
beside it. ``fuses(name)`` says in each call whether that may be done for a submodule, and
``overwrites(name)`` whether its output may be written to; both are that file's.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.cache_utils import StaticLayer

from ...remote.cache_metadata import is_static
from ...remote.modeling_chatglm import MLP, GLMBlock, SelfAttention
from ...remote.visual import VisionMLP as TowerMLP
from ...remote.visual import PatchEmbedding, TransformerLayer
from . import skinny_gemm
from .fp8_linear import Fp8StoredLinear
from .fp8_matmul import Quantized
from .skinny_gemm import Parts, num_sms

DTYPES = (torch.bfloat16, torch.float16)
SUPPORTED_HEAD_DIMS = (16, 32, 64, 128)
# Of the keys in a layer of StaticCache. Without them, drawn ids attend as others do.
HAS_COUNTERS = Version(transformers.__version__) >= Version("5.4")
MOST_HEADS = 16
"""That share keys: the smallest block of a tensor core's left factor."""


class InferencePatchEmbedding(PatchEmbedding):
    """Multiplies by the patches: cuDNN's convolution of three channels takes ten times as long."""

    def project(self, pixels_N3SS: Tensor) -> Tensor:
        proj = self.proj
        if not _takes(pixels_N3SS):
            return super().project(pixels_N3SS)
        side = proj.kernel_size[0]
        patches = pixels_N3SS.unfold(2, side, side).unfold(3, side, side)
        patches_NPI = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return linear(patches_NPI, proj.weight.flatten(1), proj.bias)


class InferenceTowerLayer(TransformerLayer):
    """Normalizes, adds and quantizes in one step."""

    fuses: Callable[[str], bool]

    def layer_forward(self, x_NTV: Tensor, *attention_collector: list[Tensor]) -> Tensor:
        if not (_takes(x_NTV) and x_NTV.dtype == self.input_layernorm.weight.dtype):
            return super().layer_forward(x_NTV, *attention_collector)
        from .inference_triton import layer_norm_add  # takes Triton

        quantizes = x_NTV.dtype == torch.bfloat16 and self.fuses("mlp.fc1")
        attended = self.attention(x_NTV, *attention_collector)
        x_NTV, given = layer_norm_add(x_NTV, self.input_layernorm, attended, quantizes)
        return layer_norm_add(x_NTV, self.post_attention_layernorm, self.mlp(given), False)[0]


class InferenceTowerMLP(TowerMLP):
    """GELU in the memory of its input."""

    def forward(self, x_NTV: Tensor) -> Tensor:
        wide = self.fc1(x_NTV)
        if not _takes(wide):
            return self.fc2(self.activation_fn(wide))
        from .fp8_triton import activate  # takes Triton

        return self.fc2(activate(wide, "gelu"))


class InferenceMLP(MLP):
    """SwiGLU in one step, which quantizes if the second product is in fp8."""

    fuses: Callable[[str], bool]

    def forward(self, x: Any) -> Any:
        if not (isinstance(x, Quantized) or _takes(x)):
            return super().forward(x)
        from .fp8_triton import activate, quantize_rows  # takes Triton

        last: Any = self.dense_4h_to_h
        wide = _product(self, "dense_h_to_4h", x)
        if self.fuses("dense_4h_to_h") and _is_quantized(last, wide):
            *leading, width = wide.shape
            rows = wide if isinstance(wide, Parts) else wide.reshape(-1, width)
            is_few = skinny_gemm.is_supported(math.prod(leading), last.weight)
            group = skinny_gemm.channels_per_split(last.weight) if is_few else None
            quantized = quantize_rows(rows, None, "swiglu", group)
            given: Any = Quantized(*quantized).reshape(*leading, width // 2)
        else:
            given = activate(wide, "swiglu")
        return _last_product(self, "dense_4h_to_h", given)


class InferenceBlock(GLMBlock):
    """Adds, normalizes and quantizes in one step, for the block behind it, too."""

    fuses: Callable[[str], bool]
    behind: "InferenceBlock | None" = None  # which torch does not see
    # What will be its input, and that normalized; kept until its next pass, if a pass ends early.
    handed: tuple[Any, Any] | None = None

    def layer_forward(self, x_BRD: Tensor, *attention_inputs) -> Tensor:
        handed, self.handed = self.handed, None
        if not _takes(x_BRD):
            return super().layer_forward(x_BRD, *attention_inputs)
        if handed is None or handed[0] is not x_BRD:
            handed = self._normalize("input_layernorm", x_BRD, None, self._quantizes(x_BRD))
        attended = self.self_attention(handed[1], *attention_inputs)
        del handed
        mlp: Any = self.mlp
        quantizes = self.fuses("mlp.dense_h_to_4h") and _is_quantized(mlp.dense_h_to_4h, x_BRD)
        x_BRD, given = self._normalize("post_attention_layernorm", x_BRD, attended, quantizes)
        out = mlp(given)
        block = self.behind
        if block is None or not (self.fuses("") and self.fuses("behind")):
            return _add(x_BRD, out)
        block.handed = block._normalize("input_layernorm", x_BRD, out, block._quantizes(x_BRD))
        return block.handed[0]

    def _quantizes(self, x_BRD: Tensor) -> bool:
        attention: Any = self.self_attention
        has_fused_quantization = self.fuses("self_attention.query_key_value")
        return has_fused_quantization and _is_quantized(attention.query_key_value, x_BRD)

    def _normalize(self, name: str, x: Tensor, y: Any, quantizes: bool) -> tuple[Tensor, Any]:
        """By the kernel, if the norm is ours; what another one makes is not quantized here."""
        from .inference_triton import add_rms_norm  # takes Triton

        norm = getattr(self, name)
        if self.fuses(name):
            return add_rms_norm(x, norm, y, quantizes)
        added = x if y is None else _add(x, y)
        return added, norm(added)


class InferenceSelfAttention(SelfAttention):
    """Rotates queries and keys where they are. Of one id of each row, writes its key and value to a
    cache of fixed size as it rotates, and attends to the cache's parts side by side."""

    fuses: Callable[[str], bool]
    overwrites: Callable[[str], bool]

    def forward(
        self, x_BRD: Any, cos, sin, attention_mask, past_key_values, cache_update, attention_kwargs
    ) -> Any:
        given = cos, sin, attention_mask, past_key_values, cache_update, attention_kwargs
        kept = self._kept(x_BRD, attention_mask, past_key_values, cache_update)
        if kept is None:
            return super().forward(x_BRD, *given)
        from .inference_triton import flash_decode, rope_and_update_cache  # takes Triton

        heads = _product(self, "query_key_value", x_BRD)
        query_BHC = rope_and_update_cache(heads, self.split_sizes, cos, sin, kept)
        quantizes = (
            self.fuses("dense")
            and _is_quantized(self.dense, heads)
            and skinny_gemm.is_supported(len(query_BHC), self.dense.weight)
            and self.head_dim == skinny_gemm.WIDTH
        )
        attended = flash_decode(query_BHC, kept, attention_mask, quantizes)
        return _last_product(self, "dense", attended)

    def _kept(self, x: Any, mask: Any, cache: Any, cache_update: Any) -> Any:
        """The cache's layer, if it is of fixed size and filled, there is one id of each row, and
        the kernels take its keys and this mask; else None."""
        is_filled = HAS_COUNTERS and is_static(cache) and not cache_update[0]
        if not is_filled or x.shape[1] != 1:
            return None
        kept: Any = cache.layers[self.layer_idx]
        is_kept = type(kept) is StaticLayer and kept.is_initialized and not cache.offloading
        if not is_kept or not _takes(kept.keys):
            return None
        rows, _, room, _ = kept.keys.shape
        fits = (
            self.config._attn_implementation == "sdpa"
            and self.num_key_value_groups <= MOST_HEADS
            and self.head_dim in SUPPORTED_HEAD_DIMS
            and isinstance(mask, Tensor)
            and mask.dtype == torch.bool
            and mask.shape in ((1, 1, 1, room), (rows, 1, 1, room))
            and kept.keys.dtype == kept.values.dtype == x.dtype
            and kept.keys.is_contiguous()
            and num_sms(kept.keys.device) > 0
        )
        return kept if fits else None

    def rotate(self, heads_BRHC: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        fits = self.head_dim in SUPPORTED_HEAD_DIMS and heads_BRHC.is_contiguous()
        if not (_takes(heads_BRHC) and fits and self.overwrites("query_key_value")):
            return super().rotate(heads_BRHC, cos, sin)
        from .inference_triton import rotate  # takes Triton

        queries, groups, _ = self.split_sizes
        rotate(heads_BRHC, queries + groups, cos, sin)
        return heads_BRHC.split(self.split_sizes, dim=2)


def _add(x: Tensor, y: Tensor | Parts) -> Tensor:
    from .skinny_gemm_triton import reduce_partials  # takes Triton

    return reduce_partials(y, x) if isinstance(y, Parts) else x + y


def _is_quantized(linear: nn.Module, x: Any) -> bool:
    """Whether a linear layer that is fused takes :class:`fp8_matmul.Quantized` in the place of
    ``x``: with a scale for each row, or, of a few rows, for groups of channels."""
    return isinstance(linear, Fp8StoredLinear) and x.dtype == torch.bfloat16


def in_parts(layer: nn.Module, x: Any) -> Any:
    """``layer(x)``, of a linear layer that is fused; of a few rows left in parts to the kernel that
    takes them next."""
    linear: Any = layer
    *leading, width = x.shape
    is_taken = isinstance(x, Quantized) or _takes(x)
    if not (is_taken and skinny_gemm.is_supported(math.prod(leading), linear.weight)):
        return layer(x)
    if isinstance(layer, Fp8StoredLinear):
        return linear.in_parts(x) if x.dtype == torch.bfloat16 else layer(x)
    if x.dtype != linear.weight.dtype:
        return layer(x)
    from .skinny_gemm_triton import split_k_matmul  # takes Triton

    parts = split_k_matmul(x.reshape(-1, width), linear.weight)
    return Parts(parts, torch.Size((*leading, len(linear.weight))), x.dtype, None, linear.bias)


def _product(module: Any, name: str, x: Any) -> Any:
    layer = getattr(module, name)
    return in_parts(layer, x) if module.fuses(name) else layer(x)


def _last_product(module: Any, name: str, x: Any) -> Any:
    """In parts to the block; a hook on the module is shown a tensor."""
    return _product(module, name, x) if module.fuses("") else getattr(module, name)(x)


def _takes(x: Any) -> bool:
    """Compilers make such kernels themselves, and see what they are made of."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not isinstance(x, Tensor):
        return False
    # Under autocast a norm's output is fp32.
    return x.is_cuda and x.dtype in DTYPES and not torch.is_autocast_enabled("cuda")
