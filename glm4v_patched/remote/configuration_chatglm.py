"""Configuration of glm-4v, with the field names of the published ``config.json``.

Some fields have the same value in every glm-4v checkpoint (:data:`FIXED_FIELDS`). Any other value
is refused, because the model does not implement it.
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
# The Trainer of 5.1.0 does not pass the model to DeepSpeed.
TESTED_TRANSFORMERS = f">={OLDEST_TRANSFORMERS},!=5.1.0,<{FIRST_UNTESTED_TRANSFORMERS}"


def check_transformers(installed: str) -> None:
    """Warn if the installed version is untested; raise ``ImportError`` if it is too old."""
    problem = (
        f"this glm-4v code is tested on transformers {TESTED_TRANSFORMERS}, but {installed} is "
        "installed"
    )
    if Version(installed) < Version(OLDEST_TRANSFORMERS):
        raise ImportError(
            f"{problem}, which is too old; install a tested version: "
            f"pip install 'transformers{TESTED_TRANSFORMERS}'"
        )
    if not SpecifierSet(TESTED_TRANSFORMERS).contains(installed, prereleases=True):
        # transformers' logger warns once, although each Auto class may load a copy of this file.
        logging.get_logger().warning_once(
            f"{problem}; if it fails or gives wrong numbers, install a tested version: "
            f"pip install 'transformers{TESTED_TRANSFORMERS}'"
        )


check_transformers(transformers.__version__)


# The attention implementations that a config file may name. Flash attention is not one of them: if
# its package is not installed, transformers downloads it from the Hub.
BUILT_IN_ATTENTION = {"eager", "sdpa", "flex_attention"}
# Quantization methods for which a tested transformers downloads kernels from the Hub.
QUANTIZERS_WITH_HUB_KERNELS = ["eetq", "fbgemm_fp8", "fp8", "gguf", "metal", "mxfp4", "nvfp4"]


def refuse_remote_code(values: dict, source: str = "config.json") -> None:
    """Raise ``ValueError`` for a setting that makes transformers download and run code.

    Args:
        values: Settings. Nested dicts are searched, too.
        source: Name of the file or object that has ``values``, for messages.
    """
    for key, value in values.items():
        runs_code = key in ("kernel_config", "use_kernels", "custom_generate") and bool(value)
        runs_code |= key == "quant_method" and value in QUANTIZERS_WITH_HUB_KERNELS
        # compressed-tensors imports a name of the form "file.py:class".
        runs_code |= key in ("format", "type") and ":" in str(value)
        if str(key).endswith(("_implementation", "_implementation_internal")):
            names = [*value.values()] if isinstance(value, dict) else [value]
            built_in = {None, *BUILT_IN_ATTENTION}
            # "paged|sdpa" is sdpa for continuous batching.
            runs_code = any(str(n).removeprefix("paged|") not in map(str, built_in) for n in names)
        elif isinstance(value, dict) and not runs_code:
            refuse_remote_code(value, f"{source}: {key}")
        if runs_code:
            raise ValueError(
                f"{source} has {key} {value!r}, which would download and run code (transformers' "
                f"built-in attention is {', '.join(sorted(BUILT_IN_ATTENTION))}): remove the "
                "setting, or pass it to from_pretrained yourself"
            )


# The largest finite float32. The largest bfloat16 is about the same.
MAX_FLOAT32 = 3.4028234663852886e38


def refuse_nonfinite(values: Mapping | Sequence, source: str) -> None:
    """Raise ``ValueError`` if a number, at any nesting, is NaN, infinite or beyond float32."""
    items = values.items() if isinstance(values, Mapping) else enumerate(values)
    for key, value in items:
        if isinstance(value, (Mapping, list, tuple)):
            refuse_nonfinite(value, f"{source}: {key}")
        elif isinstance(value, (int, float)) and not abs(value) <= MAX_FLOAT32:
            # Python refuses to convert integers of more than 4,300 digits to text.
            text = value if isinstance(value, float) else f"of {value.bit_length()} bits"
            raise ValueError(
                f"{source}: {key} is {text}; expected a finite number, at most "
                f"{MAX_FLOAT32:.2g}, which is float32's largest"
            )


# Upper limits on sizes in a config, far above those of any model. Building a model with one size at
# its limit takes about 15 s on the meta device.
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


MAX_INT32 = 2**31 - 1


def _is_token_id(value: Any) -> bool:
    is_integer = isinstance(value, Integral) and value is not True and value is not False
    return is_integer and -MAX_INT32 <= int(value) <= MAX_INT32


def _is_instance_of(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


def _is_label_key(key: Any) -> bool:
    return str(key).isascii() and str(key).isdigit()


# A function that returns whether a value is valid, and a description of valid values for messages.
ValueCheck = tuple[Callable[[Any], bool], str]
DTYPE_NAMES = ("auto", "float64", "float32", "float16", "bfloat16")
# Checks of settings, by the name of a type.
VALUE_CHECKS: dict[str, ValueCheck] = {
    "flag": (_is_instance_of(bool), "true or false"),
    "number": (lambda value: isinstance(value, Real) and not isinstance(value, bool), "a number"),
    "id": (lambda value: value is None or _is_token_id(value), "a token id, or null"),
    "ids": (
        lambda value: (
            value is None
            or _is_token_id(value)
            or (isinstance(value, (list, tuple)) and all(map(_is_token_id, value)))
        ),
        "a token id, a list of token ids, or null",
    ),
    "text": (_is_instance_of(str, type(None)), "text or null"),
    "texts": (
        lambda value: (
            value is None or (isinstance(value, list) and all(map(_is_instance_of(str), value)))
        ),
        "a list of texts, or null",
    ),
    "object": (_is_instance_of(Mapping, type(None)), "an object, or null"),
    "labels": (
        lambda value: (
            value is None or (isinstance(value, Mapping) and all(map(_is_label_key, value)))
        ),
        "an object of labels by their numbers, or null",
    ),
    "dtype": (
        lambda value: value is None or str(value).removeprefix("torch.") in DTYPE_NAMES,
        f"null or one of {', '.join(DTYPE_NAMES)}",
    ),
    "optional_flag": (_is_instance_of(bool, type(None)), "true, false or null"),
}


def check_setting_types(
    values: Mapping, checks: Mapping[str, str | int | ValueCheck], source: str
) -> None:
    """Raise ``ValueError`` for a setting of the wrong type or size.

    Args:
        values: Settings by name.
        checks: For each name a key of :data:`VALUE_CHECKS`, a :data:`ValueCheck`, or the greatest
            valid size. Settings without a check are accepted.
        source: Name of the file that has ``values``, for messages.
    """
    for name, value in values.items():
        if (check := checks.get(name)) is None:
            continue
        if isinstance(check, int):
            is_valid = type(value) is int and 1 <= value <= check
            expected = f"an integer from 1 to {check:,}"
        else:
            predicate, expected = VALUE_CHECKS[check] if isinstance(check, str) else check
            is_valid = predicate(value)
        if not is_valid:
            raise ValueError(f"{source}: {name} is {value!r:.60}; expected {expected}")


def refuse_nonfinite_generation(values: Mapping, source: str) -> None:
    """Run :func:`refuse_nonfinite` on options of generation.

    ``max_time`` may be infinite, and a ``sequence_bias`` minus infinity.
    """
    checked = {name: value for name, value in values.items() if name != "max_time"}
    biases = checked.pop("sequence_bias", None) or ()
    pairs = biases.items() if isinstance(biases, Mapping) else biases
    refuse_nonfinite(checked, source)
    refuse_nonfinite([bias for *_, bias in pairs if bias != -inf], f"{source}: sequence_bias")


def keep_our_auto_classes(auto_map: dict | None, own_auto_class: str | None) -> dict:
    """Return the entries of an ``auto_map`` that name classes of this code.

    Args:
        auto_map: For each Auto class the ``module.Class`` that transformers loads.
        own_auto_class: Auto class of the object that is being saved. Its entry is always returned,
            because transformers wrote it for this object.
    """
    entries = (auto_map if isinstance(auto_map, dict) else {}).items()
    normalized = {key: [*value] if isinstance(value, tuple) else value for key, value in entries}
    return {
        key: value
        for key, value in normalized.items()
        if key == own_auto_class or FULL_AUTO_MAP.get(key) == value
    }


def warn_unsaved(names: Iterable, file: str) -> None:
    """Log the names of unknown settings, which are not saved to ``file``."""
    if names := [f"{name!r:.60}" for name in names]:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        logging.get_logger().warning(
            f"{file} is saved without {', '.join(names[:8])}{more}: only settings of glm-4v are "
            "saved, because others may name code that would run when the file is loaded"
        )


def keep_known_settings(values: Mapping, known: Collection, file: str) -> dict:
    """Return the items of ``values`` with a known key, and log all other keys."""
    warn_unsaved([key for key in values if key not in known], file)
    return {key: value for key, value in values.items() if key in known}


def find_adapter_problem() -> str | None:
    """Return why adapters of this model cannot be loaded, or ``None``.

    The text continues a sentence that begins with "transformers" and its version.
    """
    if not is_peft_available():
        return None
    from transformers.integrations.peft import MIN_PEFT_VERSION

    installed = version("peft")
    if Version(installed) < Version(MIN_PEFT_VERSION):
        return f"wants peft {MIN_PEFT_VERSION} or newer for them, but {installed} is installed"
    if Version("5.0") <= Version(transformers.__version__) < Version("5.6"):
        return "does not find their weights by name (5.6 and newer do), and leaves them random"
    return None


def require_adapter_support(name_or_path, options: dict, are_adapters: bool = False) -> None:
    """Raise ``ImportError``, before weights are read, if adapters cannot be loaded.

    Args:
        name_or_path: A model, whose folder may contain adapters; with ``are_adapters``, adapters.
        options: Keywords of ``from_pretrained``. Their ``adapter_kwargs`` may have the path of
            adapters.
    """
    if (problem := find_adapter_problem()) is None:
        return
    adapter_path = (options.get("adapter_kwargs") or {}).get("_adapter_model_path")
    if adapter_path is None and not are_adapters:
        names = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")
        hub_options = {name: options[name] for name in names if options.get(name) is not None}
        are_adapters = find_adapter_config_file(name_or_path, **hub_options) is not None
    if adapter_path is not None or are_adapters:
        adapter_path = adapter_path or name_or_path
        raise ImportError(
            f"{adapter_path} holds adapters, and transformers {transformers.__version__} "
            f"{problem}: load their base model, then "
            f"peft.PeftModel.from_pretrained(model, {str(adapter_path)!r})"
        )


# The id of the tokens between an image's begin and end in expanded prompts: <|begin_of_video|> of
# glm-4v-9b (ChatGLMProcessor.image_token).
IMAGE_TOKEN_ID = 151341

# The auto_map of every saved model: for each Auto class the module.Class that transformers loads.
AUTO_MAP = {
    "AutoConfig": "configuration_chatglm.ChatGLMConfig",
    "AutoModel": "modeling_chatglm.GLM4VForCausalLM",
    "AutoModelForCausalLM": "modeling_chatglm.GLM4VForCausalLM",
    "AutoModelForSeq2SeqLM": "modeling_chatglm.GLM4VForCausalLM",
    "AutoModelForImageTextToText": "modeling_chatglm.GLM4VForCausalLM",
    "AutoModelForMultimodalLM": "modeling_chatglm.GLM4VForCausalLM",  # of transformers 5
    "AutoModelForSequenceClassification": "modeling_chatglm.ChatGLMForSequenceClassification",
}

PROCESSOR_CLASS = "ChatGLMProcessor"
# The auto_map entries of all files that are saved, also of the processor's and the tokenizer's.
FULL_AUTO_MAP: dict[str, Any] = AUTO_MAP | {
    "AutoImageProcessor": "image_processing_chatglm.ChatGLMImageProcessor",
    "AutoProcessor": f"processing_chatglm.{PROCESSOR_CLASS}",
    "AutoTokenizer": ["tokenization_chatglm.ChatGLM4Tokenizer", None],
}


def _known_quantization_settings(quantization_config: dict) -> dict:
    """Return the settings that transformers' class for this quantization config would save.

    Return all settings if that class rejects them, or if its package is not installed.
    """
    from transformers.quantizers.auto import AutoQuantizationConfig

    try:
        known = AutoQuantizationConfig.from_dict({**quantization_config}).to_dict()
    except Exception:  # other packages raise any exception for a config that they do not take
        return quantization_config
    return {key: value for key, value in quantization_config.items() if key in known}


def _model_auto_map(auto_map: dict | None) -> dict:
    """Return our ``auto_map``, but keep references ``repository--module.Class`` to our classes.

    Such a reference means that the config's folder has no code and another repository has it.
    """
    references = {
        name: value
        for name, value in (auto_map or {}).items()
        if name in AUTO_MAP and value.partition("--")[2] == AUTO_MAP[name]
    }
    # If the only reference is AutoConfig's, it may mean the published code, whose config class has
    # the same name as ours.
    return AUTO_MAP | (references if references.keys() - {"AutoConfig"} else {})


@dataclass(frozen=True)
class EVA2CLIPVisionConfig:
    """The validated ``vision_config`` of a glm-4v.

    Args:
        patch_size, image_size: Sides of squares, in pixels.
        num_positions: Number of patches plus one (the class token).
        scaling_factor: Divisor of the image features.
    """

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
        check_setting_types(vars(self), VISION_FIELD_CHECKS, "vision_config")
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
                f"vision_config: layer_norm_eps is {self.layer_norm_eps}, expected 0 or more, and "
                f"scaling_factor is {self.scaling_factor}, expected a number other than 0"
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
        """Number of patches of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_image_tokens(self) -> int:
        """Number of tokens between an image's begin and end: one for each 2 x 2 patches."""
        return (self.image_size // self.patch_size // 2) ** 2


# Fields of the published config.json whose only supported value is the one in every checkpoint.
FIXED_FIELDS = {
    "multi_query_attention": True,
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "pre_seq_len": None,
    "tie_word_embeddings": False,
}
# All fields except ``vision_config`` and ``image_token_id``, with the values of glm-4v-9b.
DEFAULTS = FIXED_FIELDS | {
    "num_layers": 40,
    "padded_vocab_size": 151552,
    "hidden_size": 4096,
    "ffn_hidden_size": 13696,
    "kv_channels": 128,
    "num_attention_heads": 32,
    "multi_query_group_num": 2,
    "seq_length": 8192,
    "original_rope": True,
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
# The settings of transformers' base class that are saved for a glm-4v. Its other settings name
# classes, or belong in generation_config.json.
TRANSFORMERS_FIELDS: tuple[str, ...] = (
    "architectures",
    "auto_map",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "is_encoder_decoder",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "quantization_config",
    "return_dict",
    "torch_dtype",
    "transformers_version",
)
SAVED_CONFIG_FIELDS = {*DEFAULTS, "vision_config", "image_token_id", *TRANSFORMERS_FIELDS}
# Tables for check_setting_types. The check of a field is its size limit, or a check for the type of
# its default.
CHECK_BY_TYPE = {bool: "flag", int: "number", float: "number", tuple: "ids", str: "text"}
MODEL_FIELD_CHECKS: dict[str, str | int] = {
    name: CHECK_BY_TYPE[type(default)]
    for name, default in DEFAULTS.items()
    if default is not None and name not in FIXED_FIELDS
}
MODEL_FIELD_CHECKS |= MAX_CONFIG_SIZES | {"image_token_id": "id", "bos_token_id": "ids"}
MODEL_FIELD_CHECKS |= {"pad_token_id": "id", "boi_token_id": "id", "eoi_token_id": "id"}
VISION_FIELD_CHECKS: dict[str, str | int] = {
    field.name: CHECK_BY_TYPE[type(field.default)] for field in fields(EVA2CLIPVisionConfig)
}
VISION_FIELD_CHECKS |= MAX_VISION_SIZES
# Checks of the fields of transformers' base class, and of the type of vision_config.
GENERAL_FIELD_CHECKS = {"architectures": "texts", "auto_map": "object", "id2label": "labels"}
GENERAL_FIELD_CHECKS |= {"chunk_size_feed_forward": "number", "label2id": "object"}
GENERAL_FIELD_CHECKS |= {"quantization_config": "object", "vision_config": "object"}
GENERAL_FIELD_CHECKS |= {"dtype": "dtype", "torch_dtype": "dtype"}
GENERAL_FIELD_CHECKS |= dict.fromkeys(("is_encoder_decoder", "output_attentions"), "optional_flag")
GENERAL_FIELD_CHECKS |= dict.fromkeys(("output_hidden_states", "return_dict"), "optional_flag")
GENERAL_FIELD_CHECKS |= {"problem_type": "text", "transformers_version": "text"}
# The model classes that a config file may name.
KNOWN_ARCHITECTURES = {reference.rpartition(".")[2] for reference in AUTO_MAP.values()}
KNOWN_ARCHITECTURES |= {"ChatGLMModel", "ChatGLMForConditionalGeneration"}
# Attributes in which transformers looks for the decoder's config.
TEXT_CONFIG_NAMES = ("decoder", "generator", "text_config", "text_encoder")
KV_HEADS_ALIAS = "num_key_value_heads"
# The keyword in which transformers' pipelines pass their task to from_pretrained.
PIPELINE_TASK_KEYWORD = "_from_pipeline"
# The base class of transformers 4 overwrites these fields with its own defaults.
OVERWRITTEN_FIELDS = ("bos_token_id", "pad_token_id", "eos_token_id", "tie_word_embeddings")


class ChatGLMConfig(PretrainedConfig):
    """Configuration of :class:`GLM4VForCausalLM`; ``ChatGLMConfig()`` is glm-4v-9b.

    :data:`DEFAULTS` lists the fields. Of the fields below, the published file has only
    ``original_rope``.

    Args:
        original_rope: Rotate pairs of neighboring channels (interleaved), as glm-4v does.
            ``False``, as in cogagent-9b's file, rotates halves (GPT-NeoX style).
        rope_in_fp32: Keep the rotary cosines and sines in fp32. ``False`` rounds them to the
            model's dtype, as the published code does.
        skip_logits: In training with labels, compute only the loss, in chunks of
            ``loss_chunk_size`` supervised tokens; the output's ``logits`` is then ``None``.
        initializer_range: Standard deviation of randomly initialized weights.
        image_token_id: The id of the tokens between an image's begin and end in expanded prompts,
            for trainers that count these tokens. The model accepts any id there. ``None`` if the
            vocabulary is too small.
    """

    model_type = "chatglm"
    # Outputs that a Trainer would otherwise collect as predictions of an evaluation.
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
        check_setting_types({"vision_config": vision_config}, GENERAL_FIELD_CHECKS, "config.json")
        for alias, name in self.attribute_map.items():
            if alias not in kwargs:
                continue
            value = kwargs.pop(alias)
            # to_dict writes this field and its alias. The alias wins, because callers change it.
            if alias == KV_HEADS_ALIAS:
                kwargs[name] = value
            if kwargs.setdefault(name, value) != value:
                raise ValueError(
                    f"config.json has different values for {alias} and {name}, two names of one "
                    "setting; give one of them"
                )
        refuse_nonfinite(kwargs | {"vision_config": dict(vision_config or {})}, "config.json")
        check_setting_types(kwargs, MODEL_FIELD_CHECKS, "config.json")
        values = {name: kwargs.pop(name, default) for name, default in DEFAULTS.items()}
        if isinstance(values["eos_token_id"], tuple):
            values["eos_token_id"] = [*values["eos_token_id"]]
        for name, value in values.items():
            setattr(self, name, value)
        if image_token_id is None and self.padded_vocab_size > IMAGE_TOKEN_ID:
            image_token_id = IMAGE_TOKEN_ID
        self.image_token_id = image_token_id
        # A plain dict, as in the published file, because vLLM and others index it.
        self.vision_config = asdict(EVA2CLIPVisionConfig()) | dict(vision_config or {})
        self._refuse_unsupported()
        kwargs["auto_map"] = _model_auto_map(kwargs.get("auto_map"))
        super().__init__(**kwargs)
        for name in OVERWRITTEN_FIELDS:
            setattr(self, name, values[name])

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> "ChatGLMConfig":
        """Convert a config of the published code's class or of vLLM's to this class.

        A config of this class is returned as it is.

        Raises:
            ValueError: ``config`` does not belong to a glm-4v.
        """
        if isinstance(config, cls):
            return config
        values = config.to_dict()
        if values.get("model_type") != cls.model_type or not values.get("vision_config"):
            raise ValueError(
                f"{type(config).__module__}.{type(config).__qualname__} has model_type "
                f"{values.get('model_type')!r} and vision_config {values.get('vision_config')!r}: "
                "give the config of a glm-4v, of model_type 'chatglm' and with a vision_config"
            )
        converted = cls.from_dict(values)
        for name in ("quantization_config", "_pre_quantization_dtype", "_commit_hash"):
            if name in vars(config):  # to_dict drops these, or converts them to a dict
                setattr(converted, name, getattr(config, name))
        if config._attn_implementation is not None:
            converted._attn_implementation = config._attn_implementation
        return converted

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load a config as transformers does, and store a pipeline's task in it.

        The model's ``from_pretrained`` reads the task from there. It is never saved.
        """
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        if kwargs.get(PIPELINE_TASK_KEYWORD) is not None:
            config = loaded[0] if isinstance(loaded, tuple) else loaded
            setattr(config, PIPELINE_TASK_KEYWORD, kwargs[PIPELINE_TASK_KEYWORD])
        return loaded

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """Build a config as transformers does.

        Raises:
            ValueError: A setting is invalid, or would make transformers download and run code.
        """

        def is_reserved(name: str) -> bool:
            class_attribute = getattr(cls, name, None)
            plain_types = (bool, int, str, type(None))
            return name in TEXT_CONFIG_NAMES or not isinstance(class_attribute, plain_types)

        refuse_remote_code(config_dict)
        refuse_nonfinite(kwargs, "from_pretrained")
        check_setting_types(config_dict, GENERAL_FIELD_CHECKS, "config.json")
        # Keys that would overwrite class attributes, such as methods, are reserved. Refuse them, or
        # drop them if they are null. num_labels is a property, too, but a config file may set it.
        reserved_keys = [
            name
            for name in config_dict.keys() - SAVED_CONFIG_FIELDS - {"num_labels"}
            if is_reserved(name)
        ]
        for name in reserved_keys:
            if config_dict[name] is not None:
                raise ValueError(
                    f"config.json has {name}, which is an attribute of config classes and not a "
                    "setting; expected no such key: remove it"
                )
        config_dict = {key: v for key, v in config_dict.items() if key not in reserved_keys}
        architectures = config_dict.get("architectures") or ()
        if not KNOWN_ARCHITECTURES.issuperset(architectures):
            logging.get_logger().warning_once(
                f"config.json: architectures {architectures!r:.80} is ignored; expected one of "
                f"{', '.join(sorted(KNOWN_ARCHITECTURES))}"
            )
            config_dict = config_dict | {"architectures": None}
        if config_dict.get("quantization_config", ...) is None:  # transformers 4 fails on null
            config_dict = {k: v for k, v in config_dict.items() if k != "quantization_config"}
        try:
            return super().from_dict(config_dict, **kwargs)
        except ImportError:
            raise
        except Exception as error:  # transformers may fail on any setting of other models
            # transformers 4.57 adds attn_implementation.
            known = SAVED_CONFIG_FIELDS | cls.attribute_map.keys() | {"attn_implementation"}
            unknown = ", ".join(sorted(f"{name!r:.60}" for name in config_dict.keys() - known))
            cure = f"; glm-4v has no {unknown:.500}: remove the wrong setting" if unknown else ""
            raise ValueError(
                f"config.json cannot be read by transformers {transformers.__version__}: "
                f"{error}{cure}"
            ) from error

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Save as transformers does, but only settings of glm-4v; log all other settings."""
        values, saved = super().to_diff_dict(), self.to_diff_dict()
        unknown = [
            name for name in values if name not in SAVED_CONFIG_FIELDS | self.attribute_map.keys()
        ]
        for name in saved.keys() & {"vision_config", "quantization_config"}:
            unknown += [f"{name}.{key}" for key in values[name] if key not in saved[name]]
        warn_unsaved(unknown, "config.json")
        return super().save_pretrained(save_directory, *args, **kwargs)

    def to_dict(self) -> dict:
        """Return all settings, with an ``auto_map`` that refers to code in the same folder."""
        # peft reads this alias from the dict.
        heads = {KV_HEADS_ALIAS: self.multi_query_group_num}
        values = super().to_dict() | {"auto_map": dict(AUTO_MAP)} | heads
        values.pop(PIPELINE_TASK_KEYWORD, None)
        return values

    def to_diff_dict(self) -> dict:
        """Return the settings of glm-4v that are saved; a few default values are left out."""
        values = {
            k: value for k, value in super().to_diff_dict().items() if k in SAVED_CONFIG_FIELDS
        }
        known = [field.name for field in fields(EVA2CLIPVisionConfig)]
        vision = values["vision_config"]
        values["vision_config"] = {k: value for k, value in vision.items() if k in known}
        if "quantization_config" in values:
            values["quantization_config"] = _known_quantization_settings(
                values["quantization_config"]
            )
        omitted = {"bos_token_id": None, "pre_seq_len": None, "image_token_id": IMAGE_TOKEN_ID}
        if self.padded_vocab_size <= IMAGE_TOKEN_ID:
            omitted["image_token_id"] = None
        for name, value in omitted.items():
            if name in values and values[name] == value:
                del values[name]
        return values

    @property
    def rotary_distance(self) -> int:
        """Distance between the two channels of a rotated pair.

        With ``original_rope`` it is 1 (interleaved pairs), else half of the rotated channels
        (GPT-NeoX style).
        """
        return 1 if self.original_rope else self.kv_channels // 4

    @property
    def vision(self) -> EVA2CLIPVisionConfig:
        """``vision_config``, validated, with attribute access and without unknown fields."""
        known = {field.name for field in fields(EVA2CLIPVisionConfig)}
        values = {name: value for name, value in self.vision_config.items() if name in known}
        return EVA2CLIPVisionConfig(**values)

    def _refuse_unsupported(self) -> None:
        """Raise ``ValueError`` for values that the model does not support."""
        for name, value in FIXED_FIELDS.items():
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
        _ = self.vision  # validates it
