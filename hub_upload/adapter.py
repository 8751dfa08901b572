"""Makes a folder of LoRA adapters that is published: their weights, settings and card."""

import re
from pathlib import Path

from glm4v_patched.finetune.adapter_card import PLACE, name_base
from glm4v_patched.models.base import base_of_adapters

from .build import as_json, require_ours, with_manifest, write
from .files import Contents, read_folder, sha256_of_file
from .layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ID, UPSTREAM
from .manifest import FineTune, Listed, Manifest

CARD = "README.md"
EMPTY = b"More Information Needed"  # stands in peft's card


def build(
    folder: Path, out: Path, name: str, base: str | None = None, trained: str | None = None
) -> Manifest:
    """Write the folder; return its manifest. Of an earlier build as :func:`build.build`.

    Args:
        name: Id to name in the card.
        base: Of the Hub, as ``org/name@commit``: where others find the model under the adapters.
            Not needed where they were trained on that.
        trained: What was trained and on what, for the manifest; the card says it anyhow.

    Raises:
        ValueError: these are no adapters that others can use.
    """
    out = require_ours(out, str(folder))
    source = Contents(str(folder), read_folder(folder))
    config = source.read_json(ADAPTER_CONFIG)
    model, commit = _base_of(folder, base)
    config |= {"base_model_name_or_path": model, "revision": commit, "auto_mapping": None}
    card = source.content(CARD) or EMPTY
    if EMPTY in card:
        told = f"{folder / CARD} is missing, or peft's empty one: it says nothing of the adapters"
        raise ValueError(f"{told}; write what they are there, as `glm4v-patched train` does")
    text = name_base(card.decode(), model, commit).replace(PLACE, f"`ADAPTERS` is `{name}`.")
    weights = source.files[ADAPTER_WEIGHTS]
    assert weights.path is not None
    files = {ADAPTER_CONFIG: as_json(config), CARD: text.encode()}
    listed = {ADAPTER_WEIGHTS: Listed(size=weights.size, sha256=sha256_of_file(weights.path))}
    fine_tune = FineTune(base=model, trained=trained or "LoRA adapters")
    built = with_manifest(files, listed, fine_tune)
    return write(built, {ADAPTER_WEIGHTS: weights}, out, str(folder))


def _base_of(folder: Path, given: str | None) -> tuple[str, str]:
    """The id and the commit on the Hub of the model under the adapters."""
    found = base_of_adapters(folder)
    text = given or f"{found.model}@{found.revision}"
    model, _, commit = text.partition("@")
    if not re.fullmatch(ID, model) or not re.fullmatch("[0-9a-f]{40}", commit):
        told = f"{folder} holds adapters of {found.model}" if given is None else given
        raise ValueError(
            f"{told}: nobody else finds that model; give --fine-tune-of {UPSTREAM}@<commit of 40 "
            "hex digits>, or whichever it is"
        )
    return model, commit
