"""Limits what a folder of others may cost, before transformers and peft read it.

Sizes of a config are compared in :mod:`check_weights`, JSON is read by :mod:`..patch.config_json`,
and what is a program, a template or a pattern, runs in :mod:`limited_process`.
"""

import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from ..patch.config_json import read_bytes_within_limit, read_json_object
from ..remote.configuration_chatglm import ValueCheck, check_setting_types
from ..remote.tokenization_chatglm import CHAT_TEMPLATE, SPLIT_PATTERN, render_jinja_template
from ..terminal_text import shorten
from .base import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ModelSource
from .limited_process import PROCESS, Failed, LimitExceeded
from .weight_files import read_header

# What transformers reads of a folder by itself; the config is read where the weights are looked at.
SETTINGS = ["added_tokens.json", "chat_template.json", "preprocessor_config.json"]
SETTINGS += ["processor_config.json", "special_tokens_map.json", "tokenizer.json"]
SETTINGS += ["tokenizer_config.json"]
TEMPLATES = ["chat_template.jinja", "additional_chat_templates/*.jinja"]
RANKS = "tokenizer.model"
# By which transformers takes other files in the place of these.
OTHER_FILES = {"fast_tokenizer_files", "configuration_files", "tokenizer_file", "vocab_file"}
OTHER_FILES |= {"tokenizer_object"}
# Of tokens beside the vocabulary, of characters of one, and of bytes of a line of the ranks: time
# grows with their squares.
MOST_TOKENS, LONGEST_TOKEN, LONGEST_RANK = 2**14, 256, 2**11
# Of a tokenizer.json: those that can make a text longer and longer, or take for ever, are not here.
NORMALIZERS = {"Sequence", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents"}
SPLITS = {"Sequence", "Split", "ByteLevel", "Digits", "Punctuation", "WhitespaceSplit"}


def _is_token(value: Any) -> bool:
    content = value.get("content") if isinstance(value, dict) else value
    return isinstance(content, str)


def _are_tokens(values: Any) -> bool:
    named = values.values() if isinstance(values, dict) else values
    return values is None or (isinstance(values, (dict, list)) and all(map(_is_token, named)))


def _are_tokens_by_id(values: Any) -> bool:
    return isinstance(values, dict) and _are_tokens(values) and all(map(str.isdecimal, values))


TOKEN = (lambda value: value is None or _is_token(value), "a token as text or as an object")
SIDE = (lambda value: value in ("left", "right"), "left or right")
# What settings of the tokenizer may be; transformers raises errors of any kind for others, some of
# them when the first text is encoded.
TOKENIZER: dict[str, str | int | ValueCheck] = {
    "added_tokens_decoder": (_are_tokens_by_id, "an object of tokens by their ids"),
    "clean_up_tokenization_spaces": "option",
    "image_size": (lambda value: value is None or type(value) is int, "pixels of a side, or null"),
    "init_inputs": (lambda value: value == [], "an empty list"),
    "model_input_names": (
        lambda value: isinstance(value, list) and value[:1] == ["input_ids"] and _are_tokens(value),
        "a list of names, of which the first is input_ids",
    ),
    "padding_side": SIDE,
    "split_special_tokens": "flag",
    "truncation_side": SIDE,
}
TOKENIZER |= dict.fromkeys(
    ("additional_special_tokens", "extra_special_tokens"),
    (_are_tokens, "a list of tokens, or an object of tokens by their names"),
)
NAMED_TOKENS = ("bos", "cls", "eos", "mask", "pad", "sep", "unk")
TOKENIZER |= {f"{name}_token": TOKEN for name in NAMED_TOKENS}
ID = (lambda value: type(value) is int and value >= 0, "the id of a token")
# By which function peft compares each key's patterns with the name of a module, and what it puts
# around them; lists of the first two are names.
PATTERNS = {
    "target_modules": ("fullmatch", "{}"),
    "exclude_modules": ("fullmatch", "{}"),
    "layers_pattern": ("match", r"(?:^|.*?\.){}\.(?P<idx>\d+)\."),
    "rank_pattern": ("match", r"(.*\.)?({})$"),
    "alpha_pattern": ("match", r"(.*\.)?({})$"),
    "modules_to_save": ("match", r"(^|.*\.){}($|\..*)"),
}
# Ends of names of the weights whose size is that of a rank.
OF_RANK = ("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B")


@dataclass
class LimitedTemplate:
    """Renders chats as transformers' ``render_jinja_template`` does, in a process with limits
    unless the template is this package's own. What has once gone beyond them is not tried again.
    """

    place: str
    fault: str | None = None

    def __call__(self, **options: Any) -> Any:
        if options["chat_template"] == CHAT_TEMPLATE:
            return render_jinja_template(**options)
        if self.fault is None:
            try:
                return PROCESS.run("render", options)
            except LimitExceeded as error:
                self.fault = (
                    f"{self.place}: its chat template {error}; expected another template, or none, "
                    "so that this package's is used"
                )
            except Failed as error:
                if error.kind in ("TemplateError", "TemplateRuntimeError", "UndefinedError"):
                    raise TemplateError(str(error)) from None
                raise ValueError(f"{self.place}: its chat template: {error}") from None
        raise ValueError(self.fault)


def require_settings(place: str, revision: str) -> None:
    """Raise ``ValueError`` for a file of the tokenizer or the processor of a folder, or of an id of
    the Hub, that cannot be read, is larger or deeper than any, or holds what would take for ever.
    """
    folder = Path(place)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        patterns = [*SETTINGS, *TEMPLATES, RANKS]
        folder = Path(snapshot_download(place, revision=revision, allow_patterns=patterns))
    for name in SETTINGS:
        if (path := folder / name).exists():
            _require_setting(path, path.stat().st_mtime_ns)
    for path in (found for pattern in TEMPLATES for found in folder.glob(pattern)):
        try:
            read_bytes_within_limit(path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
    if (path := folder / RANKS).exists():
        longest = max(map(len, read_bytes_within_limit(path).splitlines()), default=0)
        if longest > LONGEST_RANK:
            problem = f"{path} has a line of {longest:,} bytes"
            raise ValueError(f"{problem}; expected at most {LONGEST_RANK:,}")


@lru_cache
def _require_setting(path: Path, changed: int) -> None:
    """Of a file that was ``changed`` then: to read a whole vocabulary takes a second."""
    values = read_json_object(path)
    named = sorted(key for key in OTHER_FILES & values.keys() if values[key] is not None)
    if found := next(iter(named), None):
        problem = (
            f"{path}: {found} is {shorten(str(values[found]))}, which names files to be read in "
        )
        raise ValueError(f"{problem} place of those that were checked; take it out")
    lists = {path.name: values} if path.name == "added_tokens.json" else values
    for key, tokens in lists.items():
        if isinstance(tokens, (dict, list)) and len(tokens) > MOST_TOKENS and key != "model":
            problem = f"{path}: {key} has {len(tokens):,} entries"
            raise ValueError(f"{problem}; expected at most {MOST_TOKENS:,}")
    if path.name in ("tokenizer_config.json", "special_tokens_map.json"):
        check_setting_types(values, TOKENIZER, str(path))
    if path.name == "added_tokens.json":
        check_setting_types(values, dict.fromkeys(values, ID), str(path))
    if path.name == "tokenizer.json":
        _require_plain_parts(f"{path}: normalizer", values.get("normalizer"), NORMALIZERS)
        _require_plain_parts(f"{path}: pre_tokenizer", values.get("pre_tokenizer"), SPLITS)


def _require_plain_parts(place: str, part: Any, allowed: set[str]) -> None:
    """Raise ``ValueError`` for a part of a tokenizer that is none of the ``allowed`` types, or
    splits by another regular expression than this model's."""
    if not isinstance(part, dict):
        return
    split = part.get("pattern")
    pattern = split.get("Regex") if isinstance(split, dict) else None
    if part.get("type") not in allowed or pattern not in (None, SPLIT_PATTERN):
        raise ValueError(
            f"{place} has {shorten(json.dumps(part, ensure_ascii=False))}; expected types among "
            f"{', '.join(sorted(allowed))}, and no regular expression but this model's"
        )
    for key in ("normalizers", "pretokenizers"):
        for inner in part[key] if isinstance(part.get(key), list) else ():
            _require_plain_parts(place, inner, allowed)


def require_short_tokens(place: str, tokens: Iterable[object]) -> None:
    """Raise ``ValueError`` for special tokens that are long: each of their beginnings is looked for
    in every message."""
    longest = max((str(token) for token in tokens), key=len, default="")
    if len(longest) > LONGEST_TOKEN:
        raise ValueError(
            f"{place}: the special token {shorten(longest)} has {len(longest):,} characters; "
            f"expected at most {LONGEST_TOKEN}"
        )


def require_adapters(base: ModelSource) -> None:
    """Raise ``ValueError`` for adapters whose patterns would keep peft for minutes, or whose
    weights are not those that peft makes by their settings.

    It makes layers of whatever rank is said there: here on a model that takes no memory.
    """
    if base.adapters is None:
        return
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    from ..remote.configuration_chatglm import ChatGLMConfig
    from ..remote.modeling_chatglm import GLM4VForCausalLM, torch

    path = base.adapters / ADAPTER_CONFIG
    config = ChatGLMConfig.from_pretrained(base.model, revision=base.revision or "main")
    with torch.device("meta"):
        model = GLM4VForCausalLM(config)
    _require_quick_patterns(path, [name for name, _ in model.named_modules()])
    tensors = read_header(base.adapters / ADAPTER_WEIGHTS)
    there = {name: [*shape.sides] for name, shape in tensors.items()}
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of peft's own use of transformers, and of no name
            settings = LoraConfig.from_pretrained(str(base.adapters))
            settings.init_lora_weights = False  # on weights that are not there
            adapted = get_peft_model(model, settings, low_cpu_mem_usage=True)
            made = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    except Exception as error:  # peft foresees few values
        raise ValueError(f"{path}: peft cannot make its adapters: {error}") from error
    # Others have sizes of the model's; whoever loads them reports what is missing.
    wanted = {name: [*weight.shape] for name, weight in made.items() if name.endswith(OF_RANK)}
    unlike = sorted(name for name, shape in wanted.items() if there.get(name) != shape)
    if unlike:
        problem = f"{unlike[0]} is {there.get(unlike[0], 'absent')} in {ADAPTER_WEIGHTS}, and "
        problem += f"{wanted.get(unlike[0], 'absent')} by {ADAPTER_CONFIG}"
        raise ValueError(
            f"{base.adapters}: {len(unlike)} of {len(wanted)} weights are not those of "
            f"{ADAPTER_CONFIG} on {base.model}: {problem}; expected the settings that they were "
            "saved with"
        )


def _require_quick_patterns(path: Path, modules: Sequence[str]) -> None:
    """Compare the regular expressions of adapters with the names of all ``modules``, as peft does
    in the process that loads them."""
    config = read_json_object(path)
    for key, (function, around) in PATTERNS.items():
        value, patterns = config.get(key), []
        if isinstance(value, str):
            patterns = [value]
        elif isinstance(value, (list, dict)) and function == "match":
            patterns = [*value]
        if not patterns:
            continue
        try:
            PROCESS.run("match", [(function, around.format(each)) for each in patterns], modules)
        except LimitExceeded as error:
            raise ValueError(
                f"{path}: {key} {error} when it was compared with the names of {len(modules):,} "
                f"modules: {shorten(str(value))}; expected a list of names, or a pattern without "
                "repetitions of repetitions"
            ) from None
        except Failed as error:
            problem = f"{path}: {key} is no regular expression ({error})"
            raise ValueError(f"{problem}; expected one for names of modules") from None
