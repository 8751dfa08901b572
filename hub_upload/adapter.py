"""Makes a folder of LoRA adapters that is published: their weights, settings and card."""

import re
from pathlib import Path

from glm4v_patched.finetune.adapter_card import ADAPTERS_LOCATION, name_base
from glm4v_patched.models.base import base_of_adapters

from .build import require_ours, with_manifest, write
from .files import Source, read_folder, sha256_of_file
from .layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS, COMMIT, ID, UPSTREAM
from .manifest import FineTune, Listed, Manifest, to_json_bytes

CARD = "README.md"
EMPTY = b"More Information Needed"  # stands in peft's card


def build(
    folder: Path, out: Path, name: str, base: str | None = None, trained: str | None = None
) -> Manifest:
    """Write the folder, as :func:`build.build` does; return its manifest.

    Args:
        base: As ``org/name@commit``: where others find the model under the adapters; not needed
            where they were trained on that.
        trained: What was trained and on what, for the manifest.
    """
    out = require_ours(out, str(folder))
    source = Source(str(folder), read_folder(folder))
    config = source.read_json(ADAPTER_CONFIG)
    found = base_of_adapters(folder)
    text = base or f"{found.model}@{found.revision}"
    model, _, commit = text.partition("@")
    if not re.fullmatch(ID, model) or not re.fullmatch(COMMIT, commit):
        raise ValueError(
            f"{folder} holds adapters of {text}: nobody else finds that model; give --fine-tune-of "
            f"{UPSTREAM}@<commit of 40 hex digits>, or whichever it is"
        )
    config |= {"base_model_name_or_path": model, "revision": commit, "auto_mapping": None}
    card = source.content(CARD) or EMPTY
    if EMPTY in card:
        told = f"{folder / CARD} is missing, or peft's empty one: it says nothing of the adapters"
        raise ValueError(f"{told}; write what they are there, as `glm4v-patched train` does")
    text = name_base(card.decode(), model, commit).replace(ADAPTERS_LOCATION, f"`ADAPTERS` is `{name}`.")
    weights = source.files[ADAPTER_WEIGHTS]
    assert weights.path is not None
    files = {ADAPTER_CONFIG: to_json_bytes(config), CARD: text.encode()}
    listed = {ADAPTER_WEIGHTS: Listed(size=weights.size, sha256=sha256_of_file(weights.path))}
    fine_tune = FineTune(base=model, trained=trained or "LoRA adapters")
    built = with_manifest(files, listed, fine_tune)
    return write(built, {ADAPTER_WEIGHTS: weights}, out, str(folder))
