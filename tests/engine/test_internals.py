"""DeepSpeed's private names: one that is renamed is an error with version and cure."""

import importlib
import pkgutil
import re
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

import glm4v_patched
from glm4v_patched.engine.deepspeed import config, internals
from glm4v_patched.engine.deepspeed.internals import Replacements
from glm4v_patched.engine.deepspeed.private_names import COMPILES_COLLECTIVES
from glm4v_patched.finetune.safe_unpickling import loading_safely
from glm4v_patched.terminal_text import pip_install
from tests.helpers.tiny import tiny_model

PACKAGE = Path(glm4v_patched.__file__).parent
CLASSES = (internals.ZERO_PARAM_STATUS, internals.CHECKPOINT_ENGINE, *internals.IN_CHECKPOINTS)
CURE = re.escape(f"; install a tested one: {pip_install(config.SUPPORTED_DEEPSPEED)}")


def told(name: str) -> str:
    return f"DeepSpeed {re.escape(version('deepspeed'))} has no {re.escape(name)} .*{CURE}"


def weight(**changes) -> SimpleNamespace:
    names = {name: None for name in internals.OF_SHARDED_WEIGHTS}
    return SimpleNamespace(**(names | changes))


@pytest.mark.parametrize("name", internals.OF_SHARDED_WEIGHTS)
def test_a_renamed_name_of_a_weight_is_told_wherever_it_is_used(name):
    renamed = weight()
    delattr(renamed, name)
    for use in (
        internals.is_sharded,
        internals.shard_of,
        internals.own_shard,
        internals.whole_shape,
    ):
        with pytest.raises(RuntimeError, match=told(name)):
            use(renamed)
    model = SimpleNamespace(parameters=lambda: [weight(), renamed])
    with pytest.raises(RuntimeError, match=told(name)):
        internals.sharded_weights(model)


@pytest.mark.parametrize("name", CLASSES)
def test_a_renamed_class_of_deepspeed_is_told(name, monkeypatch):
    module, attribute = name.split(":")
    monkeypatch.delattr(importlib.import_module(module), attribute)
    with pytest.raises(RuntimeError, match=told(name.replace(":", "."))):
        internals.resolve(name)
    if name != internals.ZERO_PARAM_STATUS:
        with pytest.raises(RuntimeError, match=told(name.replace(":", "."))), loading_safely():
            pass


@pytest.mark.parametrize("name", internals.OF_ZERO3)
def test_a_renamed_name_of_the_optimizer_is_told(name):
    optimizer = SimpleNamespace(**{known: [] for known in internals.OF_ZERO3 if known != name})
    uses = {
        "get_grad_norm_direct": lambda: Replacements().apply([optimizer], name, lambda old: old),
        "fp32_partitioned_groups_flat": lambda: internals.masters(optimizer, 3),
        "grad_partitions_flat_buffer": lambda: internals.gradient_buffers(optimizer, 3),
    }
    with pytest.raises(RuntimeError, match=told(name)):
        uses[name]()
    with pytest.raises(RuntimeError, match=told("single_partition_of_fp32_groups")):
        internals.masters(optimizer, 2)


def test_the_names_are_there():
    for name in (
        internals.ZERO_PARAM_STATUS,
        internals.CHECKPOINT_ENGINE,
        *internals.IN_CHECKPOINTS,
    ):
        assert pkgutil.resolve_name(name)
    assert ZeroParamStatus.AVAILABLE and ZeroParamStatus.INFLIGHT and ZeroParamStatus.NOT_AVAILABLE
    assert hasattr(deepspeed.zero, "GatheredParameters")


def test_plain_weights_are_not_sharded():
    model = tiny_model()
    parameter = next(model.parameters())
    assert not internals.is_sharded(parameter)
    assert internals.shard_of(parameter) is parameter
    assert internals.whole_shape(parameter) == tuple(parameter.shape)


def test_all_are_replaced_or_none_and_put_back():
    class Owner:
        def act(self):
            return "old"

    first, second, third = Owner(), Owner(), SimpleNamespace()
    second.act = lambda: "own"
    replacements = Replacements()
    with pytest.raises(RuntimeError, match=told("act")):
        replacements.apply([first, second, third], "act", lambda old: lambda: "new")
    assert (first.act(), second.act()) == ("old", "own")
    replacements.apply([first, second], "act", lambda old: lambda: f"new {old()}")
    assert (first.act(), second.act()) == ("new old", "new own")
    replacements.revert()
    replacements.revert()
    assert (first.act(), second.act()) == ("old", "own")
    assert "act" not in vars(first)


def test_no_other_file_names_them():
    """But for remote/, which knows no package, and what gathers: both are checked from here."""
    private = re.compile(r"\b(ds_[a-z_]+|_z3_optimizer|deepspeed\.runtime[\w.]*|\w+_groups_flat)\b")
    allowed = {"internals.py", "private_names.py", "gather.py"}
    files = [path for path in PACKAGE.rglob("*.py") if path.name not in allowed]
    found = {
        path.relative_to(PACKAGE).as_posix(): names
        for path in files
        if path.parent.name != "remote" and (names := set(private.findall(path.read_text())))
    }
    assert found == {}


def test_the_names_that_the_model_uses_are_checked_here():
    known = {*internals.OF_SHARDED_WEIGHTS, *internals.OF_MODULES, *internals.OF_SOME_MODULES}
    for name in ("checkpointing.py", "sharding.py"):
        source = (PACKAGE / "remote" / name).read_text()
        assert set(re.findall(r"\bds_[a-z_]+", source)) <= known, name


def test_on_a_cpu_deepspeed_compiles_nothing_where_processes_join(monkeypatch):
    backend = importlib.import_module(COMPILES_COLLECTIVES.partition(":")[0])
    original = backend.build_shm_op
    with pytest.raises(ZeroDivisionError), internals.nothing_compiled():
        assert backend.build_shm_op() is None
        raise ZeroDivisionError
    assert backend.build_shm_op is original
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with internals.nothing_compiled():
        assert backend.build_shm_op is original
    monkeypatch.undo()
    monkeypatch.delattr(backend, "build_shm_op")
    with pytest.raises(RuntimeError, match=told("build_shm_op")), internals.nothing_compiled():
        pass


@pytest.mark.parametrize("found", ["0.16.8", "0.20.0", "1.0"])
def test_a_deepspeed_outside_of_the_range_is_told(found, monkeypatch):
    monkeypatch.setattr(config, "version", lambda name: found)
    with pytest.raises(
        RuntimeError, match=f"{found} is not: .*pip install 'deepspeed>=0.16.9,<0.20'"
    ):
        config.require_deepspeed()


@pytest.mark.parametrize("found", ["0.16.9", "0.17.0", "0.19.8", "0.19.9+local"])
def test_a_deepspeed_inside_of_the_range_is_taken(found, monkeypatch):
    monkeypatch.setattr(config, "version", lambda name: found)
    config.require_deepspeed()


def test_the_range_is_that_of_the_package():
    dependency = f'"deepspeed>={config.OLDEST_DEEPSPEED},<{config.FIRST_UNTESTED_DEEPSPEED}"'
    assert dependency in (PACKAGE.parent / "pyproject.toml").read_text()
