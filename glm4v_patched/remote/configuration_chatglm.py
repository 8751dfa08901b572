"""Configuration of glm-4v, with the field names of the published ``config.json``.

Fields that every glm-4v checkpoint has at one value are refused at another: a field that is ignored
in silence would mean other numbers in silence.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from math import inf
from numbers import Integral, Real
from typing import Any

import transformers
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.utils import find_adapter_config_file, is_peft_available, logging

OLDEST_TRANSFORMERS = "4.57.6"
FIRST_UNTESTED_TRANSFORMERS = "5.25"
# 5.1.0's Trainer does not hand a model to DeepSpeed.
TESTED_TRANSFORMERS = f">={OLDEST_TRANSFORMERS},!=5.1.0,<{FIRST_UNTESTED_TRANSFORMERS}"


def check_transformers(found: str) -> None:
    """Warn of a version that this code is not tested on; ``ImportError`` if it is too old."""
    what = f"this glm-4v code is tested on transformers {TESTED_TRANSFORMERS} and found {found}"
    if Version(found) < Version(OLDEST_TRANSFORMERS):
        raise ImportError(
            f"{what}, which lacks what it needs; install a tested one: "
            f"pip install 'transformers{TESTED_TRANSFORMERS}'"
        )
    if not SpecifierSet(TESTED_TRANSFORMERS).contains(found, prereleases=True):
        # Of transformers' own logger: each Auto class may load a copy of this file, and one warning
        # is enough.
        logging.get_logger().warning_once(
            f"{what}; if it fails, or its numbers do, install a tested one: "
            f"pip install 'transformers{TESTED_TRANSFORMERS}'"
        )


check_transformers(transformers.__version__)


# Without the package of flash attention, transformers fetches it from the Hub: a folder names none.
OWN_IMPLEMENTATIONS = {"eager", "sdpa", "flex_attention"}
# Whose kernels some tested transformers fetches from the Hub.
FETCHED_QUANTIZERS = ["eetq", "fbgemm_fp8", "fp8", "gguf", "metal", "mxfp4", "nvfp4"]


def refuse_fetched_code(values: dict, place: str = "config.json") -> None:
    """Raise ``ValueError`` for a name in a file by which transformers fetches code of others."""
    for key, value in values.items():
        fetches = key in ("kernel_config", "use_kernels", "custom_generate") and bool(value)
        fetches |= key == "quant_method" and value in FETCHED_QUANTIZERS
        # compressed-tensors takes a name "file.py:class" for one that it has to import.
        fetches |= key in ("format", "type") and ":" in str(value)
        if str(key).endswith(("_implementation", "_implementation_internal")):
            named = [*value.values()] if isinstance(value, dict) else [value]
            own = {None, *OWN_IMPLEMENTATIONS}
            fetches = any(str(n).removeprefix("paged|") not in map(str, own) for n in named)
        elif isinstance(value, dict) and not fetches:
            refuse_fetched_code(value, f"{place}: {key}")
        if fetches:
            raise ValueError(
                f"{place} has {key} {value!r}, by which code of others would be fetched and run; "
                f"of attention, {', '.join(sorted(OWN_IMPLEMENTATIONS))} are transformers' own: "
                "take it out, or give it to from_pretrained yourself"
            )


# Of float32 and, but for rounding, of bfloat16.
LARGEST_NUMBER = 3.4028234663852886e38


def refuse_nonfinite(values: Mapping | Sequence, place: str) -> None:
    """Raise ``ValueError`` for a number among nested values that is NaN, infinite or beyond
    float32."""
    items = values.items() if isinstance(values, Mapping) else enumerate(values)
    for key, value in items:
        if isinstance(value, (Mapping, list, tuple)):
            refuse_nonfinite(value, f"{place}: {key}")
        elif isinstance(value, (int, float)) and not abs(value) <= LARGEST_NUMBER:
            shown = value if isinstance(value, float) else f"of {value.bit_length()} bits"
            raise ValueError(
                f"{place}: {key} is {shown}; expected a finite number, at most "
                f"{LARGEST_NUMBER:.2g}, which is float32's largest"
            )


# Largest sizes that a config may have: far above those of every model. One of all of them is built
# on the meta device in a quarter of a minute.
MAX_CONFIG_SIZES = {
    "num_layers": 1_000,
    "padded_vocab_size": 2**24,
    "hidden_size": 2**20,
    "ffn_hidden_size": 2**20,
    "kv_channels": 2**14,
    "num_attention_heads": 2**14,
    "multi_query_group_num": 2**14,
    "seq_length": 2**31,
    "loss_chunk_size": 2**31,
    "num_labels": 2**16,
}
MAX_VISION_SIZES = {
    "hidden_size": 2**20,
    "num_hidden_layers": 1_000,
    "num_heads": 2**14,
    "intermediate_size": 2**20,
    "in_channels": 2**10,
    "patch_size": 2**10,
    "image_size": 2**14,
    "num_positions": 2**24,
}


MOST = 2**31 - 1


def _whole(least: int) -> Callable[[Any], bool]:
    def is_whole(value: Any) -> bool:
        is_number = isinstance(value, Integral) and value is not True and value is not False
        return is_number and least <= int(value) <= MOST

    return is_whole


def _of(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


def _is_number(key: Any) -> bool:
    return str(key).isascii() and str(key).isdigit()


# How a value is compared, and how an error says what was expected.
ValueCheck = tuple[Callable[[Any], bool], str]
DTYPES = ("auto", "float64", "float32", "float16", "bfloat16")
# What a setting may be, by its name here.
KINDS: dict[str, ValueCheck] = {
    "flag": (_of(bool), "true or false"),
    "number": (lambda value: isinstance(value, Real) and not isinstance(value, bool), "a number"),
    "id": (lambda value: value is None or _whole(-MOST)(value), "the number of a token, or null"),
    "ids": (
        lambda value: (
            value is None
            or _whole(-MOST)(value)
            or (isinstance(value, (list, tuple)) and all(map(_whole(-MOST), value)))
        ),
        "the number of a token, a list of such, or null",
    ),
    "text": (_of(str, type(None)), "text or null"),
    "texts": (
        lambda value: value is None or (isinstance(value, list) and all(map(_of(str), value))),
        "a list of texts, or null",
    ),
    "object": (_of(Mapping, type(None)), "an object, or null"),
    "labels": (
        lambda value: value is None or (isinstance(value, Mapping) and all(map(_is_number, value))),
        "an object of labels by their numbers, or null",
    ),
    "dtype": (
        lambda value: value is None or str(value).removeprefix("torch.") in DTYPES,
        f"null or one of {', '.join(DTYPES)}",
    ),
    "option": (_of(bool, type(None)), "true, false or null"),
}


def check_setting_types(values: Mapping, kinds: Mapping[str, str | int | ValueCheck], place: str) -> None:
    """Raise ``ValueError`` for a setting of another type than ``kinds`` has for its name: one of
    :data:`KINDS` or like them, or the largest of a size. For transformers builds whatever a config
    says, and of a thousand million layers never ends."""
    for name, value in values.items():
        if (kind := kinds.get(name)) is None:
            continue
        if isinstance(kind, int):
            fits = type(value) is int and 1 <= value <= kind
            expected = f"an integer from 1 to {kind:,}"
        else:
            check, expected = KINDS[kind] if isinstance(kind, str) else kind
            fits = check(value)
        if not fits:
            raise ValueError(f"{place}: {name} is {value!r:.60}; expected {expected}")


def refuse_nonfinite_generation(values: Mapping, place: str) -> None:
    """Raise ``ValueError`` as :func:`refuse_nonfinite`, for options of generation. ``max_time`` may
    be infinite, and a bias of sequences minus infinity, which excludes them."""
    checked = {name: value for name, value in values.items() if name != "max_time"}
    biases = checked.pop("sequence_bias", None) or ()
    pairs = biases.items() if isinstance(biases, Mapping) else biases
    refuse_nonfinite(checked, place)
    refuse_nonfinite([bias for *_, bias in pairs if bias != -inf], f"{place}: sequence_bias")


def own_places(auto_map: dict | None, saved: str | None) -> dict:
    """Return those entries of an ``auto_map`` that name a file of this code, in its own folder.

    Args:
        saved: The name for the object that is saved, whose place transformers has written itself.
    """
    given = (auto_map if isinstance(auto_map, dict) else {}).items()
    places = {key: [*value] if isinstance(value, tuple) else value for key, value in given}
    return {key: value for key, value in places.items() if key == saved or PLACES.get(key) == value}


def log_unknown(names: Iterable, file: str) -> None:
    """Log in one line which settings of a file are not saved: what they may name is not known."""
    if names := [f"{name!r:.60}" for name in names]:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        logging.get_logger().warning(
            f"{file} is saved without {', '.join(names[:8])}{more}: only settings of glm-4v are "
            "saved, for others may name code that whoever loads the file would run"
        )


def keep_known_settings(values: Mapping, known: Collection, file: str) -> dict:
    """Return the items of ``values`` with a known key, and log the other keys."""
    log_unknown([key for key in values if key not in known], file)
    return {key: value for key, value in values.items() if key in known}


def find_adapter_problem() -> str | None:
    """Why this transformers cannot load adapters of this model by itself; ``None`` if it can."""
    if not is_peft_available():
        return None
    from transformers.integrations.peft import MIN_PEFT_VERSION

    found = version("peft")
    if Version(found) < Version(MIN_PEFT_VERSION):
        return f"wants peft {MIN_PEFT_VERSION} or newer for them and found {found}"
    if Version("5.0") <= Version(transformers.__version__) < Version("5.6"):
        return "before 5.6 does not find them by their names, and leaves them random"
    return None


def check_adapters(name_or_path, options: dict, are_adapters: bool = False) -> None:
    """Raise ``ImportError``, before weights are read, for adapters that this transformers cannot
    load by itself: ``name_or_path``, or what these ``options`` of ``from_pretrained`` name."""
    if (fault := find_adapter_problem()) is None:
        return
    adapters = (options.get("adapter_kwargs") or {}).get("_adapter_model_path")
    if adapters is None and not are_adapters:
        names = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")
        where = {name: options[name] for name in names if options.get(name) is not None}
        are_adapters = find_adapter_config_file(name_or_path, **where) is not None
    if adapters is not None or are_adapters:
        raise ImportError(
            f"{adapters or name_or_path} holds adapters, and transformers "
            f"{transformers.__version__} {fault}: load the model that they are for, then "
            f"peft.PeftModel.from_pretrained(model, {str(adapters or name_or_path)!r})"
        )


# <|begin_of_video|> of glm-4v-9b: processing_chatglm.py says why.
IMAGE_TOKEN_ID = 151341

# What a saved model tells transformers to load, whatever was in the config it came from.
AUTO_MAP = {
    "AutoConfig": "configuration_chatglm.ChatGLMConfig",
    "AutoModel": "modeling_chatglm.GLM4VForCausalLM",
    "AutoModelForCausalLM": "modeling_chatglm.GLM4VForCausalLM",
    "AutoModelForSeq2SeqLM": "modeling_chatglm.GLM4VForCausalLM",
    "AutoModelForImageTextToText": "modeling_chatglm.GLM4VForCausalLM",
    "AutoModelForMultimodalLM": "modeling_chatglm.GLM4VForCausalLM",  # of transformers 5
    "AutoModelForSequenceClassification": "modeling_chatglm.ChatGLMForSequenceClassification",
}

PROCESSOR = "ChatGLMProcessor"
# All that a file of ours may name.
PLACES: dict[str, Any] = AUTO_MAP | {
    "AutoImageProcessor": "image_processing_chatglm.ChatGLMImageProcessor",
    "AutoProcessor": f"processing_chatglm.{PROCESSOR}",
    "AutoTokenizer": ["tokenization_chatglm.ChatGLM4Tokenizer", None],
}


def _own_keys(quantization_config: dict) -> dict:
    """Return what the class of that method writes, of a config of quantized weights; all of it
    where the method's package is not installed, without which nobody can say."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    try:
        own = AutoQuantizationConfig.from_dict({**quantization_config}).to_dict()
    except Exception:  # what a package of others raises for what it does not take
        return quantization_config
    return {key: value for key, value in quantization_config.items() if key in own}


def _auto_map(given: dict | None) -> dict:
    """Ours, as ``repository--module.Class`` where it was read from weights without code."""
    elsewhere = {
        name: value
        for name, value in (given or {}).items()
        if name in AUTO_MAP and value.partition("--")[2] == AUTO_MAP[name]
    }
    # The published code has a config class of the same name; its models are told apart.
    return AUTO_MAP | (elsewhere if elsewhere.keys() - {"AutoConfig"} else {})


@dataclass(frozen=True)
class EVA2CLIPVisionConfig:
    """The ``vision_config`` of a glm-4v, checked. Lengths are in pixels or in tokens as named."""

    hidden_size: int = 1792
    num_hidden_layers: int = 63
    num_heads: int = 16
    intermediate_size: int = 15360
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-6
    dropout_prob: float = 0.0
    in_channels: int = 3
    patch_size: int = 14
    image_size: int = 1120
    num_positions: int = 6401
    scaling_factor: float = 8

    def __post_init__(self):
        check_setting_types(vars(self), VISION_SETTINGS, "vision_config")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"vision_config: hidden_size {self.hidden_size} is not a multiple of num_heads "
                f"{self.num_heads}"
            )
        if self.num_positions != self.num_patches + 1:
            raise ValueError(
                f"vision_config: num_positions is {self.num_positions}, but image_size "
                f"{self.image_size} in patches of {self.patch_size} makes {self.num_patches} "
                f"patches and one class position: set num_positions to {self.num_patches + 1}"
            )
        if self.num_image_tokens < 1:
            raise ValueError(
                f"vision_config: image_size {self.image_size} is less than two patches of "
                f"{self.patch_size}; an image needs at least 2 x 2 patches"
            )
        if self.layer_norm_eps < 0 or not self.scaling_factor:
            raise ValueError(
                f"vision_config: layer_norm_eps is {self.layer_norm_eps}, and scaling_factor "
                f"{self.scaling_factor}; expected 0 or more, and another number than 0"
            )
        if self.hidden_act not in ACT2FN:
            raise ValueError(
                f"vision_config: hidden_act is {self.hidden_act!r:.60}; expected gelu, or another "
                f"activation of transformers {transformers.__version__}"
            )
        if self.dropout_prob:
            raise ValueError(f"vision_config: dropout_prob {self.dropout_prob} is not supported")

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_image_tokens(self) -> int:
        """Positions of one image between its begin and its end: patches after a 2 x 2 stride."""
        return (self.image_size // self.patch_size // 2) ** 2


# Fields of the published file at the one value that is computed: that of every checkpoint.
ONLY = {
    "multi_query_attention": True,
    "original_rope": True,
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "pre_seq_len": None,
    "tie_word_embeddings": False,
}
# All fields but ``vision_config`` and ``image_token_id``, with the values of glm-4v-9b.
DEFAULTS = ONLY | {
    "num_layers": 40,
    "padded_vocab_size": 151552,
    "hidden_size": 4096,
    "ffn_hidden_size": 13696,
    "kv_channels": 128,
    "num_attention_heads": 32,
    "multi_query_group_num": 2,
    "seq_length": 8192,
    "rope_ratio": 1,
    "layernorm_epsilon": 1.5625e-07,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "attention_softmax_in_fp32": True,
    "attention_dropout": 0.0,
    "bias_dropout_fusion": True,
    "use_cache": True,
    "boi_token_id": 151339,
    "eoi_token_id": 151340,
    "bos_token_id": None,
    "pad_token_id": 151329,
    "eos_token_id": (151329, 151336, 151338),
    "initializer_range": 0.02,
    "rope_in_fp32": False,
    "skip_logits": False,
    "loss_chunk_size": 1024,
}
# Settings that transformers has for every model, and a glm-4v may have in its file. Others name
# classes, or are options of generation, which have a file of their own.
OF_TRANSFORMERS: tuple[str, ...] = (
    "architectures",
    "auto_map",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
)
OF_TRANSFORMERS += ("is_encoder_decoder", "label2id", "model_type", "output_attentions")
OF_TRANSFORMERS += ("output_hidden_states", "problem_type", "quantization_config", "return_dict")
OF_TRANSFORMERS += ("torch_dtype", "transformers_version")
SAVED_CONFIG_FIELDS = {*DEFAULTS, "vision_config", "image_token_id", *OF_TRANSFORMERS}
# The kind of each setting, by its default; of a size the largest.
OF_DEFAULTS = {bool: "flag", int: "number", float: "number", tuple: "ids", str: "text"}
SETTINGS: dict[str, str | int] = {
    name: OF_DEFAULTS[type(v)] for name, v in DEFAULTS.items() if v is not None and name not in ONLY
}
SETTINGS |= MAX_CONFIG_SIZES | {"image_token_id": "id", "bos_token_id": "ids"}
SETTINGS |= {"pad_token_id": "id", "boi_token_id": "id", "eoi_token_id": "id"}
VISION_SETTINGS: dict[str, str | int] = {
    field.name: OF_DEFAULTS[type(field.default)] for field in fields(EVA2CLIPVisionConfig)
}
VISION_SETTINGS |= MAX_VISION_SIZES
GENERAL_SETTINGS = {"architectures": "texts", "auto_map": "object", "chunk_size_feed_forward": "number"}
GENERAL_SETTINGS |= {"id2label": "labels", "label2id": "object", "quantization_config": "object"}
GENERAL_SETTINGS |= {"vision_config": "object", "dtype": "dtype", "torch_dtype": "dtype"}
GENERAL_SETTINGS |= dict.fromkeys(("is_encoder_decoder", "output_attentions"), "option")
GENERAL_SETTINGS |= dict.fromkeys(("output_hidden_states", "return_dict"), "option")
GENERAL_SETTINGS |= {"problem_type": "text", "transformers_version": "text"}
# Classes of models, ours and the published ones, that a file may name.
ARCHITECTURES = {place.rpartition(".")[2] for place in AUTO_MAP.values()}
ARCHITECTURES |= {"ChatGLMModel", "ChatGLMForConditionalGeneration"}
# What transformers takes for the config of a model's decoder, where it is there.
OF_TEXT = ("decoder", "generator", "text_config", "text_encoder")
HEADS = "num_key_value_heads"
# By which transformers' pipelines say what they load a model for.
PIPELINE_TASK = "_from_pipeline"
# transformers 4 puts these on every config, with values of its own, and 5 on none.
OF_EVERY_CONFIG = ("bos_token_id", "pad_token_id", "eos_token_id", "tie_word_embeddings")


class ChatGLMConfig(PretrainedConfig):
    """Configuration of :class:`GLM4VForCausalLM`; ``ChatGLMConfig()`` is glm-4v-9b.

    Fields are those of :data:`DEFAULTS`. Those not in the published file:

    Args:
        rope_in_fp32: Keep the rotary table in fp32. ``False`` rounds it to the model's dtype as
            the published code does, which is what the weights were trained with.
        skip_logits: In training, when labels are given, compute only the loss, in chunks of
            ``loss_chunk_size`` supervised positions; the output's ``logits`` is then ``None``.
        initializer_range: Standard deviation of new weights.
        image_token_id: What fills an image's positions in the rows of our processor, for trainers
            that count them; the model reads any id there. ``None`` for too small a vocabulary.
    """

    model_type = "chatglm"
    # A Trainer would gather these over all of an evaluation, as predictions.
    keys_to_ignore_at_inference = ["past_key_values", "cache", "image_hidden_states"]
    attribute_map = {
        "num_hidden_layers": "num_layers",
        "max_position_embeddings": "seq_length",
        "intermediate_size": "ffn_hidden_size",
        "head_dim": "kv_channels",
        "num_key_value_heads": "multi_query_group_num",
        "vocab_size": "padded_vocab_size",
    }
    _auto_class = "AutoConfig"

    def __init__(self, vision_config=None, image_token_id=None, **kwargs):
        check_setting_types({"vision_config": vision_config}, GENERAL_SETTINGS, "config.json")
        for alias, name in self.attribute_map.items():
            if alias not in kwargs:
                continue
            given = kwargs.pop(alias)
            if alias == HEADS:  # to_dict writes both names, and callers change this one
                kwargs[name] = given
            if kwargs.setdefault(name, given) != given:
                raise ValueError(f"config.json has {alias} and {name}, which differ; give one")
        refuse_nonfinite(kwargs | {"vision_config": dict(vision_config or {})}, "config.json")
        check_setting_types(kwargs, SETTINGS, "config.json")
        values = {name: kwargs.pop(name, default) for name, default in DEFAULTS.items()}
        if isinstance(values["eos_token_id"], tuple):
            values["eos_token_id"] = [*values["eos_token_id"]]
        for name, value in values.items():
            setattr(self, name, value)
        if image_token_id is None and self.padded_vocab_size > IMAGE_TOKEN_ID:
            image_token_id = IMAGE_TOKEN_ID
        self.image_token_id = image_token_id
        # A plain dict, as in the published file: vLLM and others index it.
        self.vision_config = asdict(EVA2CLIPVisionConfig()) | dict(vision_config or {})
        self._refuse_unsupported()
        kwargs["auto_map"] = _auto_map(kwargs.get("auto_map"))
        super().__init__(**kwargs)
        for name in OF_EVERY_CONFIG:
            setattr(self, name, values[name])

    @classmethod
    def of(cls, config: PretrainedConfig) -> "ChatGLMConfig":
        """``config``, which may be of a class of others (the published code's, or vLLM's, which is
        registered for the whole process), as an object of this class; itself if it is one."""
        if isinstance(config, cls):
            return config
        values = config.to_dict()
        if values.get("model_type") != cls.model_type or not values.get("vision_config"):
            raise ValueError(
                f"{type(config).__module__}.{type(config).__qualname__} has model_type "
                f"{values.get('model_type')!r} and vision_config {values.get('vision_config')!r}: "
                "give the config of a glm-4v, of model_type 'chatglm' and with a vision_config"
            )
        own = cls.from_dict(values)
        for name in ("quantization_config", "_pre_quantization_dtype", "_commit_hash"):
            if name in vars(config):  # to_dict flattens the first, and drops the others
                setattr(own, name, getattr(config, name))
        if config._attn_implementation is not None:
            own._attn_implementation = config._attn_implementation
        return own

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As usual; a pipeline's task is kept for the model that is loaded with this config."""
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        if kwargs.get(PIPELINE_TASK) is not None:
            config = loaded[0] if isinstance(loaded, tuple) else loaded
            setattr(config, PIPELINE_TASK, kwargs[PIPELINE_TASK])
        return loaded

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """As transformers'; ``ValueError`` for names by which it would fetch and run code."""

        def is_of_class(name: str) -> bool:
            default = getattr(cls, name, None)
            return name in OF_TEXT or not isinstance(default, (bool, int, str, type(None)))

        refuse_fetched_code(config_dict)
        refuse_nonfinite(kwargs, "from_pretrained")
        check_setting_types(config_dict, GENERAL_SETTINGS, "config.json")
        # A null one says nothing. Labels have a number, too.
        foreign = [
            name for name in config_dict.keys() - SAVED_CONFIG_FIELDS - {"num_labels"} if is_of_class(name)
        ]
        for name in foreign:
            if config_dict[name] is not None:
                raise ValueError(
                    f"config.json has {name}, which is a part of classes of configs, and no "
                    "setting; expected none of that name: take it out"
                )
        config_dict = {key: v for key, v in config_dict.items() if key not in foreign}
        named = config_dict.get("architectures") or ()
        if not ARCHITECTURES.issuperset(named):
            logging.get_logger().warning_once(
                f"config.json: architectures is {named!r:.80}, which is left out; expected one of "
                f"{', '.join(sorted(ARCHITECTURES))}"
            )
            config_dict = config_dict | {"architectures": None}
        if config_dict.get("quantization_config", ...) is None:  # transformers 4 asks it for more
            config_dict = {k: v for k, v in config_dict.items() if k != "quantization_config"}
        try:
            return super().from_dict(config_dict, **kwargs)
        except ImportError:
            raise
        except Exception as error:  # transformers reads settings of other models, of any type
            odd = ", ".join(sorted(f"{name!r:.60}" for name in config_dict.keys() - SAVED_CONFIG_FIELDS))
            cure = f"; glm-4v has no {odd:.500}: take out what is wrong" if odd else ""
            raise ValueError(
                f"config.json cannot be read by transformers {transformers.__version__}: "
                f"{error}{cure}"
            ) from error

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As usual, but for settings that glm-4v does not have: these are logged, and not saved."""
        values, own = super().to_diff_dict(), self.to_diff_dict()
        unknown = [name for name in values if name not in SAVED_CONFIG_FIELDS | self.attribute_map.keys()]
        for name in own.keys() & {"vision_config", "quantization_config"}:
            unknown += [f"{name}.{key}" for key in values[name] if key not in own[name]]
        log_unknown(unknown, "config.json")
        return super().save_pretrained(save_directory, *args, **kwargs)

    def to_dict(self) -> dict:
        """As usual; what is saved has the code beside it, wherever this one's came from."""
        # peft looks here, and not at the attributes.
        heads = {HEADS: self.multi_query_group_num}
        values = super().to_dict() | {"auto_map": dict(AUTO_MAP)} | heads
        values.pop(PIPELINE_TASK, None)
        return values

    def to_diff_dict(self) -> dict:
        """What is saved: settings of glm-4v, without what follows from the published fields."""
        values = {k: value for k, value in super().to_diff_dict().items() if k in SAVED_CONFIG_FIELDS}
        known = [field.name for field in fields(EVA2CLIPVisionConfig)]
        vision = values["vision_config"]
        values["vision_config"] = {k: value for k, value in vision.items() if k in known}
        if "quantization_config" in values:
            values["quantization_config"] = _own_keys(values["quantization_config"])
        absent = {"bos_token_id": None, "pre_seq_len": None, "image_token_id": IMAGE_TOKEN_ID}
        if self.padded_vocab_size <= IMAGE_TOKEN_ID:
            absent["image_token_id"] = None
        for name, value in absent.items():
            if name in values and values[name] == value:
                del values[name]
        return values

    @property
    def vision(self) -> EVA2CLIPVisionConfig:
        """``vision_config``, checked and with attribute access; fields that we do not know (a file
        may carry more) are left alone."""
        known = {field.name for field in fields(EVA2CLIPVisionConfig)}
        values = {name: value for name, value in self.vision_config.items() if name in known}
        return EVA2CLIPVisionConfig(**values)

    def _refuse_unsupported(self) -> None:
        for name, value in ONLY.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not supported; every glm-4v checkpoint "
                    f"has {value!r}"
                )
        if self.num_attention_heads % self.multi_query_group_num:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"multi_query_group_num {self.multi_query_group_num}"
            )
        if self.layernorm_epsilon < 0:
            raise ValueError(f"layernorm_epsilon is {self.layernorm_epsilon}; expected 0 or more")
        if self.kv_channels % 4:
            raise ValueError(
                f"kv_channels {self.kv_channels} is not a multiple of 4: half of a head is "
                "rotated, in pairs"
            )
        _ = self.vision
