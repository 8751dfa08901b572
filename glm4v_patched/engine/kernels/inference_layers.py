"""Layers for inference on a GPU whose element-wise steps are one Triton kernel each.

In training the layers are compiled instead, but compiling takes longer than most inference runs.

Each class computes what some of its submodules would compute. The table in
:mod:`..implementations` lists these submodules. That module also adds two methods, with which a
class checks its submodules in each call. ``can_fuse(name)`` returns whether the class may compute
what a submodule would, and ``can_overwrite(name)`` whether it may modify a submodule's output in
place.
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
from ...remote.visual import PatchEmbedding, TransformerLayer
from ...remote.visual import VisionMLP as TowerMLP
from . import skinny_gemm
from .fp8_linear import Fp8StoredLinear
from .fp8_matmul import Fp8Tensor
from .skinny_gemm import SplitKPartials, num_sms

# Shapes: N images, S side of an image in pixels, P patches, I input channels of a patch, T tower
# tokens, V hidden size of the tower; B sequences, R positions, D hidden size of the language model,
# H heads, C channels of a head.

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
# Channels of a head: Triton needs a power of two, and its products at least 16.
SUPPORTED_HEAD_DIMS = (16, 32, 64, 128)
# StaticCache counts its keys on the device since transformers 5.4 (cumulative_length). With older
# releases, decode steps use torch's attention.
HAS_CUMULATIVE_LENGTH = Version(transformers.__version__) >= Version("5.4")
MAX_HEADS_PER_GROUP = 16
"""Largest number of query heads that may share keys: the kernel multiplies them as one block of 16
rows (``BLOCK_HEADS`` of :mod:`inference_triton`)."""


class InferencePatchEmbedding(PatchEmbedding):
    """Patch embedding by a matrix product: cuDNN's convolution of three channels takes ten times as
    long."""

    def project(self, pixels_N3SS: Tensor) -> Tensor:
        proj = self.proj
        if not _can_use_kernels(pixels_N3SS):
            return super().project(pixels_N3SS)
        side = proj.kernel_size[0]
        patches = pixels_N3SS.unfold(2, side, side).unfold(3, side, side)
        patches_NPI = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return linear(patches_NPI, proj.weight.flatten(1), proj.bias)


class InferenceTowerLayer(TransformerLayer):
    """Tower layer that normalizes, adds and quantizes in one kernel."""

    can_fuse: Callable[[str], bool]

    def layer_forward(self, x_NTV: Tensor, *attention_collector: list[Tensor]) -> Tensor:
        if not (_can_use_kernels(x_NTV) and x_NTV.dtype == self.input_layernorm.weight.dtype):
            return super().layer_forward(x_NTV, *attention_collector)
        from .inference_triton import layer_norm_add  # needs Triton

        quantizes = x_NTV.dtype == torch.bfloat16 and self.can_fuse("mlp.fc1")
        attended = self.attention(x_NTV, *attention_collector)
        x_NTV, mlp_input = layer_norm_add(x_NTV, self.input_layernorm, attended, quantizes)
        mlp_output = self.mlp(mlp_input)
        return layer_norm_add(x_NTV, self.post_attention_layernorm, mlp_output, False)[0]


class InferenceTowerMLP(TowerMLP):
    """Tower MLP that computes GELU in place."""

    def forward(self, x_NTV: Tensor) -> Tensor:
        fc1_output = self.fc1(x_NTV)
        if not _can_use_kernels(fc1_output):
            return self.fc2(self.activation_fn(fc1_output))
        from .fp8_triton import activate  # needs Triton

        return self.fc2(activate(fc1_output, "gelu"))


class InferenceMLP(MLP):
    """MLP with SwiGLU in one kernel, which also quantizes if ``dense_4h_to_h`` is in fp8."""

    can_fuse: Callable[[str], bool]

    def forward(self, x: Any) -> Any:
        if not (isinstance(x, Fp8Tensor) or _can_use_kernels(x)):
            return super().forward(x)
        from .fp8_triton import activate, activate_and_quantize_rows  # needs Triton

        down_proj: Any = self.dense_4h_to_h
        gate_up = _fused_linear(self, "dense_h_to_4h", x)
        if self.can_fuse("dense_4h_to_h") and _takes_fp8(down_proj, gate_up):
            *leading, channels = gate_up.shape
            rows = gate_up if isinstance(gate_up, SplitKPartials) else gate_up.reshape(-1, channels)
            is_skinny = skinny_gemm.is_supported(math.prod(leading), down_proj.weight)
            group_size = skinny_gemm.channels_per_split(down_proj.weight) if is_skinny else None
            quantized = activate_and_quantize_rows(rows, None, "swiglu", group_size)
            activated: Any = Fp8Tensor(*quantized).reshape(*leading, channels // 2)
        else:
            activated = activate(gate_up, "swiglu")
        return _output_linear(self, "dense_4h_to_h", activated)


class InferenceBlock(GLMBlock):
    """Block that adds, normalizes and quantizes in one kernel.

    It also normalizes the next block's input, together with its own last addition.
    """

    can_fuse: Callable[[str], bool]
    next_block: "InferenceBlock | None" = None  # not registered as a submodule
    # The input of this block's next call and its normalized copy, both computed by the previous
    # block. If a forward pass ends early, they stay in memory until the next forward pass.
    pending_norm: tuple[Any, Any] | None = None

    def layer_forward(self, x_BRD: Tensor, *attention_inputs) -> Tensor:
        pending, self.pending_norm = self.pending_norm, None
        if not _can_use_kernels(x_BRD):
            return super().layer_forward(x_BRD, *attention_inputs)
        if pending is None or pending[0] is not x_BRD:
            quantizes = self._quantizes_attention_input(x_BRD)
            pending = self._add_and_normalize("input_layernorm", x_BRD, None, quantizes)
        attended = self.self_attention(pending[1], *attention_inputs)
        del pending  # frees the normalized copy
        mlp: Any = self.mlp
        quantizes = self.can_fuse("mlp.dense_h_to_4h") and _takes_fp8(mlp.dense_h_to_4h, x_BRD)
        x_BRD, mlp_input = self._add_and_normalize(
            "post_attention_layernorm", x_BRD, attended, quantizes
        )
        out = mlp(mlp_input)
        next_block = self.next_block
        if next_block is None or not (self.can_fuse("") and self.can_fuse("next_block")):
            return _add(x_BRD, out)
        quantizes = next_block._quantizes_attention_input(x_BRD)
        pending = next_block._add_and_normalize("input_layernorm", x_BRD, out, quantizes)
        next_block.pending_norm = pending
        return pending[0]

    def _quantizes_attention_input(self, x_BRD: Tensor) -> bool:
        attention: Any = self.self_attention
        is_fused = self.can_fuse("self_attention.query_key_value")
        return is_fused and _takes_fp8(attention.query_key_value, x_BRD)

    def _add_and_normalize(
        self, name: str, x: Tensor, y: Any, quantizes: bool
    ) -> tuple[Tensor, Any]:
        """Return ``x + y``, and this sum normalized by the submodule ``name``.

        One kernel computes both if the submodule may be fused. Otherwise the submodule is called,
        and its output is not quantized.
        """
        from .inference_triton import add_rms_norm  # needs Triton

        norm = getattr(self, name)
        if self.can_fuse(name):
            return add_rms_norm(x, norm, y, quantizes)
        total = x if y is None else _add(x, y)
        return total, norm(total)


class InferenceSelfAttention(SelfAttention):
    """Attention with RoPE in place and, in decode steps with a static cache, flash-decoding.

    A decode step has one new token per sequence. One kernel rotates the token's query and key, and
    caches its key and value. Flash-decoding then splits the cached keys over thread blocks.
    """

    can_fuse: Callable[[str], bool]
    can_overwrite: Callable[[str], bool]

    def forward(
        self, x_BRD: Any, cos, sin, attention_mask, past_key_values, cache_update, attention_kwargs
    ) -> Any:
        cache_layer = self._decode_cache_layer(x_BRD, attention_mask, past_key_values, cache_update)
        if cache_layer is None:
            inputs = cos, sin, attention_mask, past_key_values, cache_update, attention_kwargs
            return super().forward(x_BRD, *inputs)
        from .inference_triton import flash_decode, rope_and_update_cache  # needs Triton

        qkv = _fused_linear(self, "query_key_value", x_BRD)
        query_BHC = rope_and_update_cache(
            qkv, self.split_sizes, cos, sin, self.config.rotary_distance, cache_layer
        )
        # flash_decode makes one scale per head, and the GEMM takes one scale per block of K.
        quantizes = (
            self.can_fuse("dense")
            and _takes_fp8(self.dense, qkv)
            and skinny_gemm.is_supported(len(query_BHC), self.dense.weight)
            and self.head_dim == skinny_gemm.BLOCK_K
        )
        attended = flash_decode(query_BHC, cache_layer, attention_mask, quantizes)
        return _output_linear(self, "dense", attended)

    def _decode_cache_layer(self, x: Any, mask: Any, cache: Any, cache_update: Any) -> Any:
        """Return this layer's cache if the kernels can do this step, else None.

        The kernels can do it if the cache is static and not empty, each sequence has one new token,
        and the kernels support the keys and the mask.
        """
        if not HAS_CUMULATIVE_LENGTH or not is_static(cache):
            return None
        cache_was_empty, _ = cache_update
        if cache_was_empty or x.shape[1] != 1:
            return None
        cache_layer: Any = cache.layers[self.layer_idx]
        is_on_device = (
            type(cache_layer) is StaticLayer and cache_layer.is_initialized and not cache.offloading
        )
        if not is_on_device or not _can_use_kernels(cache_layer.keys):
            return None
        keys = cache_layer.keys
        batch, _, max_cache_len, _ = keys.shape
        is_supported = (
            self.config._attn_implementation == "sdpa"
            and self.num_key_value_groups <= MAX_HEADS_PER_GROUP
            and self.head_dim in SUPPORTED_HEAD_DIMS
            and isinstance(mask, Tensor)
            and mask.dtype == torch.bool
            and mask.shape in ((1, 1, 1, max_cache_len), (batch, 1, 1, max_cache_len))
            and keys.dtype == cache_layer.values.dtype == x.dtype
            and keys.is_contiguous()
            and num_sms(keys.device) > 0
        )
        return cache_layer if is_supported else None

    def rotate(self, heads_BRHC: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        is_supported = self.head_dim in SUPPORTED_HEAD_DIMS and heads_BRHC.is_contiguous()
        can_use_kernels = _can_use_kernels(heads_BRHC) and is_supported
        if not (can_use_kernels and self.can_overwrite("query_key_value")):
            return super().rotate(heads_BRHC, cos, sin)
        from .inference_triton import rope_in_place  # needs Triton

        num_rotated_heads = sum(self.split_sizes[:2])  # queries and keys
        rope_in_place(heads_BRHC, num_rotated_heads, cos, sin, self.config.rotary_distance)
        return heads_BRHC.split(self.split_sizes, dim=2)


def _add(x: Tensor, y: Tensor | SplitKPartials) -> Tensor:
    """Return ``x + y``; partial sums in ``y`` are reduced."""
    from .skinny_gemm_triton import reduce_partials  # needs Triton

    return reduce_partials(y, x) if isinstance(y, SplitKPartials) else x + y


def _takes_fp8(layer: nn.Module, x: Any) -> bool:
    """Return whether the input of a linear layer that may be fused can be an :class:`Fp8Tensor`.

    This tensor has one scale per row or, for a skinny GEMM, may have one per group of channels.

    Args:
        x: A tensor of the dtype that the input would have otherwise.
    """
    return isinstance(layer, Fp8StoredLinear) and x.dtype == torch.bfloat16


def linear_or_partials(layer: nn.Module, x: Any) -> Any:
    """Return ``layer(x)`` of a linear layer that may be fused.

    If ``x`` has few rows, the result is :class:`SplitKPartials`, which the next kernel reduces.
    """
    module: Any = layer
    *leading, channels = x.shape
    has_kernel = isinstance(x, Fp8Tensor) or _can_use_kernels(x)
    if not (has_kernel and skinny_gemm.is_supported(math.prod(leading), module.weight)):
        return layer(x)
    if isinstance(layer, Fp8StoredLinear):
        return module.matmul_partials(x) if x.dtype == torch.bfloat16 else layer(x)
    if x.dtype != module.weight.dtype:
        return layer(x)
    from .skinny_gemm_triton import split_k_matmul  # needs Triton

    partials = split_k_matmul(x.reshape(-1, channels), module.weight)
    shape = torch.Size((*leading, len(module.weight)))
    return SplitKPartials(partials, shape, x.dtype, None, module.bias)


def _fused_linear(module: Any, name: str, x: Any) -> Any:
    """Return the output of a linear submodule, as partial sums only if it may be fused."""
    layer = getattr(module, name)
    return linear_or_partials(layer, x) if module.can_fuse(name) else layer(x)


def _output_linear(module: Any, name: str, x: Any) -> Any:
    """Apply the last linear submodule of a module to ``x``.

    The output may be partial sums, which the block reduces. If the module itself has hooks, the
    output is a tensor, as the hooks expect it.
    """
    return _fused_linear(module, name, x) if module.can_fuse("") else getattr(module, name)(x)


def _can_use_kernels(x: Any) -> bool:
    """Return whether the Triton kernels may compute with ``x``: without gradients, on a GPU.

    Compiled code does not use the kernels, because the compiler fuses the published code itself.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not isinstance(x, Tensor):
        return False
    # Under autocast the output of a norm is fp32.
    return x.is_cuda and x.dtype in KERNEL_DTYPES and not torch.is_autocast_enabled("cuda")
