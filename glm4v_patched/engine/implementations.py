"""Choose which class computes each module, in training and in inference, and explain the choice.

An entry of :data:`IMPLEMENTATIONS` names a class of the model, an implementation of it (in
:mod:`.kernels`) and when to use it. :func:`use_implementations` changes the classes of a model's
modules accordingly. :func:`explain_implementations` reports which implementation each module has,
and why it has no faster one. A module without an implementation "computes as published", by the
code in ``remote/``.

An implementation may itself compute what its submodules would compute. It must not do so if a
submodule has a *blocker*: a hook, an adapter, a quantized weight or another wrapper. Blockers come
and go while a model is in use. So modules get a *guarded class*: a subclass of the implementation
that looks for blockers in every call (:func:`_make_guarded_class`).
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
from .activation_checkpointing import transformer_layers
from .fp8 import FP8_SIZE_MULTIPLE, is_fp8_candidate, why_not_fp8
from .kernels import flash_attention_3
from .kernels.cuda_graphs import GraphedTower
from .kernels.flash_attention_3 import FrozenTowerAttention
from .kernels.fp8_linear import Fp8DynamicLinear, Fp8StoredLinear, FrozenTowerMLP
from .kernels.inference_layers import (
    InferenceBlock,
    InferenceMLP,
    InferencePatchEmbedding,
    InferenceSelfAttention,
    InferenceTowerLayer,
    InferenceTowerMLP,
)
from .options import EngineOptions, trains_tower

ModuleClasses = tuple[type[nn.Module], ...]
ANY_CLASS: ModuleClasses = ()
"""Accepts modules of every class. Only hooks and a replaced ``forward`` are blockers then."""

# The purposes of a :class:`ModelUsage`.
TRAINING, INFERENCE, CUDA_GRAPHS = "training", "inference", "CUDA graphs"


@dataclass(frozen=True, kw_only=True)
class ModelUsage:
    """How a model is used, as far as the choice of implementations depends on it.

    Attributes:
        purpose: :data:`TRAINING`, :data:`INFERENCE` or :data:`CUDA_GRAPHS`.
        fp8: Whether linear layers multiply in fp8.
        stores_fp8: Whether frozen weights are stored in fp8.
        stores_transposed_fp8: Whether fp8 weights are also stored transposed, for backward.
        has_fused_quantization: Whether the kernel that computes a linear layer's input also
            quantizes it, as in compiled layers and in inference.
        trains_tower: Whether gradients flow through the vision tower.
    """

    purpose: str
    fp8: bool = False
    stores_fp8: bool = False
    stores_transposed_fp8: bool = False
    has_fused_quantization: bool = False
    trains_tower: bool = False

    @classmethod
    def training(cls, options: EngineOptions) -> "ModelUsage":
        """Return the usage of a training with these options."""
        return cls(
            purpose=TRAINING,
            fp8=options.fp8,
            stores_fp8=options.stores_fp8,
            stores_transposed_fp8=options.stores_transposed_fp8,
            has_fused_quantization=options.compile is True,
            trains_tower=trains_tower(options.trained),
        )

    @classmethod
    def inference(cls, fp8: bool = False) -> "ModelUsage":
        """Return the usage of a model for inference."""
        return cls(purpose=INFERENCE, fp8=fp8, stores_fp8=fp8, has_fused_quantization=True)


class LocatedModule(NamedTuple):
    """A module of a model, and the transformer layer that contains it, if one does."""

    module: Any
    layer: nn.Module | None = None
    name: str = ""  # within the layer

    @property
    def part(self) -> str:
        """The layer's part of the model, one of :data:`options.MODEL_PARTS`; "" without a layer."""
        if self.layer is None:
            return ""
        return "language_model" if isinstance(self.layer, GLMBlock) else "tower"

    @property
    def layer_name(self) -> str:
        """The module's own name, such as "fc1", also if a LoRA layer wraps the module."""
        return self.name.removesuffix(".base_layer").rpartition(".")[2]


@dataclass(frozen=True)
class ImplementationEntry:
    """One implementation of the modules whose class is exactly ``replaces``.

    Attributes:
        purposes: Values of :attr:`ModelUsage.purpose` for which the entry is considered.
        condition: Returns why the implementation cannot be used for a module, or None.
        method: The method of ``replaces`` that it implements.
        backend: "cuda" or "hip" (AMD); entries of the other backend are ignored.
        requires: Names and supported classes of submodules that the implementation always replaces,
            or whose output it modifies in place. While one of these submodules has a blocker, the
            module computes as published: it runs the method of ``replaces``.
        may_fuse: Names and supported classes of further submodules; "" is the module itself. While
            such a submodule has no blocker, the implementation computes what the submodule would
            compute, or passes it fp8 inputs or split-K partial sums.
        set_up: Called with each module after its class was changed.
    """

    replaces: type[nn.Module]
    implementation: type[nn.Module]
    purposes: tuple[str, ...]
    condition: Callable[[LocatedModule, ModelUsage], str | None]
    method: str = "forward"
    backend: str = "cuda"
    requires: Mapping[str, ModuleClasses] = field(default_factory=dict)
    may_fuse: Mapping[str, ModuleClasses] = field(default_factory=dict)
    set_up: Callable[[Any, LocatedModule, ModelUsage], None] | None = None


def find_blocker(
    module: Any, classes: ModuleClasses = ANY_CLASS, hooks_block: bool = True
) -> str | None:
    """Return why ``module`` itself must be called; None if an implementation may replace it.

    Args:
        classes: Supported classes; their subclasses are not. A guarded class counts as the
            implementation that it guards.
        hooks_block: Whether hooks are a blocker. Pass False if the module will still be called, or
            if its hooks will be looked for in every call (as guarded classes do).
    """
    module_class = type(module)
    implementation = IMPLEMENTATION_OF_GUARDED_CLASS.get(module_class)
    if classes and module_class not in classes and implementation not in classes:
        return f"it is a {module_class.__module__}.{module_class.__qualname__}"
    if "forward" in module.__dict__:
        return "its forward was replaced, as offloading does"
    if hooks_block and (module._forward_hooks or module._forward_pre_hooks):
        return "it has hooks"
    # Some packages quantize the parameter itself, and the layer stays an nn.Linear.
    if module_class is nn.Linear and classes and type(module.weight) is not nn.Parameter:
        return f"its weight is a {type(module.weight).__qualname__}"
    return None


# Conditions of the entries below: each returns why an implementation cannot be used, or None.


def _fp8_problem(located: LocatedModule, usage: ModelUsage) -> str | None:
    linear = located.module
    if not usage.fp8:
        return "fp8 is off"
    if reason := why_not_fp8(located.part, located.layer_name, usage.has_fused_quantization):
        return reason
    if linear.in_features % FP8_SIZE_MULTIPLE or linear.out_features % FP8_SIZE_MULTIPLE:
        size = f"{linear.in_features} x {linear.out_features}"
        return f"its size is {size}, and fp8 needs multiples of {FP8_SIZE_MULTIPLE}"
    return find_blocker(linear, (nn.Linear, Fp8DynamicLinear), hooks_block=False)


def _fp8_storage_problem(located: LocatedModule, usage: ModelUsage) -> str | None:
    if reason := _fp8_problem(located, usage):
        return reason
    if usage.purpose == TRAINING and located.module.weight.requires_grad:
        return "its weight is trained"
    return None if usage.stores_fp8 else "only LoRA without hpZ stores frozen weights in fp8"


def _store_in_fp8(linear: Fp8StoredLinear, located: LocatedModule, usage: ModelUsage) -> None:
    has_backward = located.part == "language_model" or usage.trains_tower
    linear.quantize_weight(stores_transposed=usage.stores_transposed_fp8 and has_backward)


def _fused_gelu_problem(_located: LocatedModule, usage: ModelUsage) -> str | None:
    if not usage.fp8:
        return "fp8 is off"
    # FrozenTowerMLP reads the weights of fc1 and fc2 without calling these layers. So ZeRO-3 must
    # gather whole transformer layers, as it does if they are compiled.
    if not usage.has_fused_quantization:
        return "layers are not compiled"
    return "the tower is trained" if usage.trains_tower else None


def _flash_attention_problem(located: LocatedModule, usage: ModelUsage) -> str | None:
    config = located.module.config
    if usage.trains_tower:
        return "the tower is trained, and FlashAttention-3 has no backward pass here"
    if config._attn_implementation != "sdpa":
        return f"attn_implementation is {config._attn_implementation}, not sdpa"
    head_dim = config.vision.hidden_size // located.module.num_heads
    return flash_attention_3.find_fa3_problem(head_dim)


def _triton_problem(_located: LocatedModule, _usage: ModelUsage) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; torch's GPU builds include it"
    return None


def _split_k_problem(located: LocatedModule, usage: ModelUsage) -> str | None:
    """Return why a module cannot return split-K partial sums, or None.

    Only the block of the language model that contains it can reduce them.
    """
    layer: Any = located.layer
    if layer is None or find_blocker(layer, (GLMBlock, InferenceBlock), hooks_block=False):
        return "it is not in a GLMBlock, or the GLMBlock is wrapped"
    if located.module not in (layer.self_attention, layer.mlp):
        return "it is wrapped"
    return _triton_problem(located, usage)


def _cuda_graph_problem(located: LocatedModule, _usage: ModelUsage) -> str | None:
    """Return the first blocker of a module inside the located one, or None.

    A replay of a CUDA graph would not call hooks.
    """
    for module in located.module.modules():
        if module is not located.module and (reason := find_blocker(module)):
            return f"a module in it: {reason}"
    return None


GELU_CLASSES: ModuleClasses = (type(ACT2FN["gelu"]),)
FP8_LINEAR_CLASSES: ModuleClasses = (Fp8DynamicLinear, Fp8StoredLinear)
PLAIN_OR_STORED_LINEAR: ModuleClasses = (nn.Linear, Fp8StoredLinear)

# If several entries replace one class, the fastest comes first.
IMPLEMENTATIONS = (
    ImplementationEntry(
        nn.Linear,
        Fp8StoredLinear,
        (TRAINING, INFERENCE),
        _fp8_storage_problem,
        set_up=_store_in_fp8,
    ),
    ImplementationEntry(nn.Linear, Fp8DynamicLinear, (TRAINING,), _fp8_problem),
    ImplementationEntry(
        visual.Attention, FrozenTowerAttention, (TRAINING, INFERENCE), _flash_attention_problem
    ),
    ImplementationEntry(
        visual.VisionMLP,
        FrozenTowerMLP,
        (TRAINING, INFERENCE),
        _fused_gelu_problem,
        requires={
            "fc1": FP8_LINEAR_CLASSES,
            "activation_fn": GELU_CLASSES,
            "fc2": FP8_LINEAR_CLASSES,
        },
    ),
    ImplementationEntry(
        visual.VisionMLP,
        InferenceTowerMLP,
        (INFERENCE,),
        _triton_problem,
        requires={"fc1": ANY_CLASS, "activation_fn": GELU_CLASSES},
    ),
    ImplementationEntry(
        visual.PatchEmbedding,
        InferencePatchEmbedding,
        (INFERENCE,),
        _triton_problem,
        method="project",
        requires={"proj": (nn.Conv2d,)},
    ),
    ImplementationEntry(
        visual.TransformerLayer,
        InferenceTowerLayer,
        (INFERENCE,),
        _triton_problem,
        method="layer_forward",
        requires={"input_layernorm": (nn.LayerNorm,), "post_attention_layernorm": (nn.LayerNorm,)},
        may_fuse={"mlp": (FrozenTowerMLP,), "mlp.fc1": (Fp8StoredLinear,)},
    ),
    ImplementationEntry(
        SelfAttention,
        InferenceSelfAttention,
        (INFERENCE,),
        _split_k_problem,
        may_fuse={
            "": ANY_CLASS,
            "query_key_value": PLAIN_OR_STORED_LINEAR,
            "dense": PLAIN_OR_STORED_LINEAR,
        },
    ),
    ImplementationEntry(
        MLP,
        InferenceMLP,
        (INFERENCE,),
        _split_k_problem,
        may_fuse={
            "": ANY_CLASS,
            "dense_h_to_4h": PLAIN_OR_STORED_LINEAR,
            "dense_4h_to_h": PLAIN_OR_STORED_LINEAR,
        },
    ),
    ImplementationEntry(
        GLMBlock,
        InferenceBlock,
        (INFERENCE,),
        _triton_problem,
        method="layer_forward",
        may_fuse={
            "": ANY_CLASS,
            "input_layernorm": (RMSNorm,),
            "self_attention": (InferenceSelfAttention,),
            "self_attention.query_key_value": (Fp8StoredLinear,),
            "post_attention_layernorm": (RMSNorm,),
            "mlp": (InferenceMLP,),
            "mlp.dense_h_to_4h": (Fp8StoredLinear,),
            "next_block": (InferenceBlock,),
        },
    ),
    ImplementationEntry(
        visual.EVA2CLIPModel,
        GraphedTower,
        (CUDA_GRAPHS,),
        _cuda_graph_problem,
        set_up=lambda tower, *_: tower.set_up(),
    ),
)


class Guarded:
    """Namespace in which pickle finds the classes that :func:`_make_guarded_class` makes."""


def _make_guarded_class(entry: ImplementationEntry) -> type[nn.Module]:
    """Return a subclass of the implementation that looks for blockers in every call.

    The subclass computes as published while a submodule in ``entry.requires`` has a blocker.
    Implementations call its methods ``can_fuse(name)`` (whether to compute what the submodule
    would) and ``can_overwrite(name)`` (whether to modify the submodule's output in place).
    """
    if not entry.requires and not entry.may_fuse:
        return entry.implementation
    published_method = getattr(entry.replaces, entry.method)
    method = getattr(entry.implementation, entry.method)

    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, classes in entry.requires.items():
            if find_blocker(getattr(self, name), classes) is not None:
                return published_method(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    def can_fuse(self: Any, name: str) -> bool:
        parent, _, child = name.rpartition(".")
        if parent and not can_fuse(self, parent):
            return False
        module = getattr(self, parent) if parent else self
        submodule = getattr(module, child) if child else module
        return find_blocker(submodule, entry.may_fuse[name]) is None

    def can_overwrite(self: Any, name: str) -> bool:
        return find_blocker(getattr(self, name)) is None

    name = entry.implementation.__name__
    members: dict[str, Any] = {entry.method: compute}
    members |= {"can_fuse": can_fuse, "can_overwrite": can_overwrite}
    members |= {"__module__": __name__, "__qualname__": f"{Guarded.__name__}.{name}"}
    guarded = type(name, (entry.implementation,), members)
    setattr(Guarded, name, guarded)
    return guarded


# The guarded class of each implementation, and the implementation of each guarded class.
GUARDED_CLASSES = {entry.implementation: _make_guarded_class(entry) for entry in IMPLEMENTATIONS}
IMPLEMENTATION_OF_GUARDED_CLASS: dict[type, type] = {
    guarded: implementation for implementation, guarded in GUARDED_CLASSES.items()
}


def set_implementation(module: Any, implementation: type[nn.Module]) -> None:
    """Change a module's class to an implementation of the table without checking its condition."""
    module.__class__ = GUARDED_CLASSES[implementation]


def use_implementations(model: nn.Module, usage: ModelUsage) -> None:
    """Give modules of a model the implementations of the table whose conditions hold.

    Call it after adapters were added and trained weights were selected, and before DeepSpeed, DDP
    or FSDP2 wraps the model. Frozen weights that are stored in fp8 are quantized here, one layer at
    a time. If ZeRO-3 has sharded them, each is gathered, quantized and sharded again.
    """
    for entry in _entries_for_backend():
        for located in _locate_modules(model):
            is_replaced = type(located.module) is entry.replaces
            if is_replaced and _entry_problem(entry, located, usage) is None:
                set_implementation(located.module, entry.implementation)
                if entry.set_up is not None:
                    entry.set_up(located.module, located, usage)
    for module in model.modules():
        if isinstance(module, GLMTransformer):
            # An InferenceBlock also computes the input norm of the next block.
            for block, next_block in pairwise(module.layers):
                if isinstance(block, InferenceBlock) and isinstance(next_block, InferenceBlock):
                    vars(block)["next_block"] = next_block  # not registered as a submodule
    if usage.fp8:
        gc.collect()  # DeepSpeed's attributes of the old weights form reference cycles


def _entries_for_backend() -> list[ImplementationEntry]:
    """Return the entries for the GPUs that this torch was built for."""
    backend = "hip" if torch.version.hip else "cuda"
    return [entry for entry in IMPLEMENTATIONS if entry.backend == backend]


def _entry_problem(
    entry: ImplementationEntry, located: LocatedModule, usage: ModelUsage
) -> str | None:
    """Return why an entry's implementation is not used for a module, or None."""
    if usage.purpose not in entry.purposes:
        return f"it is for {' and '.join(entry.purposes)}"
    if reason := entry.condition(located, usage):
        return reason
    for name, classes in entry.requires.items():
        if reason := find_blocker(getattr(located.module, name), classes, hooks_block=False):
            return f"its {name}: {reason}"
    return None


def _locate_modules(model: nn.Module) -> Iterator[LocatedModule]:
    """Yield every module of a model, with the transformer layer that contains it."""
    located = {
        id(module): LocatedModule(module, layer, name)
        for layer in transformer_layers(model)
        for name, module in layer.named_modules()
    }
    for module in model.modules():
        yield located.get(id(module)) or LocatedModule(module)


class Explanation(NamedTuple):
    """The implementation of a module.

    Attributes:
        module: The module's part and name, such as "tower fc1".
        implementation: None if the module computes as published.
        reason: Why the module has no implementation or not the fastest, or which blocker prevents
            all or part of its implementation at the moment. None if the fastest one is in full use.
    """

    module: str
    implementation: type[nn.Module] | None
    reason: str | None


def explain_implementations(model: nn.Module, usage: ModelUsage) -> list[Explanation]:
    """Explain the implementation of each module that has an entry of the table for this usage."""
    explanations = []
    for located in _locate_modules(model):
        module_class = type(located.module)
        entries = [
            entry
            for entry in _entries_for_backend()
            if isinstance(located.module, entry.replaces) and usage.purpose in entry.purposes
        ]
        if not entries:
            continue
        is_linear = entries[0].replaces is nn.Linear
        if is_linear and not is_fp8_candidate(located.part, located.layer_name):
            continue  # it is outside the transformer layers, or in an adapter
        implementation = IMPLEMENTATION_OF_GUARDED_CLASS.get(module_class)
        current = next((entry for entry in entries if entry.implementation is implementation), None)
        if current is not None:
            reason = _fallback_reason(current, located.module)
            if reason is None and current is not entries[0]:
                reason = _entry_problem(entries[0], located, usage)
        elif module_class is not entries[0].replaces:  # a subclass, of adapters or another package
            reason = find_blocker(located.module, (entries[0].replaces,))
        else:
            reason = _entry_problem(entries[-1], located, usage)
        used_class = None if current is None else current.implementation
        name = located.layer_name if is_linear else entries[0].replaces.__name__
        title = f"{located.part.replace('_', ' ')} {name}".strip()
        explanations.append(Explanation(title, used_class, reason))
    return explanations


def _fallback_reason(entry: ImplementationEntry, module: Any) -> str | None:
    """Return which blocker prevents all or part of the implementation at the moment, or None."""
    for name, classes in entry.requires.items():
        if reason := find_blocker(getattr(module, name), classes):
            return f"computes as published at the moment, because of its {name}: {reason}"
    for name in entry.may_fuse:
        submodule = getattr(module, name, None) if name and "." not in name else None
        if isinstance(submodule, nn.Module) and (reason := find_blocker(submodule)):
            return f"does not fuse its {name}: {reason}"
    return None


def summarize_explanations(explanations: Iterable[Explanation]) -> list[str]:
    """Return a line for each pair of implementation and reason, with the modules that have it."""
    lines: dict[str, list[str]] = {}
    for (module, implementation, reason), count in Counter(explanations).items():
        title = "as published" if implementation is None else implementation.__name__
        title += f" ({reason})" if reason else ""
        lines.setdefault(title, []).append(f"{count} x {module}")
    return [f"{title}: {', '.join(modules)}" for title, modules in lines.items()]
