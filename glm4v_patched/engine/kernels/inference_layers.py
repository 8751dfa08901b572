"""Layers of a model that is only read, on a GPU, whose element-wise steps are one kernel each.

In training layers are compiled, which would take longer than most runs of answers do.
"""

import importlib.util
import math
from itertools import pairwise
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.activations import ACT2FN
from transformers.cache_utils import StaticLayer

from ...remote.cached_rows import is_static
from ...remote.modeling_chatglm import MLP, GLMBlock, GLMTransformer, RMSNorm, SelfAttention
from ...remote.visual import MLP as TowerMLP
from ...remote.visual import PatchEmbedding, TransformerLayer
from ..fp8 import FrozenTowerMLP, HeldLinear, is_bare
from . import skinny_gemm
from .fp8_matmul import Quantised
from .skinny_gemm import Parts, multiprocessors

DTYPES = (torch.bfloat16, torch.float16)
HEAD_CHANNELS = (16, 32, 64, 128)
# Of the keys in a layer of StaticCache. Without them, drawn ids attend as others do.
HAS_COUNTERS = Version(transformers.__version__) >= Version("5.4")
MOST_HEADS = 16
"""That share keys: the smallest block of a tensor core's left factor."""


class ReadPatchEmbedding(PatchEmbedding):
    """Multiplies by the patches: cuDNN's convolution of three channels takes ten times as long."""

    def project(self, pixels_N3SS: Tensor) -> Tensor:
        proj = self.proj
        if not _takes(pixels_N3SS) or type(proj) is not nn.Conv2d or not is_bare(proj):
            return super().project(pixels_N3SS)
        side = proj.kernel_size[0]
        patches = pixels_N3SS.unfold(2, side, side).unfold(3, side, side)
        patches_NPI = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return linear(patches_NPI, proj.weight.flatten(1), proj.bias)


class ReadTowerLayer(TransformerLayer):
    """Normalises, adds and quantises in one step."""

    def layer_forward(self, x_NTV: Tensor, *kept_weights: list[Tensor]) -> Tensor:
        norms = self.input_layernorm, self.post_attention_layernorm
        are_ours = all(type(norm) is nn.LayerNorm and is_bare(norm) for norm in norms)
        if not (_takes(x_NTV) and are_ours and x_NTV.dtype == norms[0].weight.dtype):
            return super().layer_forward(x_NTV, *kept_weights)
        from .inference_triton import add_norm  # takes Triton

        mlp = self.mlp
        quantises = _takes_quantised(mlp, "fc1", x_NTV)
        attended = self.attention(x_NTV, *kept_weights)
        x_NTV, given = add_norm(x_NTV, self.input_layernorm, attended, quantises)
        return add_norm(x_NTV, self.post_attention_layernorm, mlp(given), False)[0]


class ReadTowerMLP(TowerMLP):
    """GELU in the memory of its input."""

    def forward(self, x_NTV: Tensor) -> Tensor:
        wide, activation = self.fc1(x_NTV), self.activation_fn
        is_gelu = type(activation) is type(ACT2FN["gelu"]) and is_bare(activation)
        # A hook on the first layer may have kept its output.
        if not (_takes(wide) and is_gelu and is_bare(self.fc1)):
            return self.fc2(activation(wide))
        from .fp8_triton import activate  # takes Triton

        return self.fc2(activate(wide, "gelu"))


class ReadMLP(MLP):
    """SwiGLU in one step, which quantises if the second product is in fp8."""

    def forward(self, x: Any) -> Any:
        if not (isinstance(x, Quantised) or _takes(x)):
            return super().forward(x)
        from .fp8_triton import activate, quantise_rows  # takes Triton

        last: Any = self.dense_4h_to_h
        wide = in_parts(self.dense_h_to_4h, x)
        if _is_held(last, wide):
            *leading, width = wide.shape
            rows = wide if isinstance(wide, Parts) else wide.reshape(-1, width)
            is_few = skinny_gemm.takes(math.prod(leading), last.weight)
            group = skinny_gemm.channels_of_a_part(last.weight) if is_few else None
            quantised = quantise_rows(rows, None, "swiglu", group)
            given: Any = Quantised(*quantised).reshape(*leading, width // 2)
        else:
            given = activate(wide, "swiglu")
        return _last_product(self, last, given)


class ReadBlock(GLMBlock):
    """Adds, normalises and quantises in one step, for the block behind it, too."""

    behind: "tuple[ReadBlock, ...]" = ()  # in which torch sees no layers
    # What will be its input, and that normalised; kept until its next pass, if a pass ends early.
    handed: tuple[Any, Any] | None = None

    def layer_forward(self, x_BRD: Tensor, *attention_inputs) -> Tensor:
        handed, self.handed = self.handed, None
        if not _takes(x_BRD):
            return super().layer_forward(x_BRD, *attention_inputs)
        if handed is None or handed[0] is not x_BRD:
            handed = _add_rms_norm(x_BRD, self.input_layernorm, None, self._quantises(x_BRD))
        attended = self.self_attention(handed[1], *attention_inputs)
        del handed
        quantises = _takes_quantised(self.mlp, "dense_h_to_4h", x_BRD)
        x_BRD, given = _add_rms_norm(x_BRD, self.post_attention_layernorm, attended, quantises)
        out = self.mlp(given)
        (block,) = self.behind or (None,)
        if block is None or not (is_bare(self) and is_bare(block)):
            return _add(x_BRD, out)
        block.handed = _add_rms_norm(x_BRD, block.input_layernorm, out, block._quantises(x_BRD))
        return block.handed[0]

    def _quantises(self, x_BRD: Tensor) -> bool:
        return _takes_quantised(self.self_attention, "query_key_value", x_BRD)


class ReadSelfAttention(SelfAttention):
    """Rotates queries and keys where they are. Of one id of each row, writes its key and value to a
    cache of fixed size as it rotates, and attends to the cache's parts side by side."""

    def forward(
        self, x_BRD: Any, cos, sin, attention_mask, past_key_values, fills, attention_kwargs
    ) -> Any:
        given = cos, sin, attention_mask, past_key_values, fills, attention_kwargs
        kept = self._kept(x_BRD, attention_mask, past_key_values, fills)
        if kept is None:
            return super().forward(x_BRD, *given)
        from .inference_triton import attend_to_kept, rotate_and_keep  # takes Triton

        heads = in_parts(self.query_key_value, x_BRD)
        query_BHC = rotate_and_keep(heads, self.split_sizes, cos, sin, kept)
        quantises = (
            _is_held(self.dense, heads)
            and skinny_gemm.takes(len(query_BHC), self.dense.weight)
            and self.head_dim == skinny_gemm.WIDTH
        )
        attended = attend_to_kept(query_BHC, kept, attention_mask, quantises)
        return _last_product(self, self.dense, attended)

    def _kept(self, x: Any, mask: Any, cache: Any, fills: Any) -> Any:
        """The cache's layer, if it is of fixed size and filled, there is one id of each row, and
        the kernels take its keys and this mask; else None."""
        is_filled = HAS_COUNTERS and is_static(cache) and not fills[0]
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
            and self.head_dim in HEAD_CHANNELS
            and isinstance(mask, Tensor)
            and mask.dtype == torch.bool
            and mask.shape in ((1, 1, 1, room), (rows, 1, 1, room))
            and kept.keys.dtype == kept.values.dtype == x.dtype
            and kept.keys.is_contiguous()
            and multiprocessors(kept.keys.device) > 0
        )
        return kept if fits else None

    def rotate(self, heads_BRHC: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        fits = self.head_dim in HEAD_CHANNELS and heads_BRHC.is_contiguous()
        # A hook on the layer before may have kept its output.
        if not (_takes(heads_BRHC) and fits and is_bare(self.query_key_value)):
            return super().rotate(heads_BRHC, cos, sin)
        from .inference_triton import rotate  # takes Triton

        queries, groups, _ = self.split_sizes
        rotate(heads_BRHC, queries + groups, cos, sin)
        return heads_BRHC.split(self.split_sizes, dim=2)


def _add(x: Tensor, y: Tensor | Parts) -> Tensor:
    from .skinny_gemm_triton import sum_of_parts  # takes Triton

    return sum_of_parts(y, x) if isinstance(y, Parts) else x + y


def _add_rms_norm(x: Tensor, norm: nn.Module, y: Any, quantises: bool) -> tuple[Tensor, Any]:
    """By the kernel, if the norm is ours and bare; what another one makes is not quantised here."""
    from .inference_triton import add_rms_norm  # takes Triton

    if type(norm) is RMSNorm and is_bare(norm):
        return add_rms_norm(x, norm, y, quantises)
    added = x if y is None else _add(x, y)
    return added, norm(added)


def _takes_quantised(module: nn.Module, first: str, x: Any) -> bool:
    """Whether a module, or rather its first layer, takes ``Quantised`` in the place of ``x``."""
    is_ours = type(module) in (FrozenTowerMLP, ReadMLP, ReadSelfAttention) and is_bare(module)
    return is_ours and _is_held(getattr(module, first), x)


def _is_held(layer: nn.Module, x: Any) -> bool:
    """Whether a layer takes :class:`fp8_matmul.Quantised` in the place of ``x``: with a scale for
    each row, or, of a few rows, for groups of channels."""
    return type(layer) is HeldLinear and x.dtype == torch.bfloat16 and is_bare(layer)


def in_parts(layer: nn.Module, x: Any) -> Any:
    """``layer(x)``; of a few rows, if nothing is wrapped around the layer, left in parts to the
    kernel that takes them next."""
    linear: Any = layer
    *leading, width = x.shape
    if not (
        is_bare(layer)
        and type(layer) in (nn.Linear, HeldLinear)
        and type(linear.weight) is nn.Parameter  # no package's that holds it in fewer bytes
        and (isinstance(x, Quantised) or _takes(x))
        and skinny_gemm.takes(math.prod(leading), linear.weight)
    ):
        return layer(x)
    if type(layer) is HeldLinear:
        return linear.in_parts(x) if x.dtype == torch.bfloat16 else layer(x)
    if x.dtype != linear.weight.dtype:
        return layer(x)
    from .skinny_gemm_triton import parts_of_product  # takes Triton

    parts = parts_of_product(x.reshape(-1, width), linear.weight)
    return Parts(parts, torch.Size((*leading, len(linear.weight))), x.dtype, None, linear.bias)


def _last_product(module: nn.Module, layer: nn.Module, x: Any) -> Any:
    """In parts to the block; a hook on the module is shown a tensor."""
    return in_parts(layer, x) if is_bare(module) else layer(x)


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
        if type(module) is GLMBlock:
            for child in (module.self_attention, module.mlp):
                child.__class__ = READ_IN_BLOCKS.get(type(child), type(child))
        module.__class__ = READ.get(type(module), type(module))
    for module in model.modules():
        if isinstance(module, GLMTransformer):
            for block, behind in pairwise(module.layers):
                if {type(block), type(behind)} == {ReadBlock}:
                    vars(block)["behind"] = (behind,)


READ: dict[type, type] = {
    PatchEmbedding: ReadPatchEmbedding,
    TransformerLayer: ReadTowerLayer,
    TowerMLP: ReadTowerMLP,
    GLMBlock: ReadBlock,
}
READ_IN_BLOCKS: dict[type, type] = {SelfAttention: ReadSelfAttention, MLP: ReadMLP}
"""That may leave parts, which others than blocks do not take."""
