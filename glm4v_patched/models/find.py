"""Find the model to load. Needs no torch: a user's mistakes are reported before its slow import."""

import os
import sys
from pathlib import Path

from ..engine.options import QUANTIZER_PACKAGES, require_packages
from ..terminal_text import printable, show_progress, write_line
from .base import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    ModelSource,
    explain_hub_errors,
    pin_revision,
    require_unchanged_base,
    source_of_adapters,
)
from .check_weights import find_model_folder_problem, quantized_by, require_complete_model

# The files of adapters that are downloaded from the Hub. None of them contains code.
ADAPTER_FILES = [ADAPTER_CONFIG, ADAPTER_WEIGHTS, "training.json", "*token*.json"]
ADAPTER_FILES += ["*processor*.json", "tokenizer.model", "chat_template.jinja"]


def find_model_problem(model: str) -> str | None:
    """Return why ``model`` cannot be the folder or Hub id of a model or of adapters, or None."""
    if os.path.isdir(model):
        return find_model_folder_problem(Path(model))
    expected = "expected a folder, or an id of the Hub such as zai-org/glm-4v-9b"
    if os.path.lexists(model):
        return f"it is a file or a broken link; {expected}"
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        return f"there is no such folder; {expected}"
    # Older releases of huggingface_hub accept non-ASCII letters, but the Hub does not.
    is_id = "/" in model and model.isascii()
    return None if is_id else f"there is no such folder; {expected}"


def find_source(name: str, revision: str | None = None, weights: str | None = None) -> ModelSource:
    """Return the model of a folder or Hub id, with its adapters if there are any.

    Args:
        name: A folder or Hub id, of a model or of adapters.
        revision: The revision of a Hub id; for a folder of adapters, the revision of their model on
            the Hub.
        weights: One of :data:`quantized_weights.WEIGHT_FORMATS`, if the weights will be quantized;
            None if they stay as they were saved.

    Raises:
        ValueError: The model is missing, incomplete or not a glm-4v; it has changed since adapters
            were trained on it; it was saved quantized and ``weights`` is not None; or the Hub does
            not respond.
        RuntimeError: A package is missing.
    """
    if problem := find_model_problem(name):
        raise ValueError(f"{name}: {problem}")
    source = _resolve_source(name, revision)
    if weights is not None:
        require_packages(weights, f"--weights {weights}")
    with show_progress(f"checking {printable(name)}"):  # imports transformers and reads files
        source = pin_revision(source)
        require_unchanged_base(source)
        require_complete_model(source.model, source.revision)
        if source.adapters is not None:
            from .limits import require_valid_adapters  # imports peft

            require_valid_adapters(source)
        else:
            remind_about_cogagent(source)
    if method := quantized_by(source.model, source.revision):
        if weights is not None:
            raise ValueError(
                f"--weights {weights}: {source.model} was saved quantized by {method}; remove "
                "--weights"
            )
        require_known_quantizer(source.model, method)
        require_packages(method, f"{source.model}, which was saved quantized by {method},")
    return source


def remind_about_cogagent(source: ModelSource) -> None:
    """Print what this package assumes about cogagent-9b, if the model is a cogagent-9b.

    Nothing is printed if this package has saved the model, so that its config names our class.
    """
    from ..remote.configuration_chatglm import AUTO_MAP, ChatGLMConfig

    config = ChatGLMConfig.from_pretrained(source.model, revision=source.revision or "main")
    our_class = AUTO_MAP["AutoModelForCausalLM"].rpartition(".")[2]
    if not config.original_rope and our_class not in (config.architectures or ()):
        print_cogagent_assumptions(source.model)


def print_cogagent_assumptions(model: str) -> None:
    """Print what this package assumes about cogagent-9b."""
    line = (
        f"{model} has the rotary embedding of cogagent-9b (rotated halves). We have not read the "
        "published code of cogagent-9b. We assume that the tokens of an image share one position "
        "id, as in glm-4v-9b. `glm4v-patched compare FOLDER` tests this on your download"
    )
    write_line(printable(line), file=sys.stderr)


def require_known_quantizer(model: str, method: str | None) -> None:
    """Raise ``ValueError`` unless transformers can load weights quantized by this method."""
    if method not in QUANTIZER_PACKAGES:
        raise ValueError(
            f"{model}: config.json: quantization_config has quant_method {method!r:.60}; "
            f"expected one of {', '.join(QUANTIZER_PACKAGES)}, or no quantization_config"
        )


def _resolve_source(name: str, revision: str | None) -> ModelSource:
    """Return the source for a folder or Hub id of a model, or of adapters of a model."""
    downloaded = adapters_of_hub(name, revision)
    folder = downloaded or Path(name)
    if not (folder / ADAPTER_CONFIG).is_file():
        if revision is not None and folder.is_dir():
            raise ValueError(f"--revision {revision}: {name} is a folder, and has no revisions")
        return ModelSource(name, revision)
    source = source_of_adapters(folder, revision if downloaded is None else None)
    if problem := find_model_problem(source.model):
        key = "base_model_name_or_path"
        cure = f"if it was moved, write its path as {key} in {folder / ADAPTER_CONFIG}"
        if downloaded is not None:
            cure = (
                "this path is from the machine that trained them; find out which model it was, and "
                f"write it as {key} in a copy of the adapters (hf download {name} --local-dir "
                "FOLDER)"
            )
        raise ValueError(f"{name} contains adapters of the model {source.model}: {problem}; {cure}")
    require_packages("lora_lm")  # peft
    return source


def adapters_of_hub(name: str, revision: str | None) -> Path | None:
    """Return the folder in the Hub's cache that contains the adapters of a Hub id.

    The adapters are downloaded if needed. If ``name`` is a local folder, or if the Hub has no
    adapters of this id, return None. :func:`pin_revision` reports other errors later.

    Raises:
        ValueError: The Hub does not respond, and the cache has no config of this id.
    """
    if os.path.lexists(name):
        return None
    from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        config = Path(hf_hub_download(name, ADAPTER_CONFIG, revision=revision))
    except LocalEntryNotFoundError as error:  # the Hub has not responded for half a minute
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return None
        problem = f"{name} is not a local folder, and cannot be loaded from the Hub: {error}"
        raise ValueError(problem) from None
    except (OSError, ValueError, HfHubHTTPError):  # no such file, no such id, no response
        return None
    with explain_hub_errors(f"the adapters {name}"):
        return Path(
            snapshot_download(name, revision=config.parent.name, allow_patterns=ADAPTER_FILES)
        )
