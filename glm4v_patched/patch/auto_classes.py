"""``apply()``: make transformers' Auto classes return our classes for every glm-4v.

It is not enough to register our classes with transformers: other models share the model type
"chatglm", and transformers 4 prefers a repository's own code to registered classes. So ``apply()``
replaces ``from_pretrained`` of each Auto class. The replacement looks at the repository's files:
for a glm-4v it loads our class, without ``trust_remote_code``; for any other model it calls the
original.
"""

import functools
import inspect
import json
import logging
import pkgutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

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
from .adapter_names import check_names_in_inject_adapter
from .config_json import is_glm4v
from .patch_set import AttributePatch, PatchSet
from .repository import ADAPTER_CONFIG_FILE, IMAGE_PROCESSOR_CONFIG_FILE, Repository

logger = logging.getLogger(__name__)

# Some of these classes exist only in newer releases of transformers.
AUTO_MODEL_CLASSES = [
    name for name in AUTO_MAP if name.startswith("AutoModel") and hasattr(transformers, name)
]

# Without torchvision, transformers 5.8 to 5.17 export a placeholder class that raises an error on
# any use. Our image processor needs no torchvision, so we patch and export the real class.
AUTO_IMAGE_PROCESSOR = "transformers.models.auto.image_processing_auto:AutoImageProcessor"
AUTO_VIDEO_PROCESSOR = "transformers.models.auto.video_processing_auto:AutoVideoProcessor"

# Modules of the Auto classes. Each has its own reference to get_class_from_dynamic_module, by a
# "from ... import", so each is patched.
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

# Keyword arguments of the Auto classes that our classes do not take.
AUTO_CLASS_KWARGS = (
    "trust_remote_code",
    "code_revision",
    "use_fast",
    "tokenizer_type",
    "_from_auto",
)


@dataclass(frozen=True)
class _ApplyOptions:
    """Arguments of ``apply``; ``None`` means that an argument was not passed."""

    fused_linear_cross_entropy: bool | None = None
    attn_implementation: str | None = None

    def __post_init__(self):
        fused, attention = self.fused_linear_cross_entropy, self.attn_implementation
        if not isinstance(fused, (bool, type(None))):
            raise ValueError(f"fused_linear_cross_entropy is {fused!r}: give True or False")
        if not isinstance(attention, (str, type(None))):
            raise ValueError(
                f"attn_implementation is {attention!r}: give the name of an implementation"
            )

    @property
    def loading_kwargs(self) -> dict[str, str]:
        """Defaults for keyword arguments of from_pretrained and from_config."""
        name = self.attn_implementation
        return {} if name is None else {"attn_implementation": name}


class _PatchState:
    """The patches of this process, which all callers of ``apply`` share."""

    lock = threading.RLock()
    patches: PatchSet | None = None
    options = _ApplyOptions()


def require_tested_transformers(version: str) -> None:
    """Raise ``ImportError`` for an untested version; the code in ``remote`` would only warn."""
    if not SpecifierSet(TESTED_TRANSFORMERS).contains(version, prereleases=True):
        raise ImportError(
            f"apply() replaces methods of transformers {TESTED_TRANSFORMERS}, but {version} is "
            "installed; install a tested version: "
            f"{pip_install(f'transformers{TESTED_TRANSFORMERS}')}"
        )


def apply(
    *, fused_linear_cross_entropy: bool | None = None, attn_implementation: str | None = None
) -> None:
    """Make the Auto classes of transformers return this package's classes for every glm-4v.

    This patches ``AutoConfig``, ``AutoModel``, ``AutoModelForCausalLM``, ``AutoModelForSeq2SeqLM``,
    ``AutoModelForImageTextToText``, ``AutoModelForMultimodalLM`` (transformers 5),
    ``AutoModelForSequenceClassification``, ``AutoTokenizer``, ``AutoProcessor`` and
    ``AutoImageProcessor``, with and without ``trust_remote_code=True``, for local folders and Hub
    repositories. Other models load as before. ``AutoVideoProcessor`` refuses a glm-4v, and peft
    saves our code beside the adapters of a glm-4v. Calling ``apply`` again changes nothing. If an
    original method was stored before ``apply`` (``load = AutoModel.from_pretrained``), calling it
    raises ``RuntimeError`` for a glm-4v that has code in its repository.

    Args:
        fused_linear_cross_entropy: In training, compute the loss in chunks without the logits of
            all positions (``config.skip_logits``); the output's ``logits`` is then ``None``.
        attn_implementation: Default of ``attn_implementation`` for models that are loaded.

    Raises:
        ValueError: an argument has the wrong type, or contradicts an earlier ``apply``.
        ImportError: this version of transformers is not tested.
        AttributeError: transformers or peft lacks an attribute; nothing was patched.
    """
    options = _ApplyOptions(fused_linear_cross_entropy, attn_implementation)
    with _PatchState.lock:
        if _PatchState.patches is None:
            require_tested_transformers(transformers.__version__)
            patches = PatchSet(_attribute_patches(options))
            patches.apply()
            _PatchState.patches, _PatchState.options = patches, options
        for name, value in asdict(options).items():
            # None and False both mean off.
            current = getattr(_PatchState.options, name) or None
            if value is not None and current != (value or None):
                raise ValueError(
                    f"apply({name}={value!r}) contradicts {name}={current!r} of an earlier apply: "
                    "call revert() first"
                )


def revert() -> None:
    """Undo :func:`apply`; models that are already loaded do not change.

    Raises:
        RuntimeError: other code has replaced one of the same attributes since; nothing is undone.
    """
    with _PatchState.lock:
        if _PatchState.patches is not None:
            _PatchState.patches.revert()
            _PatchState.patches = None


@contextmanager
def applied(
    *, fused_linear_cross_entropy: bool | None = None, attn_implementation: str | None = None
) -> Iterator[None]:
    """Apply the patches in a ``with`` block. If they were applied before it, do not revert them."""
    was_unpatched = _PatchState.patches is None
    apply(
        fused_linear_cross_entropy=fused_linear_cross_entropy,
        attn_implementation=attn_implementation,
    )
    try:
        yield
    finally:
        if was_unpatched:
            revert()


def _attribute_patches(options: _ApplyOptions) -> list[AttributePatch]:
    """Return all patches of ``apply``: an owner, an attribute, and a function that wraps it."""
    model_classes: dict[str, type[ChatGLMPreTrainedModel]] = dict.fromkeys(
        AUTO_MODEL_CLASSES, GLM4VForCausalLM
    )
    model_classes["AutoModelForSequenceClassification"] = ChatGLMForSequenceClassification
    loaders: dict[str, Callable] = {
        "AutoConfig": lambda name, /, **kwargs: ChatGLMConfig.from_pretrained(
            name, name_or_path=name, **kwargs
        ),
        **{name: partial(_load_model, options, cls) for name, cls in model_classes.items()},
        "AutoTokenizer": _load_tokenizer,
        "AutoProcessor": ChatGLMProcessor.from_pretrained,
        "AutoImageProcessor": _load_image_processor,
        "AutoVideoProcessor": _refuse_videos,
    }
    owners = {name: f"transformers:{name}" for name in loaders}
    owners |= {
        "AutoImageProcessor": AUTO_IMAGE_PROCESSOR,
        "AutoVideoProcessor": AUTO_VIDEO_PROCESSOR,
    }
    patches = [
        AttributePatch(owners[name], "from_pretrained", partial(_wrap_from_pretrained, load))
        for name, load in loaders.items()
    ]
    real_class = pkgutil.resolve_name(AUTO_IMAGE_PROCESSOR)
    # transformers 5.8 replaces its module in sys.modules during that import, so look it up after.
    package = pkgutil.resolve_name("transformers")
    if package.AutoImageProcessor is not real_class:  # the package exports the placeholder
        patches.append(
            AttributePatch("transformers", "AutoImageProcessor", lambda placeholder: real_class)
        )
    for name, cls in model_classes.items():
        build = partial(_build_model, options, cls)
        patches.append(
            AttributePatch(owners[name], "from_config", partial(_wrap_from_config, build))
        )
    patches += [
        AttributePatch(module, "get_class_from_dynamic_module", _refuse_code_of_glm4v)
        for module in REMOTE_CODE_IMPORTERS
    ]
    if is_peft_available():
        patches.append(
            AttributePatch("peft:PeftModel", "save_pretrained", _save_code_with_adapters)
        )
        tuner = "peft.tuners.tuners_utils:BaseTuner"
        patches.append(AttributePatch(tuner, "inject_adapter", check_names_in_inject_adapter))
    return patches


def _wrap_from_pretrained(load: Callable, original: classmethod) -> classmethod:
    """Return a ``from_pretrained`` that calls ``load`` for a glm-4v, else the original."""

    @functools.wraps(original.__func__)
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        config = kwargs.get("config")
        repository = Repository(pretrained_model_name_or_path, kwargs)
        if isinstance(config, PretrainedConfig):
            is_supported = is_glm4v(config.to_dict())
        else:
            is_supported = repository.contains_glm4v()
        if not is_supported:
            return original.__func__(cls, pretrained_model_name_or_path, *args, **kwargs)
        if repository.hub_timeout_error is not None:
            logger.warning("%s: the files in the cache are loaded", repository.hub_timeout_error)
            kwargs["local_files_only"] = True
        return load(pretrained_model_name_or_path, *args, **_drop_auto_kwargs(kwargs))

    return classmethod(from_pretrained)


def _wrap_from_config(build: Callable, original: classmethod) -> classmethod:
    """Return a ``from_config`` that calls ``build`` for a glm-4v, else the original."""

    @functools.wraps(original.__func__)
    def from_config(cls, /, config, **kwargs):
        if not (isinstance(config, PretrainedConfig) and is_glm4v(config.to_dict())):
            return original.__func__(cls, config, **kwargs)
        return build(config, **_drop_auto_kwargs(kwargs))

    return classmethod(from_config)


def _drop_auto_kwargs(kwargs: dict) -> dict:
    return {name: value for name, value in kwargs.items() if name not in AUTO_CLASS_KWARGS}


def _refuse_code_of_glm4v(original: Callable) -> Callable:
    """Wrap ``get_class_from_dynamic_module``, so that it refuses the code of a glm-4v.

    That code does not work with our config. Auto classes that are not patched would import it, and
    so would methods of Auto classes that were stored in variables before ``apply``.
    """

    @functools.wraps(original)
    def get_class_from_dynamic_module(class_reference, repository, /, *args, **kwargs):
        if Repository(repository, kwargs).contains_glm4v():
            raise RuntimeError(
                f"{class_reference} of {repository} would be loaded instead of this package's "
                "code for glm-4v. Either from_pretrained or from_config was stored in a variable "
                "before apply(): call apply() earlier. Or this Auto class is not supported for "
                f"glm-4v: use one of {', '.join(AUTO_MODEL_CLASSES)}"
            )
        return original(class_reference, repository, *args, **kwargs)

    return get_class_from_dynamic_module


def _load_model(options: _ApplyOptions, model_class, name_or_path, *args, config=None, **kwargs):
    if isinstance(config, PretrainedConfig):
        config = ChatGLMConfig.from_config(config)
    kwargs = options.loading_kwargs | kwargs
    loaded = model_class.from_pretrained(name_or_path, *args, config=config, **kwargs)
    # With output_loading_info, the result is a tuple that begins with the model.
    _set_skip_logits(loaded[0] if isinstance(loaded, tuple) else loaded, options)
    return loaded


def _build_model(options: _ApplyOptions, model_class, config: PretrainedConfig, **kwargs):
    model = model_class._from_config(
        ChatGLMConfig.from_config(config), **(options.loading_kwargs | kwargs)
    )
    _set_skip_logits(model, options)
    return model


def _set_skip_logits(model: ChatGLMPreTrainedModel, options: _ApplyOptions) -> None:
    """Set ``config.skip_logits``, unless ``fused_linear_cross_entropy`` was not passed."""
    if options.fused_linear_cross_entropy is not None:
        model.config.skip_logits = options.fused_linear_cross_entropy


def _load_tokenizer(name_or_path, *args, config=None, **kwargs):
    return ChatGLM4Tokenizer.from_pretrained(name_or_path, *args, **kwargs)


def _load_image_processor(name_or_path, *args, config=None, **kwargs):
    repository = Repository(name_or_path, kwargs)
    if repository.read(IMAGE_PROCESSOR_CONFIG_FILE) is not None:
        return ChatGLMImageProcessor.from_pretrained(name_or_path, *args, **kwargs)
    # The published repository has no preprocessor_config.json.
    options = {name: kwargs.pop(name) for name in DOWNLOAD_OPTIONS if name in kwargs}
    vision = (config or ChatGLMConfig.from_pretrained(name_or_path, **options)).vision
    settings = {"size": vision.image_size, "patch_size": vision.patch_size}
    return ChatGLMImageProcessor.from_dict(settings, **kwargs)


def _refuse_videos(name_or_path, *args, **kwargs):
    """Raise ``ValueError``.

    Pipelines load a video processor for every model. Without this error, transformers would ask the
    user to trust the code of our image processor, to search it for a video processor.
    """
    raise ValueError(f"{name_or_path} is a glm-4v, which reads no videos: give frames as images")


def _save_code_with_adapters(original: Callable) -> Callable:
    """Wrap peft's ``save_pretrained`` to save our code beside adapters.

    The adapters then also load without this package.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self, save_directory, *args, **kwargs):
        base = self.get_base_model()
        result = original(self, save_directory, *args, **kwargs)
        arguments = signature.bind(self, save_directory, *args, **kwargs).arguments
        if isinstance(base, ChatGLMPreTrainedModel) and arguments.get("is_main_process", True):
            for name in arguments.get("selected_adapters") or self.peft_config:
                # peft saves the adapter "default" to save_directory itself.
                folder = Path(save_directory, "" if name == "default" else name)
                custom_object_save(base, folder)
                config_file = folder / ADAPTER_CONFIG_FILE
                config = json.loads(config_file.read_text("utf-8"))
                # In auto_mapping, peft names our module, which other processes may not have.
                config |= {"auto_mapping": None}
                config_file.write_text(json.dumps(config, indent=2, sort_keys=True), "utf-8")
        return result

    return save_pretrained
