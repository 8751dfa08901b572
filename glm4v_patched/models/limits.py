"""Limit the time and memory that another person's folder may take when it is loaded.

Other modules have further limits: :mod:`check_weights` of the sizes in a config,
:mod:`..patch.config_json` of JSON files, and :mod:`limited_process` of programs (templates and
regular expressions).
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
from .limited_process import LIMITED_PROCESS, LimitExceeded, TaskFailed
from .weight_files import read_header

# JSON files that transformers reads to load tokenizer and processor. It also reads config.json,
# which check_weights.py checks.
PROCESSOR_JSON_FILES = ["added_tokens.json", "chat_template.json", "preprocessor_config.json"]
PROCESSOR_JSON_FILES += ["processor_config.json", "special_tokens_map.json", "tokenizer.json"]
PROCESSOR_JSON_FILES += ["tokenizer_config.json"]
TEMPLATE_FILES = ["chat_template.jinja", "additional_chat_templates/*.jinja"]
BPE_RANKS_FILE = "tokenizer.model"  # BPE tokens and their ranks, one a line
# Keys that make transformers read other files than PROCESSOR_JSON_FILES and BPE_RANKS_FILE.
OTHER_FILE_KEYS = {"fast_tokenizer_files", "configuration_files", "tokenizer_file", "vocab_file"}
OTHER_FILE_KEYS |= {"tokenizer_object"}
# Limits of the number of tokens beside the vocabulary, of the characters of such a token, and of
# the bytes of a line of the ranks file. The time of loading or encoding grows with their squares.
MAX_ADDED_TOKENS, MAX_TOKEN_CHARACTERS, MAX_RANK_LINE_BYTES = 2**14, 256, 2**11
# Allowed types of normalizers and pre-tokenizers in a tokenizer.json. Other types can lengthen a
# text without limit, or run for ever.
NORMALIZERS = {"Sequence", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents"}
PRE_TOKENIZERS = {"Sequence", "Split", "ByteLevel", "Digits", "Punctuation", "WhitespaceSplit"}


def _is_token(value: Any) -> bool:
    content = value.get("content") if isinstance(value, dict) else value
    return isinstance(content, str)


def _are_tokens(values: Any) -> bool:
    tokens = values.values() if isinstance(values, dict) else values
    return values is None or (isinstance(values, (dict, list)) and all(map(_is_token, tokens)))


def _are_tokens_by_id(values: Any) -> bool:
    return isinstance(values, dict) and _are_tokens(values) and all(map(str.isdecimal, values))


TOKEN_CHECK = (lambda value: value is None or _is_token(value), "a token as text or as an object")
SIDE_CHECK = (lambda value: value in ("left", "right"), "left or right")
# Checks of the tokenizer's settings (check_setting_types). Without them, transformers raises errors
# of any class for invalid values, sometimes only when the first text is encoded.
TOKENIZER_SETTINGS: dict[str, str | int | ValueCheck] = {
    "added_tokens_decoder": (_are_tokens_by_id, "an object of tokens by their ids"),
    "clean_up_tokenization_spaces": "optional_flag",
    "image_size": (lambda value: value is None or type(value) is int, "pixels of a side, or null"),
    "init_inputs": (lambda value: value == [], "an empty list"),
    "model_input_names": (
        lambda value: isinstance(value, list) and value[:1] == ["input_ids"] and _are_tokens(value),
        "a list of names, of which the first is input_ids",
    ),
    "padding_side": SIDE_CHECK,
    "split_special_tokens": "flag",
    "truncation_side": SIDE_CHECK,
}
TOKENIZER_SETTINGS |= dict.fromkeys(
    ("additional_special_tokens", "extra_special_tokens"),
    (_are_tokens, "a list of tokens, or an object of tokens by their names"),
)
NAMED_TOKENS = ("bos", "cls", "eos", "mask", "pad", "sep", "unk")
TOKENIZER_SETTINGS |= {f"{name}_token": TOKEN_CHECK for name in NAMED_TOKENS}
ID_CHECK = (lambda value: type(value) is int and value >= 0, "the id of a token")
# For each key of peft's config: the function of ``re`` with which peft matches module names, and
# the pattern in which it inserts the key's value. Lists under the first two keys are plain names.
PEFT_PATTERNS = {
    "target_modules": ("fullmatch", "{}"),
    "exclude_modules": ("fullmatch", "{}"),
    "layers_pattern": ("match", r"(?:^|.*?\.){}\.(?P<idx>\d+)\."),
    "rank_pattern": ("match", r"(.*\.)?({})$"),
    "alpha_pattern": ("match", r"(.*\.)?({})$"),
    "modules_to_save": ("match", r"(^|.*\.){}($|\..*)"),
}
# Ends of the names of adapter weights whose size depends on the LoRA rank.
RANK_SIZED = ("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B")


@dataclass
class LimitedTemplate:
    """Replacement of transformers' ``render_jinja_template`` that is safe for any chat template.

    A template other than this package's runs in the limited process. If a template has exceeded a
    limit once, it is not run again.

    Attributes:
        location: The folder or id of the tokenizer, for messages.
        error: The message of the exceeded limit.
    """

    location: str
    error: str | None = None

    def __call__(self, **options: Any) -> Any:
        if options["chat_template"] == CHAT_TEMPLATE:
            return render_jinja_template(**options)
        if self.error is None:
            try:
                return LIMITED_PROCESS.run("render", options)
            except LimitExceeded as error:
                self.error = (
                    f"{self.location}: its chat template {error}; use another template, or none, "
                    "so that this package's template is used"
                )
            except TaskFailed as error:
                if error.kind in ("TemplateError", "TemplateRuntimeError", "UndefinedError"):
                    raise TemplateError(str(error)) from None
                raise ValueError(f"{self.location}: its chat template: {error}") from None
        raise ValueError(self.error)


def require_processor_files(location: str, revision: str) -> None:
    """Check the tokenizer and processor files of a folder or Hub id.

    Raises:
        ValueError: A file cannot be read, is too large or too deeply nested, or contains a type or
            a regular expression that may run for ever.
    """
    folder = Path(location)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        patterns = [*PROCESSOR_JSON_FILES, *TEMPLATE_FILES, BPE_RANKS_FILE]
        folder = Path(snapshot_download(location, revision=revision, allow_patterns=patterns))
    for name in PROCESSOR_JSON_FILES:
        if (path := folder / name).exists():
            _require_processor_json(path, path.stat().st_mtime_ns)
    templates = (path for pattern in TEMPLATE_FILES for path in folder.glob(pattern))
    for path in templates:
        try:
            read_bytes_within_limit(path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
    if (path := folder / BPE_RANKS_FILE).exists():
        longest = max(map(len, read_bytes_within_limit(path).splitlines()), default=0)
        if longest > MAX_RANK_LINE_BYTES:
            problem = f"{path} has a line of {longest:,} bytes"
            raise ValueError(f"{problem}; expected at most {MAX_RANK_LINE_BYTES:,}")


@lru_cache
def _require_processor_json(path: Path, mtime_ns: int) -> None:
    """Check one file. The result is cached until ``mtime_ns`` changes, because reading a vocabulary
    takes a second."""
    values = read_json_object(path)
    if keys := sorted(key for key in OTHER_FILE_KEYS & values.keys() if values[key] is not None):
        raise ValueError(
            f"{path}: {keys[0]} is {shorten(str(values[keys[0]]))}, which names files to read in "
            "place of those that were checked; remove it"
        )
    # The whole file added_tokens.json is one collection of tokens.
    collections = {path.name: values} if path.name == "added_tokens.json" else values
    for key, tokens in collections.items():
        if isinstance(tokens, (dict, list)) and len(tokens) > MAX_ADDED_TOKENS and key != "model":
            problem = f"{path}: {key} has {len(tokens):,} entries"
            raise ValueError(f"{problem}; expected at most {MAX_ADDED_TOKENS:,}")
    if path.name in ("tokenizer_config.json", "special_tokens_map.json"):
        check_setting_types(values, TOKENIZER_SETTINGS, str(path))
    if path.name == "added_tokens.json":
        check_setting_types(values, dict.fromkeys(values, ID_CHECK), str(path))
    if path.name == "tokenizer.json":
        _require_known_types(f"{path}: normalizer", values.get("normalizer"), NORMALIZERS)
        _require_known_types(f"{path}: pre_tokenizer", values.get("pre_tokenizer"), PRE_TOKENIZERS)


def _require_known_types(location: str, component: Any, allowed: set[str]) -> None:
    """Raise ``ValueError`` for a normalizer or pre-tokenizer that may run for ever.

    Its type must be in ``allowed``, and it may split only by this model's regular expression. The
    components of a "Sequence" are checked, too.
    """
    if not isinstance(component, dict):
        return
    split = component.get("pattern")
    pattern = split.get("Regex") if isinstance(split, dict) else None
    if component.get("type") not in allowed or pattern not in (None, SPLIT_PATTERN):
        raise ValueError(
            f"{location} has {shorten(json.dumps(component, ensure_ascii=False))}; expected the "
            f"types {', '.join(sorted(allowed))}, and only this model's regular expression"
        )
    for key in ("normalizers", "pretokenizers"):
        for inner in component[key] if isinstance(component.get(key), list) else ():
            _require_known_types(location, inner, allowed)


def require_short_tokens(location: str, tokens: Iterable[object]) -> None:
    """Raise ``ValueError`` for long special tokens.

    The tokenizer searches every message for all prefixes of special tokens.
    """
    longest = max((str(token) for token in tokens), key=len, default="")
    if len(longest) > MAX_TOKEN_CHARACTERS:
        raise ValueError(
            f"{location}: the special token {shorten(longest)} has {len(longest):,} characters; "
            f"expected at most {MAX_TOKEN_CHARACTERS}"
        )


def require_valid_adapters(source: ModelSource) -> None:
    """Check adapters before peft loads them.

    peft would allocate layers of any rank that the config names. So peft makes the adapters on the
    meta device first, without memory, and their shapes are compared with those in the file.

    Raises:
        ValueError: A pattern of the config takes too long, peft cannot make the adapters, or their
            weights do not match the config.
    """
    if source.adapters is None:
        return
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    from ..remote.configuration_chatglm import ChatGLMConfig
    from ..remote.modeling_chatglm import GLM4VForCausalLM

    path = source.adapters / ADAPTER_CONFIG
    config = ChatGLMConfig.from_pretrained(source.model, revision=source.revision or "main")
    with torch.device("meta"):
        model = GLM4VForCausalLM(config)
    _require_quick_patterns(path, [name for name, _ in model.named_modules()])
    tensors = read_header(source.adapters / ADAPTER_WEIGHTS)
    present = {name: [*info.shape] for name, info in tensors.items()}
    try:
        with torch.device("meta"), warnings.catch_warnings():
            # peft warns about its own use of transformers, and about missing names.
            warnings.simplefilter("ignore")
            settings = LoraConfig.from_pretrained(str(source.adapters))
            settings.init_lora_weights = False  # meta tensors have no values
            adapted = get_peft_model(model, settings, low_cpu_mem_usage=True)
            state_dict = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    except Exception as error:  # peft validates few values
        raise ValueError(f"{path}: peft cannot make its adapters: {error}") from error
    # Only the sizes of these weights depend on the rank. If other weights are missing, loading the
    # adapters reports it.
    expected = {n: [*weight.shape] for n, weight in state_dict.items() if n.endswith(RANK_SIZED)}
    mismatched = sorted(name for name, shape in expected.items() if present.get(name) != shape)
    if mismatched:
        name = mismatched[0]
        problem = f"{name} is {present.get(name, 'missing')} in {ADAPTER_WEIGHTS}, and "
        problem += f"{expected[name]} according to {ADAPTER_CONFIG}"
        raise ValueError(
            f"{source.adapters}: {len(mismatched)} of {len(expected)} weights do not match "
            f"{ADAPTER_CONFIG} on {source.model}: {problem}; expected the settings with which they "
            "were saved"
        )


def _require_quick_patterns(path: Path, module_names: Sequence[str]) -> None:
    """Match all module names with the regular expressions of adapters, in the limited process.

    peft matches them without a limit when it loads the adapters.
    """
    config = read_json_object(path)
    for key, (function, wrapper) in PEFT_PATTERNS.items():
        value, patterns = config.get(key), []
        if isinstance(value, str):
            patterns = [value]
        elif isinstance(value, (list, dict)) and function == "match":
            patterns = [*value]
        if not patterns:
            continue
        try:
            LIMITED_PROCESS.run(
                "match", [(function, wrapper.format(pattern)) for pattern in patterns], module_names
            )
        except LimitExceeded as error:
            raise ValueError(
                f"{path}: {key} {error} when it was compared with the names of "
                f"{len(module_names):,} "
                f"modules: {shorten(str(value))}; expected a list of names, or a pattern without "
                "nested repetitions"
            ) from None
        except TaskFailed as error:
            problem = f"{path}: {key} is not a valid regular expression ({error})"
            raise ValueError(f"{problem}; expected one that matches module names") from None
