"""DeepSpeed's private names: one that is renamed is an error with version and cure."""

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
CLASSES = (internals.ZERO_PARAM_STATUS, internals.CHECKPOINT_ENGINE, *internals.CHECKPOINT_CLASSES)
CURE = re.escape(f"; install a tested one: {pip_install(config.SUPPORTED_DEEPSPEED)}")


def renamed(name: str):
    """What is raised where DeepSpeed has no such name."""
    told = f"DeepSpeed {re.escape(version('deepspeed'))} has no {re.escape(name)} .*{CURE}"
    return pytest.raises(RuntimeError, match=told)


@pytest.mark.parametrize("name", internals.SHARDED_WEIGHT_ATTRIBUTES)
def test_a_renamed_name_of_a_weight_is_told_wherever_it_is_used(name):
    weight = as_sharded(SimpleNamespace())
    delattr(weight, name)
    for use in ("is_sharded", "local_shard", "unpadded_shard"):
        with renamed(name):
            getattr(internals, use)(weight)


def test_a_class_of_deepspeed_is_there_and_a_renamed_one_told():
    assert all(map(internals.import_deepspeed_name, CLASSES))
    for name in ("deepspeed.runtime.zero:Renamed", "deepspeed.renamed:Init"):
        with renamed(name.replace(":", ".")):
            internals.import_deepspeed_name(name)


def test_a_renamed_name_of_the_optimizer_or_of_a_checkpoint_is_told(monkeypatch):
    uses = {
        "get_grad_norm_direct": lambda old: internals.replace_in_all([old], name, lambda old: old),
        internals.GRADIENT_VIEWS: lambda old: zero3._keep_gradients_on(torch.device("cpu"), old),
        internals.GRADIENT_BUFFER: lambda old: zero3._keep_gradients_on(torch.device("cpu"), old),
    }
    for name, use in uses.items():
        with renamed(name):
            use(SimpleNamespace(**{known: {} for known in uses if known != name}))
    module, attribute = internals.CHECKPOINT_CLASSES[0].split(":")
    monkeypatch.delattr(importlib.import_module(module), attribute)
    with renamed(f"{module}.{attribute}"), loading_safely():
        pass


def test_plain_weights_are_not_sharded():
    parameter = next(tiny_model().parameters())
    assert not internals.is_sharded(parameter)
    assert internals.local_shard(parameter) is parameter


def test_all_are_replaced_or_none():
    first, second = SimpleNamespace(act="old"), SimpleNamespace()
    with renamed("act"):
        internals.replace_in_all([first, second], "act", lambda old: f"new {old}")
    assert first.act == "old"
    internals.replace_in_all([first], "act", lambda old: f"new {old}")
    assert first.act == "new old"


def test_on_a_cpu_deepspeed_compiles_nothing_where_processes_join(monkeypatch):
    backend = importlib.import_module(internals.COLLECTIVES)
    original = backend.build_shm_op
    with pytest.raises(ZeroDivisionError), internals.skip_collectives_compilation():
        assert backend.build_shm_op() is None
        raise ZeroDivisionError
    assert backend.build_shm_op is original
    monkeypatch.delattr(backend, "build_shm_op")
    with renamed("build_shm_op"), internals.skip_collectives_compilation():
        pass


def test_a_deepspeed_outside_of_the_tested_range_is_told(monkeypatch):
    assert f'"{config.SUPPORTED_DEEPSPEED}"' in (PACKAGE.parent / "pyproject.toml").read_text()
    for found, is_tested in (("0.16.8", False), ("0.19.9+local", True), ("0.20", False)):
        monkeypatch.setattr(config, "version", lambda name, found=found: found)
        if is_tested:
            config.require_deepspeed()
            continue
        with pytest.raises(RuntimeError, match=f"{found} is not: .*'deepspeed>=0.16.9,<0.20'"):
            config.require_deepspeed()
