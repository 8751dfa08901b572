"""A disk that is too small is told before anything starts, with both numbers."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from glm4v_patched.engine.memory_plan import count_trained
from glm4v_patched.engine.options import TRAINED
from glm4v_patched.engine.trainable import LORA_TARGETS, select_weights
from glm4v_patched.finetune import disk
from glm4v_patched.finetune.disk import checkpoints_at_once, needed_space, saved_bytes
from glm4v_patched.finetune.recipe import Recipe
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from tests.helpers.recipes import recipe
from tests.helpers.tiny import tiny_model

REAL = ChatGLMConfig()
GB = 10**9


def require_space(asked: Recipe) -> None:
    disk.require_space(asked.out, needed_space(asked, REAL))


@pytest.fixture
def free(monkeypatch):
    """Sets what is free on the disk."""

    def set_free(number: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=number))

    return set_free


def test_a_disk_that_is_too_small_is_refused_with_both_numbers(free, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "saved_bytes", lambda *_: (28 * GB, 195 * GB))
    out = {"out": str(tmp_path / "out")}
    free(28 * GB)
    require_space(recipe(out))
    free(28 * GB - 1)
    with pytest.raises(ValueError, match=r"28.0 GB are free there, and the model \(28.0 GB\) take"):
        require_space(recipe(out))
    free(1000 * GB)
    saving = recipe(out | {"trainer.max_steps": 1000, "trainer.save_steps": 100})
    told = r"1000\.0 GB are free .* up to 9 checkpoints .*195\.0 GB each\) take 1783\.0 GB.*_limit"
    with pytest.raises(ValueError, match=told):
        require_space(saving)
    require_space(saving.override({"trainer.save_total_limit": 2}))
    # Those of a run that is continued are on the disk.
    for step in (100, 200, 300, 400, 500):
        Path(saving.out, f"checkpoint-{step}").mkdir(parents=True)
    require_space(saving)


def test_adapters_of_the_published_model_need_little(free, tmp_path):
    free(20 * GB)
    full = recipe({"out": str(tmp_path / "out")})
    with pytest.raises(ValueError, match=r"20\.0 GB are free there, and the model \(27\.8 GB\)"):
        require_space(full)
    require_space(full.override({"trained": "lora_all"}))


@pytest.mark.parametrize(
    ("max_steps", "save_steps", "limit", "most"),
    [(10, None, None, 0), (10, 3, None, 3), (10, 5, None, 1), (10, 5, 1, 1), (10, 20, None, 0)]
    + [(1000, 10, 2, 3), (1000, 10, None, 99), (30, 10, 1, 2)],
)
def test_an_old_checkpoint_goes_when_a_new_one_is_complete(max_steps, save_steps, limit, most):
    asked = recipe({"trainer.max_steps": max_steps, "trainer.save_steps": save_steps})
    assert checkpoints_at_once(asked.override({"trainer.save_total_limit": limit}).trainer) == most


def test_checkpoints_of_epochs_are_counted_too():
    epochs = {"trainer.max_steps": None, "trainer.num_train_epochs": 4.5}
    asked = recipe(epochs | {"trainer.save_strategy": "epoch"})
    assert checkpoints_at_once(asked.trainer) == 4
    assert checkpoints_at_once(asked.override({"trainer.save_total_limit": 1}).trainer) == 2
    asked = recipe(epochs | {"trainer.save_steps": 10})
    assert checkpoints_at_once(asked.trainer) == 1 and checkpoints_at_once(asked.trainer, 41) == 4


@pytest.mark.parametrize(
    ("trained", "targets"),
    [(trained, None) for trained in TRAINED]
    + [("lora_all", "all-linear"), ("lora_lm", ["dense"]), ("tower+adapter", None)],
)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_saved_model_has_the_size_of_its_weights(trained, targets, precision):
    lora = {"trained": trained, "lora.rank": 4, "lora.targets": targets}
    lora |= {"engine.zero_stage": 0} if trained == "qlora" else {}
    options = recipe(lora | {"engine.precision": precision}).engine_options()
    model = select_weights(tiny_model(), "lora_lm" if trained == "qlora" else trained, options.lora)
    weights, adapters = model.named_parameters(), trained in LORA_TARGETS
    saved = sum(weight.numel() for name, weight in weights if not adapters or "lora_" in name)
    found, checkpoint = saved_bytes(model.config, options)
    assert found == saved * (2 if precision == "bf16" else 4)
    learned = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert count_trained(model.config, options) == learned
    if options.zero_stage == 0:
        assert checkpoint == 12 * learned
    elif trained in LORA_TARGETS or trained == "full":  # else what is frozen is there twice
        assert checkpoint == found + 12 * learned
