"""Chooses which class computes each module, in training and in inference, and says why.

A row of :data:`TABLE` names a class of the model, an implementation of it (in :mod:`.kernels`) and
when it is used. :func:`use_implementations` changes the classes of a model's modules accordingly;
:func:`explain` says which implementation each module has, and why not a faster one.

An implementation may compute by itself what its submodules compute. Hooks, adapters, quantized
weights and other wrappers around such a submodule would then be passed over, so that
:func:`find_blocker` looks for them in every call: they come and go while a model is in use.
"""

import gc
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import ACT2FN

from ..remote import visual
from ..remote.modeling_chatglm import MLP, GLMBlock, GLMTransformer, RMSNorm, SelfAttention
from .activation_checkpointing import checkpointed_layers
from .fp8 import MULTIPLE, is_fp8_candidate, bf16_reason
from .kernels import flash_attention_3
from .kernels.flash_attention_3 import FrozenTowerAttention
from .kernels.fp8_linear import FrozenTowerMLP, Fp8StoredLinear, Fp8DynamicLinear
from .kernels.inference_layers import (
    InferenceBlock,
    InferenceMLP,
    InferencePatchEmbedding,
    InferenceSelfAttention,
    InferenceTowerLayer,
    InferenceTowerMLP,
)
from .kernels.cuda_graphs import GraphedTower
from .options import EngineOptions, trains_tower

Kinds = tuple[type[nn.Module], ...]
ANY: Kinds = ()
"""Any class: it is called, and what it returns is written over."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """What a model is used for, as far as implementations depend on it."""

    purpose: str  # one of TRAINING, INFERENCE, CUDA_GRAPHS
    fp8: bool = False
    stores_fp8: bool = False  # frozen weights, between their uses
    stores_transposed: bool = False
    has_fused_quantization: bool = False  # compiled, or by kernels that quantize what they make
    trains_tower: bool = False

    @classmethod
    def training(cls, options: EngineOptions) -> "Use":
        return cls(
            purpose=TRAINING,
            fp8=options.fp8,
            stores_fp8=options.stores_fp8,
            stores_transposed=options.stores_transposed,
            has_fused_quantization=options.compile is True,
            trains_tower=trains_tower(options.trained),
        )

    @classmethod
    def inference(cls, fp8: bool = False) -> "Use":
        return cls(purpose=INFERENCE, fp8=fp8, stores_fp8=fp8, has_fused_quantization=True)


TRAINING, INFERENCE, CUDA_GRAPHS = "training", "inference", "CUDA graphs"


class Place(NamedTuple):
    """A module of a model, and the layer of one of the towers that it is in."""

    module: Any
    layer: nn.Module | None = None
    name: str = ""  # in the layer

    @property
    def part(self) -> str:
        """One of :data:`options.PARTS`, of modules in layers."""
        if self.layer is None:
            return ""
        return "language_model" if isinstance(self.layer, GLMBlock) else "tower"

    @property
    def inner_name(self) -> str:
        """The last part of the name, of a linear layer inside of LoRA's, too."""
        return self.name.removesuffix(".base_layer").rpartition(".")[2]


@dataclass(frozen=True)
class Row:
    """One implementation, for modules that are exactly of the class ``module``."""

    module: type[nn.Module]
    implementation: type[nn.Module]
    purposes: tuple[str, ...]
    condition: Callable[[Place, Use], str | None]  # why it cannot be used
    method: str = "forward"  # that it computes
    backend: str = "cuda"  # or "hip": rows of the other one are as if they were not there
    # Submodules that it computes: where that may not be done, the module computes as published.
    needs: Mapping[str, Kinds] = field(default_factory=dict)
    # Others that it can compute, or hand what only ours take; "" is the module itself.
    fuses: Mapping[str, Kinds] = field(default_factory=dict)
    set_up: Callable[[Any, Place, Use], None] | None = None


def find_blocker(module: Any, kinds: Kinds = ANY, hooks_block: bool = True) -> str | None:
    """Return why what a module computes may not be computed by another one, or None.

    Args:
        kinds: Classes that are known, to the exclusion of their subclasses; implementations of the
            table by their own class.
        hooks_block: Hooks are in the way, too: of a module that stays, and is called, they are not.
    """
    kind = type(module)
    if kinds and kind not in kinds and IMPLEMENTED.get(kind) not in kinds:
        return f"it is a {kind.__module__}.{kind.__qualname__}"
    if "forward" in module.__dict__:
        return "its forward was replaced, as offloading does"
    if hooks_block and (module._forward_hooks or module._forward_pre_hooks):
        return "it has hooks"
    # Packages that hold weights in fewer bytes leave torch's own class.
    if kind is nn.Linear and kinds and type(module.weight) is not nn.Parameter:
        return f"its weight is a {type(module.weight).__qualname__}"
    return None


def _fp8_is_out(place: Place, use: Use) -> str | None:
    linear = place.module
    if not use.fp8:
        return "fp8 is off"
    if reason := bf16_reason(place.part, place.inner_name, use.has_fused_quantization):
        return reason
    if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
        sizes = f"{linear.in_features} x {linear.out_features}"
        return f"its size is {sizes}, and fp8 takes multiples of {MULTIPLE}"
    return find_blocker(linear, (nn.Linear, Linear), hooks_block=False)


def _holding_is_out(place: Place, use: Use) -> str | None:
    if reason := _fp8_is_out(place, use):
        return reason
    is_trained = use.purpose == TRAINING and place.module.weight.requires_grad
    if is_trained or not use.stores_fp8:
        return "its weight is trained, saved, or gathered by hpZ"
    return None


def _hold(linear: Fp8StoredLinear, place: Place, use: Use) -> None:
    has_gradient = place.part == "language_model" or use.trains_tower
    linear.quantize_weight(stores_transposed=use.stores_transposed and has_gradient)


def _fused_gelu_is_out(place: Place, use: Use) -> str | None:
    if not use.fp8:
        return "fp8 is off"
    # In training of compiled layers: they are gathered whole under ZeRO-3, for fc1 and fc2 are not
    # called.
    if not use.has_fused_quantization:
        return "layers are not compiled"
    return "the tower is trained" if use.trains_tower else None


def _flash_attention_is_out(place: Place, use: Use) -> str | None:
    config = place.module.config
    if use.trains_tower:
        return "the tower is trained, and FlashAttention-3 has no backward pass here"
    if config._attn_implementation != "sdpa":
        return f"attn_implementation is {config._attn_implementation}, not sdpa"
    return flash_attention_3.find_fa3_problem(config.vision.hidden_size // place.module.num_heads)


def _triton_is_out(_place: Place, _use: Use) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed, which torch for GPUs brings"
    return None


def _block_is_out(place: Place, use: Use) -> str | None:
    """Of modules that may return partial sums, which blocks alone take."""
    layer: Any = place.layer
    if layer is None or find_blocker(layer, (GLMBlock, InferenceBlock), hooks_block=False):
        return "it is not in a GLMBlock, or in one that something is wrapped around"
    if place.module not in (layer.self_attention, layer.mlp):
        return "something is wrapped around it"
    return _triton_is_out(place, use)


def _recording_is_out(place: Place, _use: Use) -> str | None:
    """Hooks inside would be called while it is recorded, and not when it is replayed."""
    inner = [module for module in place.module.modules() if module is not place.module]
    reason = next((found for each in inner if (found := find_blocker(each))), None)
    return reason and f"of a module in it: {reason}"


GELU: Kinds = (type(ACT2FN["gelu"]),)
IN_FP8: Kinds = (Linear, Fp8StoredLinear)
LINEAR: Kinds = (nn.Linear, Fp8StoredLinear)

# Of several for one class, the faster one is first.
TABLE = (
    Row(nn.Linear, Fp8StoredLinear, (TRAINING, INFERENCE), _holding_is_out, set_up=_hold),
    Row(nn.Linear, Linear, (TRAINING,), _fp8_is_out),
    Row(visual.Attention, FrozenTowerAttention, (TRAINING, INFERENCE), _flash_attention_is_out),
    Row(
        visual.VisionMLP,
        FrozenTowerMLP,
        (TRAINING, INFERENCE),
        _fused_gelu_is_out,
        needs={"fc1": IN_FP8, "activation_fn": GELU, "fc2": IN_FP8},
    ),
    Row(
        visual.VisionMLP,
        InferenceTowerMLP,
        (INFERENCE,),
        _triton_is_out,
        needs={"fc1": ANY, "activation_fn": GELU},
    ),
    Row(
        visual.PatchEmbedding,
        InferencePatchEmbedding,
        (INFERENCE,),
        _triton_is_out,
        method="project",
        needs={"proj": (nn.Conv2d,)},
    ),
    Row(
        visual.TransformerLayer,
        InferenceTowerLayer,
        (INFERENCE,),
        _triton_is_out,
        method="layer_forward",
        needs={"input_layernorm": (nn.LayerNorm,), "post_attention_layernorm": (nn.LayerNorm,)},
        fuses={"mlp": (FrozenTowerMLP,), "mlp.fc1": (Fp8StoredLinear,)},
    ),
    Row(
        SelfAttention,
        InferenceSelfAttention,
        (INFERENCE,),
        _block_is_out,
        fuses={"": ANY, "query_key_value": LINEAR, "dense": LINEAR},
    ),
    Row(
        MLP,
        InferenceMLP,
        (INFERENCE,),
        _block_is_out,
        fuses={"": ANY, "dense_h_to_4h": LINEAR, "dense_4h_to_h": LINEAR},
    ),
    Row(
        GLMBlock,
        InferenceBlock,
        (INFERENCE,),
        _triton_is_out,
        method="layer_forward",
        fuses={
            "": ANY,
            "input_layernorm": (RMSNorm,),
            "self_attention": (InferenceSelfAttention,),
            "self_attention.query_key_value": (Fp8StoredLinear,),
            "post_attention_layernorm": (RMSNorm,),
            "mlp": (InferenceMLP,),
            "mlp.dense_h_to_4h": (Fp8StoredLinear,),
            "behind": (InferenceBlock,),
        },
    ),
    Row(
        visual.EVA2CLIPModel,
        GraphedTower,
        (CUDA_GRAPHS,),
        _recording_is_out,
        set_up=lambda tower, *_: tower.set_up(),
    ),
)


class Guarded:
    """Its attributes are the classes that :func:`_guarded` makes: pickle finds them by name."""


def _guarded(row: Row) -> type[nn.Module]:
    """Return the class that modules get: the implementation, which asks the guard in every call."""
    if not row.needs and not row.fuses:
        return row.implementation
    published, fast = getattr(row.module, row.method), getattr(row.implementation, row.method)

    def compute(self: Any, *given: Any, **named: Any) -> Any:
        for name, kinds in row.needs.items():
            if find_blocker(getattr(self, name), kinds) is not None:
                return published(self, *given, **named)
        return fast(self, *given, **named)

    def fuses(self: Any, name: str) -> bool:
        outer, _, inner = name.rpartition(".")
        if outer and not fuses(self, outer):
            return False
        module = getattr(self, outer) if outer else self
        return find_blocker(getattr(module, inner) if inner else module, row.fuses[name]) is None

    def overwrites(self: Any, name: str) -> bool:
        return find_blocker(getattr(self, name)) is None

    name = row.implementation.__name__
    members: dict[str, Any] = {row.method: compute, "fuses": fuses, "overwrites": overwrites}
    members |= {"__module__": __name__, "__qualname__": f"{Guarded.__name__}.{name}"}
    guarded = type(name, (row.implementation,), members)
    setattr(Guarded, name, guarded)
    return guarded


CLASSES = {row.implementation: _guarded(row) for row in TABLE}
IMPLEMENTED: dict[type, type] = {made: of for of, made in CLASSES.items()}


def become(module: Any, implementation: type[nn.Module]) -> None:
    """Have a module compute by an implementation of the table, whatever its row's condition."""
    module.__class__ = CLASSES[implementation]


def use_implementations(model: nn.Module, use: Use) -> None:
    """Give modules of a model the implementations of the table whose conditions hold.

    Call it when adapters are in and what is trained is chosen, and before what shards or wraps the
    model (DeepSpeed, DDP, FSDP2). Classes change and, in fp8, frozen weights, layer by layer: they
    are quantized, and under ZeRO-3 sharded again.
    """
    for row in _rows():
        for place in _places(model):
            if type(place.module) is row.module and _why_not_row(row, place, use) is None:
                become(place.module, row.implementation)
                if row.set_up is not None:
                    row.set_up(place.module, place, use)
    for module in model.modules():
        if isinstance(module, GLMTransformer):
            for block, behind in pairwise(module.layers):
                if isinstance(block, InferenceBlock) and isinstance(behind, InferenceBlock):
                    vars(block)["behind"] = behind  # torch does not see it
    if use.fp8:
        gc.collect()  # what DeepSpeed hung on weights refers to itself


def _rows() -> list[Row]:
    """Return the rows for the GPUs that this torch was built for."""
    backend = "hip" if torch.version.hip else "cuda"
    return [row for row in TABLE if row.backend == backend]


def _why_not_row(row: Row, place: Place, use: Use) -> str | None:
    if use.purpose not in row.purposes:
        return f"it is for {' and '.join(row.purposes)}"
    if reason := row.condition(place, use):
        return reason
    for name, kinds in row.needs.items():
        if reason := find_blocker(getattr(place.module, name), kinds, hooks_block=False):
            return f"of its {name}: {reason}"
    return None


def _places(model: nn.Module) -> Iterator[Place]:
    layers = [*checkpointed_layers(model)]
    inside = {id(m): Place(m, layer, n) for layer in layers for n, m in layer.named_modules()}
    for module in model.modules():
        yield inside.get(id(module)) or Place(module)


class Explained(NamedTuple):
    """``implementation`` is None where a module computes as published; ``reason`` says why not by a
    faster one, or why not at the moment, None where there is none."""

    module: str
    implementation: type[nn.Module] | None
    reason: str | None


def explain(model: nn.Module, use: Use) -> list[Explained]:
    """Say of all modules of which the table knows implementations for this use which one they
    have."""
    found = []
    for place in _places(model):
        kind = type(place.module)
        rows = [row for row in _rows() if isinstance(place.module, row.module)]
        rows = [row for row in rows if use.purpose in row.purposes]
        is_linear = bool(rows) and rows[0].module is nn.Linear
        is_other_linear = is_linear and not is_fp8_candidate(place.part, place.inner_name)
        if not rows or is_other_linear:  # outside of the towers' layers, or an adapter's
            continue
        has = next((row for row in rows if row.implementation is IMPLEMENTED.get(kind)), None)
        if has is not None:
            reason = _hindrance(has, place.module)
            if reason is None and has is not rows[0]:
                reason = _why_not_row(rows[0], place, use)
        elif kind is not rows[0].module:  # a subclass, of adapters or of another package
            reason = find_blocker(place.module, (rows[0].module,))
        else:
            reason = _why_not_row(rows[-1], place, use)
        implementation = None if has is None else has.implementation
        name = place.inner_name if is_linear else rows[0].module.__name__
        title = f"{place.part.replace('_', ' ')} {name}".strip()
        found.append(Explained(title, implementation, reason))
    return found


def _hindrance(row: Row, module: Any) -> str | None:
    """Why an implementation that a module has leaves something to others at the moment."""
    for name, kinds in row.needs.items():
        if reason := find_blocker(getattr(module, name), kinds):
            return f"as published at the moment, for its {name}: {reason}"
    for name in row.fuses:
        inner = getattr(module, name, None) if name and "." not in name else None
        if isinstance(inner, nn.Module) and (reason := find_blocker(inner)):
            return f"without its {name}: {reason}"
    return None


def summarize(explained: Iterable[Explained]) -> list[str]:
    """Return a line for each implementation and reason, with the modules that have it."""
    numbers = Counter(explained)
    lines: dict[str, list[str]] = {}
    for (module, implementation, reason), number in numbers.items():
        has = "as published" if implementation is None else implementation.__name__
        has += f" ({reason})" if reason else ""
        lines.setdefault(has, []).append(f"{number} x {module}")
    return [f"{has}: {', '.join(modules)}" for has, modules in lines.items()]
