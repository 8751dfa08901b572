"""Build the repository of LoRA adapters: their weights, settings and model card."""

import re
from collections.abc import Callable
from pathlib import Path

from glm4v_patched.finetune.adapter_card import ADAPTERS_LOCATION, name_base
from glm4v_patched.models.adopt import to_json_bytes
from glm4v_patched.models.base import ADAPTER_CONFIG, ADAPTER_WEIGHTS, base_of_adapters

from .build import UPSTREAM, add_manifest, require_replaceable, write_build
from .evaluation import show_evaluation
from .files import SourceFiles, read_folder, sha256_of_file
from .manifest import COMMIT_PATTERN, ID_PATTERN, Evaluation, FineTune, ListedFile, Manifest

MODEL_CARD = "README.md"
PEFT_CARD_MARK = b"More Information Needed"  # in the card that peft writes


def build_adapter_repository(
    folder: Path,
    out: Path,
    name: str,
    base: str | None = None,
    trained: str | None = None,
    scores: Callable[[SourceFiles], Evaluation | None] = lambda source: None,
) -> Manifest:
    """Write the repository of adapters to ``out`` and return its manifest.

    An earlier build in ``out`` is replaced, as :func:`build.build_model_repository` does.

    Args:
        name: Id of the adapters' repository, for the card.
        base: The base model on the Hub, as ``org/name@commit``; by default the one that the
            adapters' config names.
        trained: What was trained and on which data, for the manifest.
        scores: Returns the scores of the files that it gets, for the card.

    Raises:
        ValueError: The base model is not on the Hub, or the card is missing.
    """
    out = require_replaceable(out, str(folder))
    source = SourceFiles(str(folder), read_folder(folder))
    config = source.read_json(ADAPTER_CONFIG)
    config_base = base_of_adapters(folder)
    base_id = base or f"{config_base.model}@{config_base.revision}"
    model, _, commit = base_id.partition("@")
    if not re.fullmatch(ID_PATTERN, model) or not re.fullmatch(COMMIT_PATTERN, commit):
        raise ValueError(
            f"{folder} has adapters of {base_id}, which is not a model at a commit on the Hub, so "
            f"others cannot find it; give --fine-tune-of {UPSTREAM}@<commit of 40 hex digits>, or "
            "another id and commit"
        )
    config |= {"base_model_name_or_path": model, "revision": commit, "auto_mapping": None}
    card = source.content(MODEL_CARD) or PEFT_CARD_MARK
    if PEFT_CARD_MARK in card:
        raise ValueError(
            f"{folder / MODEL_CARD} is missing, or is peft's template without content; describe "
            "the adapters in it, as `glm4v-patched train` does"
        )
    card_text = name_base(card.decode(), model, commit).replace(
        ADAPTERS_LOCATION, f"`ADAPTERS` is `{name}`."
    )
    weights = source.files[ADAPTER_WEIGHTS]
    assert weights.path is not None
    digest = sha256_of_file(weights.path)
    source.weights = {ADAPTER_WEIGHTS: ListedFile(size=weights.size, sha256=digest)}
    source.evaluation = scores(source)
    card_text = show_evaluation(card_text, name, source.evaluation)
    files = {ADAPTER_CONFIG: to_json_bytes(config), MODEL_CARD: card_text.encode()}
    source.fine_tune = FineTune(base=model, trained=trained or "LoRA adapters")
    built = add_manifest(files, source)
    return write_build(built, {ADAPTER_WEIGHTS: weights}, out, str(folder))
