"""Keyword arguments that transformers passes to a model; their names differ between releases.

For example, the cache has been called ``cache`` since 5.24, and earlier releases used that name for
another argument. So both the name and the type of a keyword are checked. An unknown keyword is an
error, because dropping it silently would make generation slow or wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from inspect import signature
from typing import Any, NoReturn

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import GenerationMixin, PreTrainedTokenizerBase
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

from .configuration_chatglm import TESTED_TRANSFORMERS, ChatGLMConfig

TRANSFORMERS_VERSION = transformers.__version__
MASK_PARAMETERS = frozenset(signature(create_causal_mask).parameters)
# Whether masks and static caches need cache_position (the cache indices of the queries), as in
# transformers 4.57.
NEEDS_CACHE_POSITION = "cache_position" in MASK_PARAMETERS


def raise_with_versions(problem: str) -> NoReturn:
    """Raise ``ValueError`` with a problem, the version of transformers and the tested versions."""
    raise ValueError(
        f"{problem} (transformers {TRANSFORMERS_VERSION}; this code is tested on "
        f"{TESTED_TRANSFORMERS}: if transformers passed the argument, "
        f"pip install 'transformers{TESTED_TRANSFORMERS}')"
    )


def _find_cache_keyword() -> str:
    """Return the name of the cache, which is both a field of outputs and a parameter for masks."""
    shared = {field.name for field in fields(BaseModelOutputWithPast)} & MASK_PARAMETERS
    names = [name for name in ("cache", "past_key_values") if name in shared]
    if len(names) != 1:
        raise ImportError(
            f"transformers {TRANSFORMERS_VERSION} names the cache neither cache nor "
            "past_key_values; install a tested version: "
            f"pip install 'transformers{TESTED_TRANSFORMERS}'"
        )
    return names[0]


# The name of the cache in the installed transformers: in outputs, in generate's keywords, and in
# create_causal_mask.
CACHE_KEYWORD = _find_cache_keyword()
OTHER_CACHE_KEYWORD = "cache" if CACHE_KEYWORD == "past_key_values" else "past_key_values"
# Whether generate slices the cached part off inputs_embeds, as in transformers 5.3.
SLICES_INPUTS_EMBEDS = Version("5.3") <= Version(TRANSFORMERS_VERSION) < Version("5.4")


def cache_kwarg(cache: Any) -> dict[str, Any]:
    """Return the cache as a keyword argument, under its name in the installed transformers."""
    return {CACHE_KEYWORD: cache}


def resolve_cache(past_key_values: Any, cache: Any) -> Cache | None:
    """Return the cache that was passed under either of its two names.

    Raises:
        ValueError: Two different caches were passed, or a value that is not a ``Cache``.
    """
    if past_key_values is not None and cache is not None and past_key_values is not cache:
        raise_with_versions(
            f"two caches were given, a {type(past_key_values).__name__} as past_key_values and a "
            f"{type(cache).__name__} as cache, which are names of the same argument: give "
            f"{CACHE_KEYWORD}"
        )
    value = past_key_values if cache is None else cache
    if value is not None and not isinstance(value, Cache):
        raise_with_versions(
            f"{'cache' if value is cache else 'past_key_values'} is a {type(value).__name__}; give "
            "a Cache, e.g. transformers.DynamicCache()"
        )
    return value


def resolve_return_dict(return_dict: bool | None, config: ChatGLMConfig) -> bool:
    """Return ``return_dict``, or the config's if it is ``None``."""
    return bool(config.return_dict) if return_dict is None else return_dict


def _is_int_tensor(value: Any, *ndims: int) -> bool:
    integers = (torch.int32, torch.int64)
    return isinstance(value, Tensor) and value.dtype in integers and value.ndim in ndims


def _is_scalar_int(value: Any) -> bool:
    return isinstance(value, int) or (_is_int_tensor(value, 0, 1) and value.numel() == 1)


def _is_int_vector(value: Any) -> bool:
    return _is_int_tensor(value, 1)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


# Keywords of packed attention (where samples end, and the longest length), with type checks.
# "cache_position", which transformers 4.57 also passes, is accepted but not passed to attention.
ATTENTION_CHECKS: dict[str, Callable[[Any], bool]] = {
    "cu_seq_lens_k": _is_int_vector,
    "cu_seq_lens_q": _is_int_vector,
    "is_causal": _is_bool,
    "max_length_k": _is_scalar_int,
    "max_length_q": _is_scalar_int,
}
ATTENTION_KWARGS = tuple(ATTENTION_CHECKS)
ATTENTION_CHECKS["cache_position"] = _is_int_vector

# Keywords about logits, which the decoder ignores. TRL's DistillationTrainer passes them to the
# decoder, because the complete model has these parameters.
LOGITS_KWARGS = ("logits_to_keep", "return_last_logit", "skip_logits")

# Keywords that generate, in some version, passes on to forward in model_kwargs. forward does not
# take them.
GENERATE_KWARGS: dict[str, Callable[[Any], bool]] = {
    # For stop_strings, and for an assistant model with another vocabulary.
    "tokenizer": lambda value: isinstance(value, PreTrainedTokenizerBase),
    "assistant_tokenizer": lambda value: isinstance(value, PreTrainedTokenizerBase),
    "is_first_iteration": _is_bool,
    "labels": lambda value: _is_int_tensor(value, 2),
    "cache_position": _is_int_vector,
}
if "next_sequence_length" in signature(GenerationMixin.prepare_inputs_for_generation).parameters:
    GENERATE_KWARGS["next_sequence_length"] = _is_scalar_int


def parameter_names(*functions: Callable) -> tuple[str, ...]:
    """Return the parameter names of functions, each once, without ``self`` and ``**kwargs``."""
    parameters = [
        parameter for function in functions for parameter in signature(function).parameters.values()
    ]
    names = [parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD]
    return tuple(name for name in dict.fromkeys(names) if name != "self")


def check_forward_kwargs(kwargs: dict[str, Any], model: str, known: Sequence[str]) -> None:
    """Raise ``ValueError`` for a keyword that ``forward`` does not take.

    Args:
        model: Name of the class, for the message.
        known: The parameter names of ``forward``. Keywords of :data:`ATTENTION_CHECKS` are
            accepted, too.
    """
    for name, value in kwargs.items():
        if name not in known and name not in ATTENTION_CHECKS:
            raise_with_versions(
                f"forward got an unexpected keyword {name}{_type_text(value)}: {model} takes "
                f"{', '.join(known)}, and for attention {', '.join(ATTENTION_KWARGS)}"
            )


def select_attention_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords for the attention implementation.

    Raises:
        ValueError: A value has the wrong type for its name.
    """
    attention = {}
    for name, has_right_type in ATTENTION_CHECKS.items():
        if (value := kwargs.get(name)) is None:
            continue
        # max_length_q needs cu_seq_lens_q, and max_length_k needs cu_seq_lens_k.
        lacks_lengths = name.startswith("max_") and kwargs.get(f"cu_seq_lens{name[-2:]}") is None
        if lacks_lengths or not has_right_type(value):
            _raise_wrong_type("forward", name, value)
        if name in ATTENTION_KWARGS:
            attention[name] = value
    return attention


def drop_generate_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords without :data:`GENERATE_KWARGS`, which ``forward`` does not take.

    Raises:
        ValueError: A value has the wrong type for its name.
    """
    for name, has_right_type in GENERATE_KWARGS.items():
        value = kwargs.get(name)
        if value is not None and not has_right_type(value):
            _raise_wrong_type("prepare_inputs_for_generation", name, value)
    return {name: value for name, value in kwargs.items() if name not in GENERATE_KWARGS}


def _raise_wrong_type(function: str, name: str, value: Any) -> NoReturn:
    raise_with_versions(
        f"{function} got {name}{_type_text(value)}, which is not the type of value that {name} "
        "takes"
    )


def _type_text(value: Any) -> str:
    """Describe a value by its type, in parentheses."""
    if isinstance(value, Tensor):
        return f" (a tensor {tuple(value.shape)} of {value.dtype})"
    if isinstance(value, Cache):
        return f" (a {type(value).__name__}; pass a cache as {CACHE_KEYWORD})"
    return f" (of type {type(value).__name__})"


def overrides_generation(since: str) -> Callable:
    """Decorate an override of a method that ``GenerationMixin`` has had since ``since``.

    :func:`check_overridden_methods` then checks that the installed release still has the method.
    """

    def mark(method: Callable) -> Callable:
        if Version(TRANSFORMERS_VERSION) >= Version(since):
            _OVERRIDDEN_METHODS.append(method.__name__)
        return method

    return mark


_OVERRIDDEN_METHODS: list[str] = []


def check_overridden_methods() -> None:
    """Raise ``RuntimeError`` if ``generate`` has lost a method that this code overrides."""
    if missing := [name for name in _OVERRIDDEN_METHODS if not hasattr(GenerationMixin, name)]:
        raise RuntimeError(
            f"generate of transformers {TRANSFORMERS_VERSION} has no {', '.join(missing)}, which "
            "this code overrides; install a tested version: "
            f"pip install 'transformers{TESTED_TRANSFORMERS}'"
        )
