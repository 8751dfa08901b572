"""``apply()``: transformers' Auto classes give our classes for every glm-4v, and for nothing else.

Registering our classes would not do: "chatglm" is the model type of other models too, and
transformers 4 prefers the code of a repository to what is registered. So each Auto class gets a
``from_pretrained`` that looks at what the repository holds and either loads our class, which needs
no trust in anybody's code, or does what it did before.
"""

import functools
import inspect
import logging
import os
import pkgutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import transformers
from packaging.specifiers import SpecifierSet
from transformers import PretrainedConfig
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import is_peft_available

from ..remote.configuration_chatglm import AUTO_MAP, TESTED_TRANSFORMERS, ChatGLMConfig
from ..remote.image_processing_chatglm import ChatGLMImageProcessor
from ..remote.modeling_chatglm import (
    ChatGLMForSequenceClassification,
    ChatGLMPreTrainedModel,
    GLM4VForCausalLM,
)
from ..remote.processing_chatglm import DOWNLOAD_OPTIONS, ChatGLMProcessor
from ..remote.tokenization_chatglm import ChatGLM4Tokenizer
from ..terminal_text import pip_install
from .adapter_names import check_module_names
from .patch_set import PatchSet, AttributePatch
from .repository import IMAGE_PROCESSOR_CONFIG_FILE, Repository, is_glm4v

logger = logging.getLogger(__name__)

# Some are of newer transformers only.
AUTO_MODEL_CLASSES = [
    name for name in AUTO_MAP if name.startswith("AutoModel") and hasattr(transformers, name)
]

# Where torchvision is absent, transformers 5.8 to 5.17 have a placeholder at the usual place, which
# refuses everything. Ours needs no torchvision.
AUTO_IMAGE_PROCESSOR = "transformers.models.auto.image_processing_auto:AutoImageProcessor"
AUTO_VIDEO_PROCESSOR = "transformers.models.auto.video_processing_auto:AutoVideoProcessor"

# Where the Auto classes get the code of repositories from, each under a name of its own.
REMOTE_CODE_IMPORTERS = [
    f"transformers.models.auto.{module}"
    for module in (
        "auto_factory",
        "configuration_auto",
        "image_processing_auto",
        "processing_auto",
        "tokenization_auto",
    )
]

# What the Auto classes take for themselves and our classes have no use for.
AUTO_CLASS_KWARGS = ("trust_remote_code", "code_revision", "use_fast", "tokenizer_type", "_from_auto")


@dataclass(frozen=True)
class _ApplyOptions:
    """What ``apply`` takes; ``None`` leaves the default."""

    fused_linear_cross_entropy: bool | None = None
    attn_implementation: str | None = None

    def __post_init__(self):
        fused, attention = self.fused_linear_cross_entropy, self.attn_implementation
        if not isinstance(fused, (bool, type(None))):
            raise ValueError(f"fused_linear_cross_entropy is {fused!r}: give True or False")
        if not isinstance(attention, (str, type(None))):
            raise ValueError(f"attn_implementation is {attention!r}: give the name of one")

    @property
    def loading_kwargs(self) -> dict[str, str]:
        """What from_pretrained and from_config take, unless it is said there."""
        name = self.attn_implementation
        return {} if name is None else {"attn_implementation": name}


class _PatchState:
    """What is in force: of one process, whoever asked for it."""

    lock = threading.RLock()
    patches: PatchSet | None = None
    options = _ApplyOptions()


def require_tested_transformers(version: str) -> None:
    """Raise ``ImportError`` for another; the model's code, which replaces nothing, only warns."""
    if not SpecifierSet(TESTED_TRANSFORMERS).contains(version, prereleases=True):
        raise ImportError(
            f"apply() replaces methods of transformers {TESTED_TRANSFORMERS} and found {version}; "
            f"install a tested one: {pip_install(f'transformers{TESTED_TRANSFORMERS}')}"
        )


def apply(
    *, fused_linear_cross_entropy: bool | None = None, attn_implementation: str | None = None
) -> None:
    """From now on the Auto classes give this package's classes for every glm-4v.

    ``AutoConfig``, ``AutoModel``, ``AutoModelForCausalLM``, ``AutoModelForSeq2SeqLM``,
    ``AutoModelForImageTextToText``, ``AutoModelForMultimodalLM`` (of transformers 5),
    ``AutoModelForSequenceClassification``, ``AutoTokenizer``, ``AutoProcessor``,
    ``AutoImageProcessor``, with and without ``trust_remote_code=True``, for folders and for
    repositories of the Hub; other models are loaded as before. ``AutoVideoProcessor`` refuses a
    glm-4v. Adapters that peft saves get our code beside them. Applying again changes nothing. A
    method that was taken from an Auto class before (``load = AutoModel.from_pretrained``) raises
    ``RuntimeError`` for a glm-4v with code of its own.

    Args:
        fused_linear_cross_entropy: In training, compute the loss in chunks without the logits of
            all positions (``config.skip_logits``); the output's ``logits`` is then ``None``.
        attn_implementation: For models that are loaded without saying which.

    Raises:
        ValueError: a value of another type; options that contradict those in force.
        ImportError: transformers is none of those that are tested.
        AttributeError: transformers has moved something; nothing was patched.
    """
    options = _ApplyOptions(fused_linear_cross_entropy, attn_implementation)
    with _PatchState.lock:
        if _PatchState.patches is None:
            require_tested_transformers(transformers.__version__)
            patches = PatchSet(_attribute_patches(options))
            patches.apply()
            _PatchState.patches, _PatchState.options = patches, options
        for name, value in asdict(options).items():
            # Not said before is off.
            if value is not None and (getattr(_PatchState.options, name) or None) != (
                value or None
            ):
                raise ValueError(
                    f"applied already with {_PatchState.options}, which {name}={value!r} "
                    "contradicts: revert() first"
                )


def revert() -> None:
    """Undo :func:`apply`; models that were loaded stay as they are. ``RuntimeError`` if somebody
    replaced one of the same attributes since, with its name."""
    with _PatchState.lock:
        if _PatchState.patches is not None:
            _PatchState.patches.revert()
            _PatchState.patches = None


@contextmanager
def applied(**options: Any) -> Iterator[None]:
    """:func:`apply` for a block; what was in force before it stays in force after it."""
    begins = _PatchState.patches is None
    apply(**options)
    try:
        yield
    finally:
        if begins:
            revert()


def _attribute_patches(options: _ApplyOptions) -> list[AttributePatch]:
    classes: dict[str, type[ChatGLMPreTrainedModel]] = dict.fromkeys(
        AUTO_MODEL_CLASSES, GLM4VForCausalLM
    )
    classes["AutoModelForSequenceClassification"] = ChatGLMForSequenceClassification
    loaders: dict[str, Callable] = {
        "AutoConfig": lambda name, /, **given: ChatGLMConfig.from_pretrained(
            name, name_or_path=name, **given
        ),
        **{name: partial(_load_model, options, model) for name, model in classes.items()},
        "AutoTokenizer": _load_tokenizer,
        "AutoProcessor": ChatGLMProcessor.from_pretrained,
        "AutoImageProcessor": _load_image_processor,
        "AutoVideoProcessor": _refuse_videos,
    }
    owners = {name: f"transformers:{name}" for name in loaders}
    owners |= {"AutoImageProcessor": AUTO_IMAGE_PROCESSOR, "AutoVideoProcessor": AUTO_VIDEO_PROCESSOR}
    swaps = [
        AttributePatch(owners[name], "from_pretrained", partial(_dispatch, load))
        for name, load in loaders.items()
    ]
    # In this order: on the way to the class, transformers 5.8 puts a new module in its own place.
    there, package = map(pkgutil.resolve_name, (AUTO_IMAGE_PROCESSOR, "transformers"))
    if package.AutoImageProcessor is not there:  # which keeps the placeholder, to be put back
        swaps.append(AttributePatch("transformers", "AutoImageProcessor", lambda placeholder: there))
    for name, model in classes.items():
        make = partial(_build_model, options, model)
        swaps.append(AttributePatch(owners[name], "from_config", partial(_dispatch_config, make)))
    swaps += [
        AttributePatch(module, "get_class_from_dynamic_module", _refuse_code) for module in REMOTE_CODE_IMPORTERS
    ]
    if is_peft_available():
        swaps.append(AttributePatch("peft:PeftModel", "save_pretrained", _save_code_with_adapters))
        tuner = "peft.tuners.tuners_utils:BaseTuner"
        swaps.append(AttributePatch(tuner, "inject_adapter", check_module_names))
    return swaps


def _dispatch(load: Callable, original: classmethod) -> classmethod:
    """A ``from_pretrained`` that calls ``load`` for a glm-4v and the original for all else."""

    @functools.wraps(original.__func__)
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        config = kwargs.get("config")
        repository = Repository(pretrained_model_name_or_path, kwargs)
        if isinstance(config, PretrainedConfig):
            is_ours = is_glm4v(config.to_dict())
        else:
            is_ours = repository.contains_glm4v()
        if not is_ours:
            return original.__func__(cls, pretrained_model_name_or_path, *args, **kwargs)
        if repository.hub_timeout is not None:
            logger.warning("%s: what is in the cache is loaded", repository.hub_timeout)
            kwargs["local_files_only"] = True
        return load(pretrained_model_name_or_path, *args, **_drop_auto_kwargs(kwargs))

    return classmethod(from_pretrained)


def _dispatch_config(make: Callable, original: classmethod) -> classmethod:
    @functools.wraps(original.__func__)
    def from_config(cls, /, config, **kwargs):
        if not (isinstance(config, PretrainedConfig) and is_glm4v(config.to_dict())):
            return original.__func__(cls, config, **kwargs)
        return make(config, **_drop_auto_kwargs(kwargs))

    return classmethod(from_config)


def _drop_auto_kwargs(options: dict) -> dict:
    return {name: value for name, value in options.items() if name not in AUTO_CLASS_KWARGS}


def _refuse_code(original: Callable) -> Callable:
    """No code of a glm-4v's repository gets in by a way around the patched methods, and then meets
    our config."""

    @functools.wraps(original)
    def get_class_from_dynamic_module(class_reference, repository, /, *args, **kwargs):
        if Repository(repository, kwargs).contains_glm4v():
            raise RuntimeError(
                f"{class_reference} of {repository} would be loaded beside this package's code "
                "for glm-4v: either a from_pretrained or from_config was taken from its Auto class "
                "before apply(), which then has to be called earlier; or it is that of an Auto "
                f"class without one of ours, which there are for {', '.join(AUTO_MODEL_CLASSES)}"
            )
        return original(class_reference, repository, *args, **kwargs)

    return get_class_from_dynamic_module


def _load_model(options: _ApplyOptions, model_class, name_or_path, *args, config=None, **kwargs):
    if isinstance(config, PretrainedConfig):
        config = ChatGLMConfig.from_config(config)
    kwargs = options.loading_kwargs | kwargs
    loaded = model_class.from_pretrained(name_or_path, *args, config=config, **kwargs)
    _set_loss(loaded[0] if isinstance(loaded, tuple) else loaded, options)  # output_loading_info
    return loaded


def _build_model(options: _ApplyOptions, model_class, config: PretrainedConfig, **kwargs):
    model = model_class._from_config(ChatGLMConfig.from_config(config), **(options.loading_kwargs | kwargs))
    _set_loss(model, options)
    return model


def _set_loss(model: ChatGLMPreTrainedModel, options: _ApplyOptions) -> None:
    if options.fused_linear_cross_entropy is not None:
        model.config.skip_logits = options.fused_linear_cross_entropy


def _load_tokenizer(name_or_path, *args, config=None, **kwargs):
    return ChatGLM4Tokenizer.from_pretrained(name_or_path, *args, **kwargs)


def _load_image_processor(name_or_path, *args, config=None, **kwargs):
    repository = Repository(name_or_path, kwargs)
    if repository.read(IMAGE_PROCESSOR_CONFIG_FILE) is not None:
        return ChatGLMImageProcessor.from_pretrained(name_or_path, *args, **kwargs)
    # The published repository has no such file.
    where = {option: kwargs.pop(option) for option in DOWNLOAD_OPTIONS if option in kwargs}
    vision = (config or ChatGLMConfig.from_pretrained(name_or_path, **where)).vision
    sizes = {"size": vision.image_size, "patch_size": vision.patch_size}
    return ChatGLMImageProcessor.from_dict(sizes, **kwargs)


def _refuse_videos(name_or_path, *args, **kwargs):
    """Raise ``ValueError``. Pipelines ask every model for a video processor, which transformers
    would look for beside our image processor's code, after asking the user to trust it."""
    raise ValueError(f"{name_or_path} is a glm-4v, which reads no videos: give frames as images")


def _save_code_with_adapters(original: Callable) -> Callable:
    """Save our code beside adapters, so that they load without this package, too."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self, save_directory, *args, **kwargs):
        base = self.get_base_model()
        if isinstance(base, ChatGLMPreTrainedModel):
            for config in self.peft_config.values():
                config.auto_mapping = None  # a module's name, of others where they were loaded
        result = original(self, save_directory, *args, **kwargs)
        given = signature.bind(self, save_directory, *args, **kwargs).arguments
        if isinstance(base, ChatGLMPreTrainedModel) and given.get("is_main_process", True):
            for name in given.get("selected_adapters") or self.peft_config:
                # As peft names their folders.
                folder = "" if name == "default" else name
                custom_object_save(base, os.path.join(save_directory, folder))
        return result

    return save_pretrained
