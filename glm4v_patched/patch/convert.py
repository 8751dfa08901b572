"""Converts a model that was built from the published code of glm-4v to our classes.

For a model that someone else loads, wraps, casts, moves or quantises before we see it:

1. Find the published model inside the given one.
2. Build ours from its config on the meta device, where it takes no memory: the pattern.
3. Walk both by the names of their modules, noting what has to change. What does not fit is an
   error.
4. Then each module of the published code gets the class of its counterpart and what that one's
   constructor sets; parameters are never touched.
"""

from collections.abc import Iterator
from functools import partial, update_wrapper
from types import MethodType
from typing import NoReturn, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedModel

from ..engine.deepspeed.internals import whole_shape
from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.loss import computes_loss
from ..remote.modeling_chatglm import GLM4VForCausalLM
from .config_json import why_not_glm4v

_ATTRIBUTES_OF_ANY_MODULE = frozenset(vars(nn.Module()))  # parameters, children, hooks, training
_REMOVED = object()
_CALLED_AS_FORWARD = {"forward", "_old_forward", "_compiled_call_impl"}


def patch_model(model: nn.Module) -> nn.Module:
    """Make the glm-4v inside ``model`` ours, whoever built and wrapped it.

    Parameters stay the same objects, so optimizers and adapters go on. Hooks stay, and see what our
    modules take and return. Training mode, frozen weights, accelerate's device hooks, peft's layers
    and copies, and quantised layers stay. Checkpointing that was on stays on, non-reentrant, for
    the vision tower and the language model. Attention becomes sdpa, which the published code
    computes whatever its config says, unless the config names another than eager.

    Call it before a Trainer or an engine gets the model: they note what its class can do.

    Args:
        model: A glm-4v of the published code, or a module that holds exactly one.

    Returns:
        ``model`` itself; unchanged if its glm-4v is ours already.

    Raises:
        ValueError: no glm-4v, several, or one that differs from ours in more than its code; names
            the first difference. Nothing was changed.
    """
    core = _only_glm4v(model)
    if isinstance(core, GLM4VForCausalLM):
        return model
    checkpointed = any(getattr(part, "gradient_checkpointing", False) for part in core.modules())
    config = ChatGLMConfig.of(core.config)
    if config is not core.config and config._attn_implementation == "eager":
        # transformers entered it when the model was built: its class declares nothing else.
        config._attn_implementation = None
    with torch.device("meta"):
        ours = GLM4VForCausalLM(config)
    conversion = _Conversion(core, ours)
    conversion.match(core, ours, "")
    conversion.match_attributes(model)
    conversion.perform()
    if checkpointed:
        # Renamed in transformers 5.23; the old name goes at 6.0.
        renamed = getattr(core, "activation_checkpointing_enable", None)
        (renamed or core.gradient_checkpointing_enable)({"use_reentrant": False})
    return model


def _only_glm4v(model: nn.Module) -> PreTrainedModel:
    parts = model.modules() if isinstance(model, nn.Module) else ()
    built_alike = [part for part in parts if _is_built_like_glm4v(part)]
    reasons = [why_not_glm4v(vars(part)["config"].to_dict()) for part in built_alike]
    found = [part for part, reason in zip(built_alike, reasons, strict=True) if reason is None]
    if len(found) != 1:
        others = "".join(f" (of one that is not, {reason})" for reason in reasons if reason)
        raise ValueError(
            f"this {type(model).__name__} holds {len(found)} glm-4v models{others} and has to hold "
            "1: a transformers model with a glm-4v's config, transformer.encoder and "
            "transformer.vision; give one such model, before it is sharded"
        )
    return found[0]


def _is_built_like_glm4v(part: nn.Module) -> TypeGuard[PreTrainedModel]:
    # Its own attributes: a wrapper of peft also has those of the model inside.
    config, body = vars(part).get("config"), part._modules.get("transformer")
    return (
        isinstance(part, PreTrainedModel)
        and config is not None
        and hasattr(body, "encoder")
        and hasattr(body, "vision")
    )


class _Conversion:
    """What has to change and what stands against it. Changes nothing before ``perform``."""

    def __init__(self, core: PreTrainedModel, ours: GLM4VForCausalLM):
        # Not by the core's own class: FSDP2 or a user may have derived it elsewhere.
        bases = type(core).__mro__
        self.published_package = _package(bases[bases.index(PreTrainedModel) - 1])
        self.old_config, self.config = core.config, ours.config
        self.counterparts: dict[nn.Module, nn.Module] = {}
        self.edits: list[tuple[dict, str, object]] = []

    def match(self, theirs: nn.Module, ours: nn.Module, path: str) -> None:
        """Pair ``theirs``, peft's copies of it and all below them with ``ours``."""
        becomes_ours = _is_ours(type(ours))
        for name, module in _behind_peft(path, theirs):
            is_published = _package(type(module)) == self.published_package
            fits = is_published if becomes_ours else type(module) is type(ours)
            if fits:
                if becomes_ours:
                    self.counterparts[module] = ours
                self._match_tensors(module, ours, name)
                self._match_children(module, ours, name)
                if computes_loss(ours):
                    self._match_loss(module, ours)
            elif is_published or ours._modules or becomes_ours:
                owner = self.published_package if becomes_ours else type(ours).__module__
                _refuse(
                    f"{name or 'the model'} is a {type(module).__name__} of "
                    f"{type(module).__module__}, where a {type(ours).__name__} of {owner} belongs: "
                    "patch the model before it is sharded, compiled or otherwise wrapped"
                )
            # Else it is a quantised or fused layer in the place of a torch one: left alone.

    def _match_loss(self, theirs: nn.Module, ours: nn.Module) -> None:
        """Let the published output layer, a torch one, compute the loss, if its forward is its own
        or behind accelerate's device hook; one of others is called without labels."""
        has_hook = "_old_forward" in vars(theirs)
        if has_hook or "forward" not in vars(theirs):
            method = MethodType(vars(ours)["forward"].__func__, theirs)
            self.edits.append((vars(theirs), "_old_forward" if has_hook else "forward", method))

    def _match_tensors(self, theirs: nn.Module, ours: nn.Module, path: str) -> None:
        have, want = _shapes(theirs), _shapes(ours)
        for name in have | want:
            if have.get(name) != want.get(name):
                _refuse(
                    f"{_join(path, name)} has shape {have.get(name)}, and {want.get(name)} by its "
                    "config: correct the config"
                )

    def _match_children(self, theirs: nn.Module, ours: nn.Module, path: str) -> None:
        have, want = dict(theirs.named_children()), dict(ours.named_children())
        for name in have | want:
            if name in have and name in want:
                self.match(have[name], want[name], _join(path, name))
                continue
            child = have[name] if name in have else want[name]
            tensors = sum(len(_shapes(part)) for part in child.modules())
            hooks = sum(len(p._forward_hooks) + len(p._forward_pre_hooks) for p in child.modules())
            if tensors or hooks:
                difference = "is not in our model" if name in have else "is missing"
                _refuse(
                    f"{_join(path, name)} {difference}, with {tensors} tensors and {hooks} hooks: "
                    "give a whole glm-4v with nothing added inside"
                )
            # Dropout, activations: without weights, they come and go with the code.
            counterpart = want[name].train(theirs.training) if name in want else _REMOVED
            self.edits.append((theirs._modules, name, counterpart))

    def match_attributes(self, model: nn.Module) -> None:
        """Find, on all modules, the old config, methods of old classes and what would hide ours."""
        for path, module in model.named_modules():
            ours = self.counterparts.get(module)
            for name, value in vars(module).items():
                method = self._our_method(value)
                if value is self.old_config:
                    self.edits.append((vars(module), name, self.config))
                elif method is not None:
                    self.edits.append((vars(module), name, method))
                elif ours is not None and name not in vars(ours):
                    self._match_leftover(module, ours, name, _join(path, name))

    def _match_leftover(self, module: nn.Module, ours: nn.Module, name: str, path: str) -> None:
        """An attribute that the constructor of ours does not set."""
        value, ours_defines = vars(module)[name], _defined_by_us(type(ours))
        old_forward = vars(module).get("_old_forward")
        method = self._our_method(old_forward)
        if method and name == "forward" and getattr(value, "__wrapped__", None) == old_forward:
            # accelerate's device hook calls _old_forward, and shows the signature of __wrapped__.
            forward = update_wrapper(partial(value.func, *value.args, **value.keywords), method)
            self.edits.append((vars(module), name, forward))
        elif callable(value) and name in _CALLED_AS_FORWARD | ours_defines:
            function = getattr(value, "func", value)
            _refuse(
                f"{path} was replaced by {function.__module__}.{function.__qualname__}, which "
                "would run in the place of ours: patch the model first"
            )
        elif name in {"gradient_checkpointing"} | ours_defines:
            self.edits.append((vars(module), name, _REMOVED))

    def _our_method(self, value: object) -> MethodType | None:
        """Our method in the place of ``value``, if that is one of the published code."""
        if not isinstance(value, MethodType):
            return None
        owner = value.__self__
        if not isinstance(owner, nn.Module) or owner not in self.counterparts:
            return None
        members = [item for base in type(owner).__mro__ for item in vars(base).items()]
        names = [name for name, member in members if member is value.__func__]
        ours = getattr(type(self.counterparts[owner]), names[0], None) if names else None
        if names and ours is None:
            _refuse(f"{value.__qualname__} is in use, which ours does not have")
        return MethodType(ours, owner) if ours else None

    def perform(self) -> None:
        for module, ours in self.counterparts.items():
            kept = {*_ATTRIBUTES_OF_ANY_MODULE}
            if vars(module).get("generation_config") is not None:
                kept.add("generation_config")
            module.__class__ = type(ours)
            vars(module).update({n: v for n, v in vars(ours).items() if n not in kept})
        for table, name, value in self.edits:
            if value is _REMOVED:
                del table[name]
            else:
                table[name] = value


def _refuse(fault: str) -> NoReturn:
    raise ValueError(f"this model cannot be patched as it is: {fault}")


def _package(cls: type) -> str:
    return cls.__module__.rpartition(".")[0]


def _is_ours(cls: type) -> bool:
    return _package(cls) == _package(GLM4VForCausalLM)


def _defined_by_us(cls: type) -> set[str]:
    return {name for base in cls.__mro__ if _is_ours(base) for name in vars(base)}


def _behind_peft(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``module``, or what peft's wrapper in its place wraps, and the copies of that it trains."""
    inside = {}
    if type(module).__module__.startswith("peft."):
        kept = dict(module.named_children())
        wraps = ("base_layer", "original_module", "token_adapter")
        inside = {name: kept[name] for name in wraps if name in kept}
        copies = dict(kept.get("modules_to_save", nn.Module()).named_children())
        inside |= {f"modules_to_save.{adapter}": copied for adapter, copied in copies.items()}
    for name, wrapped in inside.items():
        yield from _behind_peft(_join(path, name), wrapped)
    if not inside:
        yield path, module


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    tensors = {**module._parameters, **module._buffers}
    return {name: whole_shape(tensor) for name, tensor in tensors.items() if tensor is not None}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
