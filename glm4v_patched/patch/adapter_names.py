"""Checks of ``target_modules`` and ``modules_to_save`` in peft configs for this model.

Users and frameworks often pass module names of other models. If at least one name matches a module,
peft ignores all names that match none, so part of the adapter would be missing without an error.
"""

import functools
import logging
import re
from collections.abc import Callable, Iterable

from torch import nn

from ..remote.modeling_chatglm import ChatGLMPreTrainedModel

logger = logging.getLogger(__name__)

# Maps module names of other models to this model's names for the same modules.
MODULE_ALIASES = {"embed_tokens": "word_embeddings", "lm_head": "output_layer"}
ALL_LINEAR = "all-linear"
# peft adds both names to modules_to_save of every sequence classification model.
HEAD_NAMES = ("classifier", "score")


def check_names_in_inject_adapter(inject_adapter: Callable) -> Callable:
    """Wrap peft's ``BaseTuner.inject_adapter`` so that unknown module names raise an error."""

    @functools.wraps(inject_adapter)
    def checked_inject_adapter(self, model, adapter_name, *args, **kwargs):
        config = self.peft_config[adapter_name]
        # A saved adapter is not checked again when it is loaded for inference.
        if isinstance(model, ChatGLMPreTrainedModel) and not config.inference_mode:
            resolve_module_names(model, config)
        return inject_adapter(self, model, adapter_name, *args, **kwargs)

    return checked_inject_adapter


def resolve_module_names(model: nn.Module, config) -> None:
    """Replace aliases in a peft config by this model's module names, in place.

    Raises:
        ValueError: a name matches no module, or a name in ``modules_to_save`` matches nested
            modules.
    """
    modules = [name for name, _ in model.named_modules()]
    for option in ("modules_to_save", "target_modules"):
        names = getattr(config, option, None)
        if not names:
            continue
        if isinstance(names, str):
            if names.lower() == ALL_LINEAR:
                continue
            if not any(re.fullmatch(names, module) for module in modules):
                raise ValueError(_unknown_names_message(option, [names]))
            continue
        resolved = [
            name if _matches_module(name, modules) else MODULE_ALIASES.get(name, name)
            for name in names
        ]
        if resolved != list(names):
            logger.warning("%s: %s are called %s in this model", option, [*names], resolved)
            setattr(config, option, type(names)(resolved))
        has_head = any(_matches_module(name, modules) for name in HEAD_NAMES)
        ignored = HEAD_NAMES if option == "modules_to_save" and has_head else ()
        unknown = [
            name for name in resolved if name not in ignored and not _matches_module(name, modules)
        ]
        if unknown:
            raise ValueError(_unknown_names_message(option, unknown))
        if option == "modules_to_save":
            _refuse_nested(resolved, modules)


def _refuse_nested(names: Iterable[str], modules: list[str]) -> None:
    """Refuse a name that matches nested modules, because peft could not load the saved adapter."""
    for name in names:
        matches = [module for module in modules if _matches_module(name, [module])]
        for outer in matches:
            inner = [module for module in matches if module.startswith(f"{outer}.")]
            if inner:
                raise ValueError(
                    f"modules_to_save has {name!r}, which matches {outer} and {inner[0]}: use "
                    f"{'.'.join(outer.split('.')[-2:])!r} for the outer module"
                )


def _matches_module(name: str, modules: list[str]) -> bool:
    """Return whether peft would match ``name`` with one of the modules."""
    return any(module == name or module.endswith(f".{name}") for module in modules)


def _unknown_names_message(option: str, unknown: Iterable[str]) -> str:
    return (
        f"{option} has {', '.join(map(repr, sorted(unknown)))}, which match no module of glm-4v. "
        "Its modules are query_key_value (for q_proj, k_proj, v_proj), dense (o_proj), "
        "dense_h_to_4h (gate_proj, up_proj) and dense_4h_to_h (down_proj) in the language model "
        "(transformer.encoder); the same names and fc1, fc2 and gate_proj in the vision tower "
        "(transformer.vision); linear_proj between the two; word_embeddings and output_layer. "
        "'all-linear' selects all linear layers"
    )
