"""Fixtures of the training tests."""

from pathlib import Path

import pytest
import yaml

from glm4v_patched.data import check
from glm4v_patched.engine.gpus import Gpu, Gpus
from glm4v_patched.finetune import preflight, progress
from glm4v_patched.finetune.recipe.sections import Recipe
from glm4v_patched.models import placement
from tests.helpers.recipes import LEAST, drawn_recipe
from tests.helpers.tiny import tiny_model


@pytest.fixture(scope="session", autouse=True)
def no_cache_of_the_user(tmp_path_factory):
    """Every check of images reads the whole file of those that were checked before."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache") / "checked.jsonl"
        patch.setattr(check, "default_cache_path", lambda: cache)
        yield


@pytest.fixture(autouse=True)
def plots_are_empty(monkeypatch):
    """Drawing takes a quarter of a short training; test_progress.py has what is drawn."""
    monkeypatch.setattr(progress, "plot_loss", lambda history, path, *_: Path(path).touch())


@pytest.fixture
def has_gpus(monkeypatch):
    """Makes this a machine with so many GPUs, or of such capabilities."""

    def have(number: int, reason: str = "", capabilities=()) -> None:
        kinds = capabilities or ((9, 0),) * number
        gpus = tuple(Gpu("NVIDIA H200", 150_000_000_000, capability) for capability in kinds)
        gpus_found = Gpus(gpus, reason)
        for module in (preflight, placement):
            monkeypatch.setattr(module, "find_gpus", lambda: gpus_found)

    return have


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture
def recipe_file(tmp_path, model_folder) -> Path:
    """A recipe that can be run."""
    (tmp_path / "train.jsonl").write_text("{}\n")
    values = LEAST | {
        "model": str(model_folder),
        "out": str(tmp_path / "new" / "out"),
        "data": {"train": str(tmp_path / "train.jsonl")},
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return tmp_path / "r.yaml"


@pytest.fixture(scope="session")
def base_recipe(tmp_path_factory) -> Recipe:
    """A tiny model and 20 rows, to be only read: ten steps of LoRA, one process without ZeRO, which
    starts no others to read rows: that takes longer than the steps. Answers, if rows are evaluated,
    are short."""
    changes = {"trained": "lora_lm", "engine.zero_stage": 0, "trainer.dataloader_num_workers": 0}
    changes |= {"data.eval_answers": 2, "data.eval_max_new_tokens": 4}
    return drawn_recipe(tmp_path_factory.mktemp("drawn"), changes)


@pytest.fixture
def mine(base_recipe, tmp_path) -> Recipe:
    """The same, with a folder of its own for what is trained."""
    return base_recipe.override({"out": str(tmp_path / "out")})
