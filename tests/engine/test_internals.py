"""DeepSpeed's private names: if one is missing, the error names the version and the cure."""

import importlib
import re
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import glm4v_patched
from glm4v_patched.engine.deepspeed import config, internals, zero3
from glm4v_patched.finetune.safe_unpickling import loading_safely
from glm4v_patched.terminal_text import pip_install
from tests.helpers.sharded import as_sharded
from tests.helpers.tiny import tiny_model

PACKAGE = Path(glm4v_patched.__file__).parent
DEEPSPEED_NAMES = (
    internals.ZERO_PARAM_STATUS,
    internals.CHECKPOINT_ENGINE,
    *internals.CHECKPOINT_CLASSES,
)
CURE = re.escape(f"; install a tested one: {pip_install(config.SUPPORTED_DEEPSPEED)}")


def expect_missing(name: str):
    """Expect the error for a name that DeepSpeed does not have."""
    message = f"DeepSpeed {re.escape(version('deepspeed'))} has no {re.escape(name)} .*{CURE}"
    return pytest.raises(RuntimeError, match=message)


@pytest.mark.parametrize("name", internals.SHARDED_WEIGHT_ATTRIBUTES)
def test_a_missing_attribute_of_a_weight_is_reported_by_each_function_that_uses_it(name):
    weight = as_sharded(SimpleNamespace())
    delattr(weight, name)
    for function in ("is_sharded", "local_shard", "unpadded_shard"):
        with expect_missing(name):
            getattr(internals, function)(weight)


def test_deepspeeds_classes_exist_and_a_missing_one_is_reported():
    assert all(map(internals.import_deepspeed_name, DEEPSPEED_NAMES))
    for name in ("deepspeed.runtime.zero:Renamed", "deepspeed.renamed:Init"):
        with expect_missing(name.replace(":", ".")):
            internals.import_deepspeed_name(name)


def test_missing_names_of_the_optimizer_and_of_checkpoints_are_reported(monkeypatch):
    uses = {
        "get_grad_norm_direct": lambda old: internals.replace_in_all([old], name, lambda old: old),
        internals.GRADIENT_VIEWS: lambda old: zero3._move_gradients_to(torch.device("cpu"), old),
        internals.GRADIENT_BUFFER: lambda old: zero3._move_gradients_to(torch.device("cpu"), old),
    }
    for name, use in uses.items():
        with expect_missing(name):
            use(SimpleNamespace(**{known: {} for known in uses if known != name}))
    module, attribute = internals.CHECKPOINT_CLASSES[0].split(":")
    monkeypatch.delattr(importlib.import_module(module), attribute)
    with expect_missing(f"{module}.{attribute}"), loading_safely():
        pass


def test_weights_without_zero3_are_not_sharded():
    parameter = next(tiny_model().parameters())
    assert not internals.is_sharded(parameter)
    assert internals.local_shard(parameter) is parameter


def test_an_attribute_is_replaced_in_all_objects_or_in_none():
    first, second = SimpleNamespace(act="old"), SimpleNamespace()
    with expect_missing("act"):
        internals.replace_in_all([first, second], "act", lambda old: f"new {old}")
    assert first.act == "old"
    internals.replace_in_all([first], "act", lambda old: f"new {old}")
    assert first.act == "new old"


def test_deepspeed_does_not_compile_collectives_on_a_cpu(monkeypatch):
    backend = importlib.import_module(internals.COLLECTIVES)
    original = backend.build_shm_op
    with pytest.raises(ZeroDivisionError), internals.skip_collectives_compilation():
        assert backend.build_shm_op() is None
        raise ZeroDivisionError
    assert backend.build_shm_op is original
    monkeypatch.delattr(backend, "build_shm_op")
    with expect_missing("build_shm_op"), internals.skip_collectives_compilation():
        pass


def test_an_untested_deepspeed_is_refused(monkeypatch):
    assert f'"{config.SUPPORTED_DEEPSPEED}"' in (PACKAGE.parent / "pyproject.toml").read_text()
    for installed, is_tested in (("0.16.8", False), ("0.19.9+local", True), ("0.20", False)):
        monkeypatch.setattr(config, "version", lambda name, installed=installed: installed)
        if is_tested:
            config.require_deepspeed()
            continue
        with pytest.raises(RuntimeError, match=f"of {installed}: .*'deepspeed>=0.16.9,<0.20'"):
            config.require_deepspeed()
