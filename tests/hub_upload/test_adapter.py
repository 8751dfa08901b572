"""Adapters are built for everybody: their files name no folder of this machine."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import load_file, save_file

from glm4v_patched.finetune.adapter_card import (
    ADAPTERS_LOCATION,
    BASE_LOCATION,
    BASE_PLACEHOLDER,
    NOT_ON_HUB,
)
from glm4v_patched.models.base import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from glm4v_patched.models.find import find_source
from tests.helpers.answering import write_files
from tests.helpers.publishable import as_files
from tests.helpers.tiny import update_json

NAME, BASE_ID, COMMIT = "our-org/glm-4v-shapes", "zai-org/glm-4v-9b", "a" * 40
CARD = f"""---
library_name: peft
---
Adapters for {NOT_ON_HUB}. {ADAPTERS_LOCATION} {BASE_LOCATION}

model = AutoModelForCausalLM.from_pretrained({BASE_PLACEHOLDER}, trust_remote_code=True)
"""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> Path:
    """Adapters as training saves them, with other files; tests must not change them."""
    folder = write_files(tmp_path_factory.mktemp("adapters")).adapters
    (folder / "README.md").write_text(CARD)
    (folder / "training_args.bin").write_bytes(b"pickled")
    damaged(folder, auto_mapping={"base_model_class": "A", "parent_library": "b"})
    return folder


@pytest.fixture
def build(run, tmp_path):
    def build(folder, *more):
        default = ["--fine-tune-of", f"{BASE_ID}@{COMMIT}", "--name", NAME]
        return run("build", "--adapter", folder, "--out", tmp_path / "out", *(more or default))

    return build


def test_adapters_are_built(adapters, build, tmp_path):
    status, output = build(adapters)
    assert status == 0 and f"adapters of {BASE_ID}@{COMMIT}" in output
    assert f"hf upload {NAME} {tmp_path / 'out'}" in output
    out = tmp_path / "out"
    names = {ADAPTER_CONFIG, ADAPTER_WEIGHTS, "README.md"}
    assert {path.name for path in out.iterdir()} == names
    config = json.loads((out / ADAPTER_CONFIG).read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (BASE_ID, COMMIT)
    assert config["auto_mapping"] is None  # peft imports what it names
    card = ModelCard.load(out / "README.md")
    assert card.data.base_model == BASE_ID and f"`ADAPTERS` is `{NAME}`" in card.text
    assert f'from_pretrained("{BASE_ID}", revision="{COMMIT}"' in card.text
    assert NOT_ON_HUB not in card.text and BASE_LOCATION not in card.text
    texts = "".join((out / name).read_text() for name in names - {ADAPTER_WEIGHTS})
    assert str(adapters.parent) not in texts
    assert os.path.samefile(out / ADAPTER_WEIGHTS, adapters / ADAPTER_WEIGHTS)


def test_adapters_that_were_uploaded_are_found_with_their_base(adapters, build, hub, tmp_path):
    model = find_source(str(adapters)).model
    head = hub.add_repository(BASE_ID, as_files(Path(model))).head
    assert build(adapters, "--fine-tune-of", f"{BASE_ID}@{head}", "--name", NAME)[0] == 0
    HfApi().create_repo(NAME)
    HfApi().upload_folder(repo_id=NAME, folder_path=tmp_path / "out")  # as `hf upload` does
    base = find_source(NAME)
    assert (base.model, base.revision) == (BASE_ID, head) and base.adapters is not None


def damaged(folder: Path, **fields) -> None:
    update_json(folder / ADAPTER_CONFIG, **fields)


def with_another_weight(folder: Path) -> None:
    weights = load_file(folder / ADAPTER_WEIGHTS) | {"base_model.model.score": torch.zeros(1)}
    save_file(weights, folder / ADAPTER_WEIGHTS)


FAULTS = {
    "no LoRA": (lambda folder: damaged(folder, peft_type="IA3"), "peft_type is 'IA3'"),
    "a path": (lambda folder: damaged(folder, eva_config={"cache": "/home/me"}), "has a path"),
    "other weights": (with_another_weight, "weights that are not of LoRA: base_model.model.score"),
    "pickled weights": (lambda folder: (folder / ADAPTER_WEIGHTS).unlink(), "expected safetensors"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_others_cannot_use_or_trust_is_not_built(adapters, build, tmp_path, fault):
    change, message = FAULTS[fault]
    folder = shutil.copytree(adapters, tmp_path / "adapters")
    change(folder)
    status, output = build(folder)
    assert status == 1 and message in output, output
    assert not (tmp_path / "out").exists()


def test_what_was_trained_is_not_said_twice(adapters, build):
    status, output = build(adapters, "--trained", "receipts")
    assert status == 1 and "--trained is for --weights" in output


def test_a_base_that_nobody_else_finds_has_to_be_named(adapters, build):
    for options in ([], ["--fine-tune-of", BASE_ID]):
        status, output = build(adapters, "--name", NAME, *options)
        assert status == 1 and "others cannot find it; give --fine-tune-of" in output
