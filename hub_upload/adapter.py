"""Build the repository of LoRA adapters: their weights, settings and model card."""

import json
import re
from pathlib import Path

from glm4v_patched.atomic import create_folder_atomically
from glm4v_patched.finetune.adapter_card import ADAPTERS_LOCATION, name_base
from glm4v_patched.models.adopt import link_or_copy, to_json_bytes
from glm4v_patched.models.base import ADAPTER_CONFIG, ADAPTER_WEIGHTS, source_of_adapters
from glm4v_patched.models.weight_files import read_header
from glm4v_patched.terminal_text import listed

from .build import UPSTREAM
from .checks import require_that
from .files import SourceFiles, read_folder
from .manifest import COMMIT_PATTERN, ID_PATTERN

MODEL_CARD = "README.md"
PEFT_CARD_MARK = b"More Information Needed"  # in the card that peft writes


def build_adapter_repository(folder: Path, out: Path, name: str, base: str | None = None) -> str:
    """Write the repository of adapters to the new folder ``out``; return its base model.

    Args:
        name: Id of the adapters' repository, for the card.
        base: The base model on the Hub, as ``org/name@commit``; by default the one that the
            adapters' config names.

    Raises:
        ValueError: The base model is not on the Hub, there are other weights than those of LoRA, a
            setting has a path, or the card is missing.
    """
    source = SourceFiles(str(folder), read_folder(folder))
    config_base = source_of_adapters(folder)
    base = base or f"{config_base.model}@{config_base.revision}"
    model, _, commit = base.partition("@")
    require_that(
        re.fullmatch(ID_PATTERN, model) and re.fullmatch(COMMIT_PATTERN, commit),
        f"{folder} has adapters of {base}, which is not a model at a commit on the Hub, so others "
        f"cannot find it; give --fine-tune-of {UPSTREAM}@<commit of 40 hex digits>, or another id "
        "and commit",
    )
    weights = folder / ADAPTER_WEIGHTS
    foreign = [tensor for tensor in read_header(weights) if ".lora_" not in tensor]
    require_that(not foreign, f"{weights} has weights that are not of LoRA: {listed(foreign)}")
    # peft imports what auto_mapping names.
    config = source.read_json(ADAPTER_CONFIG) | {"revision": commit, "auto_mapping": None}
    config["base_model_name_or_path"] = None
    has_path = "/" in json.dumps(config)
    require_that(
        not has_path,
        f"{folder / ADAPTER_CONFIG} has a path, which only this machine has: remove it",
    )
    config["base_model_name_or_path"] = model
    card = source.content(MODEL_CARD) or PEFT_CARD_MARK
    require_that(
        PEFT_CARD_MARK not in card,
        f"{folder / MODEL_CARD} is missing, or is peft's template without content; describe the "
        "adapters in it, as `glm4v-patched train` does",
    )
    card_text = name_base(card.decode(), model, commit).replace(
        ADAPTERS_LOCATION, f"`ADAPTERS` is `{name}`."
    )
    with create_folder_atomically(out) as new:
        (new / ADAPTER_CONFIG).write_bytes(to_json_bytes(config))
        (new / MODEL_CARD).write_bytes(card_text.encode())
        link_or_copy({ADAPTER_WEIGHTS: weights}, new)
    return base
