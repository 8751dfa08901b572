"""ZeRO++: what a recipe names reaches DeepSpeed, and what cannot be is told before."""

import pytest

from glm4v_patched.engine.deepspeed import config
from glm4v_patched.engine.deepspeed.config import deepspeed_config, require_zero_plus_plus
from glm4v_patched.engine.memory_plan import Batch, states
from glm4v_patched.finetune.recipe import Recipe
from glm4v_patched.finetune.recipe_file import RecipeError
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from tests.helpers.recipes import decided, recipe

NAMES = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")

EACH = [*zip(NAMES, (8, True, True), strict=True)]


def asked(**values) -> Recipe:
    return recipe({f"engine.{name}": value for name, value in values.items()})


@pytest.mark.parametrize(("name", "value"), EACH)
def test_what_a_recipe_names_reaches_deepspeed_and_nothing_else_does(name, value):
    zero = deepspeed_config(decided(asked(**{name: value})))["zero_optimization"]
    assert {known: zero[known] for known in NAMES if known in zero} == {name: value}
    plain = deepspeed_config(decided(recipe()))["zero_optimization"]
    assert not {*NAMES} & plain.keys()


@pytest.mark.parametrize(("name", "value"), EACH)
def test_only_stage_3_has_it(name, value):
    with pytest.raises(RecipeError, match=r"engine.zero_\w+.* with engine.zero_stage 2.*expected"):
        asked(**{name: value, "zero_stage": 2})


def test_faults_are_told_with_both_numbers(monkeypatch):
    require_zero_plus_plus(8, False, processes=16, on_cpu=False)
    require_zero_plus_plus(1, False, processes=1, on_cpu=True)
    with pytest.raises(ValueError, match="zero_hpz_partition_size is 8, and there are 12"):
        require_zero_plus_plus(8, False, processes=12, on_cpu=False)
    with pytest.raises(ValueError, match="run on GPUs"):
        require_zero_plus_plus(1, True, processes=2, on_cpu=True)
    monkeypatch.setattr(config, "has_nvcc", lambda: False)
    with pytest.raises(ValueError, match="no nvcc; install CUDA's toolkit"):
        require_zero_plus_plus(1, True, processes=2, on_cpu=False)


@pytest.mark.parametrize("size", [2, 8])
def test_a_second_copy_of_the_weights_is_counted(size):
    batch = Batch(rows=1, row_length=2114, processes=16)
    config = ChatGLMConfig()
    plain = states(config, decided(recipe()), batch)
    copied = states(config, decided(asked(zero_hpz_partition_size=size)), batch)
    assert copied - plain == pytest.approx(2 * 13_906_320_896 / size, rel=1e-6)
