"""Names of modules that people and frameworks give to peft by habit, where this model has others.

peft leaves out a name that fits no module, without a word if another one fits.
"""

import functools
import logging
import re
from collections.abc import Callable, Iterable

from torch import nn

from ..remote.modeling_chatglm import ChatGLMPreTrainedModel

logger = logging.getLogger(__name__)

# Which are the same thing under another name.
MODULE_ALIASES = {"embed_tokens": "word_embeddings", "lm_head": "output_layer"}
ALL_LINEAR = "all-linear"
# peft adds both to modules_to_save of every classifier or reward model, whatever its head's name.
HEAD_NAMES = ("classifier", "score")


def check_module_names(inject_adapter: Callable) -> Callable:
    """For peft's ``BaseTuner.inject_adapter``: names that fit nothing are an error there."""

    @functools.wraps(inject_adapter)
    def checked(self, model, adapter_name, *args, **kwargs):
        config = self.peft_config[adapter_name]
        # One that is loaded to be used has been made with whatever names it has.
        if isinstance(model, ChatGLMPreTrainedModel) and not config.inference_mode:
            resolve_module_names(model, config)
        return inject_adapter(self, model, adapter_name, *args, **kwargs)

    return checked


def resolve_module_names(model: nn.Module, config) -> None:
    """Give the names in a peft config that mean the same their own, in place; ``ValueError`` for
    those that fit no module, with those that are meant."""
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
        known = [name if _matches_module(name, modules) else MODULE_ALIASES.get(name, name) for name in names]
        if known != list(names):
            logger.warning("%s: %s are called %s here", option, [*names], known)
            setattr(config, option, type(names)(known))
        has_head = any(_matches_module(name, modules) for name in HEAD_NAMES)
        heads = HEAD_NAMES if option == "modules_to_save" and has_head else ()
        unknown = [name for name in known if name not in heads and not _matches_module(name, modules)]
        if unknown:
            raise ValueError(_unknown_names_message(option, unknown))
        if option == "modules_to_save":
            _refuse_nested(known, modules)


def _refuse_nested(names: Iterable[str], modules: list[str]) -> None:
    """peft would wrap a module and another one inside of it, and save what cannot be loaded."""
    for name in names:
        fitting = [module for module in modules if _matches_module(name, [module])]
        for outer in fitting:
            inner = [module for module in fitting if module.startswith(f"{outer}.")]
            if inner:
                raise ValueError(
                    f"modules_to_save names {name!r}, which fits {outer} and {inner[0]} inside of "
                    f"it: say {'.'.join(outer.split('.')[-2:])!r} for the whole"
                )


def _matches_module(name: str, modules: list[str]) -> bool:
    """As peft compares them."""
    return any(module == name or module.endswith(f".{name}") for module in modules)


def _unknown_names_message(option: str, unknown: Iterable[str]) -> str:
    return (
        f"{option} names {', '.join(map(repr, sorted(unknown)))}, which fit no module of glm-4v: "
        "there are query_key_value (for q_proj, k_proj, v_proj), dense (o_proj), dense_h_to_4h "
        "(gate_proj, up_proj) and dense_4h_to_h (down_proj) in the language model "
        "(transformer.encoder), these and fc1, fc2 and gate_proj in the vision tower "
        "(transformer.vision), linear_proj between them, and word_embeddings and output_layer; or "
        "say 'all-linear'"
    )
