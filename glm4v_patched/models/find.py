"""Finds what is to be loaded; needs no torch, so that mistakes are answered at once."""

import os
from pathlib import Path

from ..engine.options import QUANTIZER_PACKAGES, require_packages
from ..terminal_text import show_progress, printable
from .base import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    ModelSource,
    asking_hub,
    base_of_adapters,
    pin_revision,
    require_recorded_base,
)
from .check_weights import find_model_folder_problem, quantized_by, require_complete_model

# What is taken of adapters on the Hub; no code.
OF_ADAPTERS = [ADAPTER_CONFIG, ADAPTER_WEIGHTS, "training.json", "*token*.json", "*processor*.json"]
OF_ADAPTERS += ["tokenizer.model", "chat_template.jinja"]


def find_model_problem(model: str) -> str | None:
    """Why neither a model nor adapters can be loaded from a folder, or by an id of the Hub."""
    if os.path.isdir(model):
        return find_model_folder_problem(Path(model))
    expected = "expected a folder, or an id of the Hub such as zai-org/glm-4v-9b"
    if os.path.lexists(model):
        return f"a file, or a link to nothing; {expected}"
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        return f"there is no such folder; {expected}"
    # Older releases of huggingface_hub take letters beyond ASCII, and the Hub does not.
    is_id = "/" in model and model.isascii()
    return None if is_id else f"there is no such folder; {expected}"


def find_source(name: str, revision: str | None = None, weights: str | None = None) -> ModelSource:
    """The model in a folder or of an id of the Hub, and the adapters on it, if it is theirs.

    ``ValueError`` if it is not there, not whole or no glm-4v, if its adapters are of a model that
    has changed since, if it was saved quantized and is to be held otherwise, or if the Hub does not
    answer; ``RuntimeError`` if a package is missing.

    Args:
        revision: Of an id of the Hub; of a folder of adapters, that of their model there.
        weights: How they will be held: one of :data:`quantized_weights.WEIGHTS`, or as they are.
    """
    if fault := find_model_problem(name):
        raise ValueError(f"{name}: {fault}")
    base = _find_base(name, revision)
    if weights is not None:
        require_packages(weights, f"--weights {weights}")
    with show_progress(f"looking at {printable(name)}"):  # transformers is imported, and files are read
        base = pin_revision(base)
        require_recorded_base(base)
        require_complete_model(base.model, base.revision)
        if base.adapters is not None:
            from .limits import require_adapters  # late: peft is imported

            require_adapters(base)
    if method := quantized_by(base.model, base.revision):
        if weights is not None:
            raise ValueError(
                f"--weights {weights}: {base.model} was saved quantized by {method}; leave it out"
            )
        if method not in QUANTIZER_PACKAGES:
            raise ValueError(
                f"{base.model}: config.json: quantization_config has quant_method {method!r:.60}; "
                f"expected one of {', '.join(QUANTIZER_PACKAGES)}, or no quantization_config"
            )
        require_packages(method, f"{base.model}, which was saved quantized by {method},")
    return base


def _find_base(name: str, revision: str | None) -> ModelSource:
    fetched = adapters_of_hub(name, revision)
    folder = fetched or Path(name)
    if not (folder / ADAPTER_CONFIG).is_file():
        if revision is not None and folder.is_dir():
            raise ValueError(f"--revision {revision}: {name} is a folder, and has no revisions")
        return ModelSource(name, revision)
    base = base_of_adapters(folder, revision if fetched is None else None)
    if fault := find_model_problem(base.model):
        key = "base_model_name_or_path"
        cure = f"if that was moved, write where it is now as {key} in {folder / ADAPTER_CONFIG}"
        if fetched is not None:
            cure = (
                "a folder of whoever trained them; find out which model it was, and write that as "
                f"{key} in a copy of the adapters (hf download {name} --local-dir FOLDER)"
            )
        raise ValueError(f"{name} holds adapters of the model {base.model}: {fault}; {cure}")
    require_packages("lora_lm")
    return base


def adapters_of_hub(name: str, revision: str | None) -> Path | None:
    """The folder in the Hub's cache with the adapters of that id, downloaded if they are not there.
    None of a folder, and where no adapters are found, which :func:`pin` has words for."""
    if os.path.lexists(name):
        return None
    from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        config = Path(hf_hub_download(name, ADAPTER_CONFIG, revision=revision))
    except LocalEntryNotFoundError as error:  # no answer, which takes half a minute to find out
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return None
        told = f"{name} is no folder here, and cannot be had from the Hub: {error}"
        raise ValueError(told) from None
    except (OSError, ValueError, HfHubHTTPError):  # no such file, no such id, no answer
        return None
    with asking_hub(f"the adapters {name}"):
        return Path(
            snapshot_download(name, revision=config.parent.name, allow_patterns=OF_ADAPTERS)
        )
