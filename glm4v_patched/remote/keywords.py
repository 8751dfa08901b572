"""What transformers hands to a model beside its named arguments, under which names.

Releases rename what they hand over: 5.24 calls the cache ``cache``, which before was the name of
another one. No keyword is therefore known by its name alone, but with the kind of its value, and
whatever else arrives is an error. What is dropped in silence makes generation slow or wrong.
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

VERSION = transformers.__version__
MASK_PARAMETERS = frozenset(signature(create_causal_mask).parameters)
# transformers 4.57 has to be told where the queries stand, also by whoever fills a static cache.
WANTS_CACHE_POSITION = "cache_position" in MASK_PARAMETERS


def refuse(fault: str) -> NoReturn:
    """Raise ``ValueError`` of what this transformers hands over."""
    raise ValueError(
        f"{fault} (transformers {VERSION}; this code is tested on {TESTED_TRANSFORMERS}: if it was "
        f"transformers that gave it, pip install 'transformers{TESTED_TRANSFORMERS}')"
    )


def _name_of_cache() -> str:
    named = {field.name for field in fields(BaseModelOutputWithPast)} & MASK_PARAMETERS
    names = [name for name in ("cache", "past_key_values") if name in named]
    if len(names) != 1:
        raise ImportError(
            f"transformers {VERSION} names the cache neither cache nor past_key_values; install a "
            f"tested one: pip install 'transformers{TESTED_TRANSFORMERS}'"
        )
    return names[0]


# What this transformers calls it: in outputs, in what generate hands over, and for masks.
CACHE_KEYWORD = _name_of_cache()
OLD_CACHE = "cache" if CACHE_KEYWORD == "past_key_values" else "past_key_values"
# Embeddings of whole rows are handed over without what is in the cache, by 5.3 alone.
EMBEDS_ARE_CUT = Version("5.3") <= Version(VERSION) < Version("5.4")


def cache_kwarg(cache: Any) -> dict[str, Any]:
    """The cache as a keyword of this transformers."""
    return {CACHE_KEYWORD: cache}


def one_cache(past_key_values: Any, cache: Any) -> Cache | None:
    """What was given under either name of the cache, if it is one and no other is given."""
    if past_key_values is not None and cache is not None and past_key_values is not cache:
        refuse(
            f"two caches were given, a {type(past_key_values).__name__} as past_key_values and a "
            f"{type(cache).__name__} as cache, which are two names of one thing: give {CACHE_KEYWORD}"
        )
    given = past_key_values if cache is None else cache
    if given is not None and not isinstance(given, Cache):
        refuse(
            f"{'cache' if given is cache else 'past_key_values'} is a {type(given).__name__}; give "
            "a Cache, e.g. transformers.DynamicCache()"
        )
    return given


def wants_dict(return_dict: bool | None, config: ChatGLMConfig) -> bool:
    return bool(config.return_dict) if return_dict is None else return_dict


def _is_ids(value: Any, *ndims: int) -> bool:
    whole = (torch.int32, torch.int64)
    return isinstance(value, Tensor) and value.dtype in whole and value.ndim in ndims


def _is_number(value: Any) -> bool:
    return isinstance(value, int) or (_is_ids(value, 0, 1) and value.numel() == 1)


def _is_lengths(value: Any) -> bool:
    return _is_ids(value, 1)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


# What attention takes of its caller, of packed rows: where samples end, and the longest.
# "cache_position" is of transformers 4.57, and said by the cache.
_OF_ATTENTION: dict[str, Callable[[Any], bool]] = {
    "cu_seq_lens_k": _is_lengths,
    "cu_seq_lens_q": _is_lengths,
    "is_causal": _is_bool,
    "max_length_k": _is_number,
    "max_length_q": _is_number,
}
ATTENTION_KEYWORDS = tuple(_OF_ATTENTION)
_OF_ATTENTION["cache_position"] = _is_lengths

# Callers read these in the signature of the model with a head, and pass them to the model without
# one, too (TRL's DistillationTrainer does). It has no logits that they could change.
OF_LOGITS = ("logits_to_keep", "return_last_logit", "skip_logits")

# What generate keeps account of, in its various versions, and a model need not know.
_OF_GENERATE: dict[str, Callable[[Any], bool]] = {
    # Of stop_strings, and of an assistant with another vocabulary.
    "tokenizer": lambda value: isinstance(value, PreTrainedTokenizerBase),
    "assistant_tokenizer": lambda value: isinstance(value, PreTrainedTokenizerBase),
    "is_first_iteration": _is_bool,
    "labels": lambda value: _is_ids(value, 2),
    "cache_position": _is_lengths,
}
if "next_sequence_length" in signature(GenerationMixin.prepare_inputs_for_generation).parameters:
    _OF_GENERATE["next_sequence_length"] = _is_number


def names_of(*forwards: Callable) -> tuple[str, ...]:
    """Return the keywords that methods named ``forward`` have in their signatures, each once."""
    every = [one for forward in forwards for one in signature(forward).parameters.values()]
    named = [one.name for one in every if one.kind is not one.VAR_KEYWORD]
    return tuple(name for name in dict.fromkeys(named) if name != "self")


def refuse_unknown(given: dict[str, Any], model: str, known: Sequence[str]) -> None:
    """Raise ``ValueError`` for a keyword that is not ``known`` to the class ``model``, nor to
    attention."""
    for name, value in given.items():
        if name not in known and name not in _OF_ATTENTION:
            refuse(
                f"forward was given {name}, which it does not know{_what(value)}: {model} takes "
                f"{', '.join(known)}, and for attention {', '.join(ATTENTION_KEYWORDS)}"
            )


def attention_keywords(given: dict[str, Any]) -> dict[str, Any]:
    """Return those of ``given`` that attention takes. Raises ``ValueError`` for a value that is not
    of its name's kind."""
    attention = {}
    for name, kind in _OF_ATTENTION.items():
        if (value := given.get(name)) is None:
            continue
        is_alone = name.startswith("max_") and given.get(f"cu_seq_lens{name[-2:]}") is None
        if is_alone or not kind(value):
            refuse(f"forward was given {name}{_what(value)}, which is not what goes by that name")
        if name in ATTENTION_KEYWORDS:
            attention[name] = value
    return attention


def without_account(given: dict[str, Any]) -> dict[str, Any]:
    """What of generate's keywords goes on to ``forward``: not what generate keeps account of."""
    for name, kind in _OF_GENERATE.items():
        value = given.get(name)
        if value is not None and not kind(value):
            refuse(
                f"prepare_inputs_for_generation was given {name}{_what(value)}, which is not what "
                "goes by that name"
            )
    return {name: value for name, value in given.items() if name not in _OF_GENERATE}


def _what(value: Any) -> str:
    """Its type, and what may help to tell what it is."""
    if isinstance(value, Tensor):
        return f" (a tensor {tuple(value.shape)} of {value.dtype})"
    if isinstance(value, Cache):
        return f" (a {type(value).__name__}; here {CACHE_KEYWORD} is the name of a cache)"
    return f" (of type {type(value).__name__})"


def overrides_generation(since: str) -> Callable:
    """Mark a method that takes the place of one that ``generate`` has since that version."""

    def mark(method: Callable) -> Callable:
        if Version(VERSION) >= Version(since):
            _OVERRIDDEN.append(method.__name__)
        return method

    return mark


_OVERRIDDEN: list[str] = []


def check_generate() -> None:
    """Raise ``RuntimeError`` where ``generate`` no longer has what this code overrides."""
    if gone := [name for name in _OVERRIDDEN if not hasattr(GenerationMixin, name)]:
        raise RuntimeError(
            f"generate of transformers {VERSION} has no {', '.join(gone)}, which this code takes "
            f"the place of; install a tested one: pip install 'transformers{TESTED_TRANSFORMERS}'"
        )
