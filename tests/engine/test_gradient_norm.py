"""Norms without copies; tests/distributed/test_gathering.py has two processes take them."""

import math

import pytest
import torch
from torch import nn

from glm4v_patched.engine.deepspeed.gradient_norm import take_norms_in_place
from glm4v_patched.engine.deepspeed.internals import Replacements

PARAMETERS = ["a", "b", "c"]


class Zero:
    """In the place of ZeRO-3's optimizer; ``asked`` is what its norm was asked for."""

    def __init__(self):
        self.asked = []

    def get_grad_norm_direct(self, gradients, parameters, norm_type=2):
        self.asked.append((gradients, parameters, norm_type))
        total = torch.stack([part.double().norm(norm_type) for part in gradients]).norm(norm_type)
        return total if total.isfinite() else torch.tensor(-1.0)  # as DeepSpeed says that


@pytest.fixture
def zero() -> Zero:
    """After two forward passes of a model of its."""
    optimizer = Zero()
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter._z3_optimizer = optimizer
    take_norms_in_place(model, Replacements())
    model(torch.ones(2))
    model(torch.ones(2))
    return optimizer


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).bfloat16() for size in (7, 1_000_000, 1)]


def test_the_norm_of_all_gradients_is_one_number_for_deepspeed(zero):
    norm = zero.get_grad_norm_direct(gradients(), PARAMETERS)
    exact = torch.cat(gradients()).double().norm()
    assert norm.item() == pytest.approx(exact.item(), rel=1e-12)
    (((number,), parameters, norm_type),) = zero.asked
    assert number.numel() == 1
    assert parameters == ["a"] and norm_type == 2


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_has_an_infinite_norm(zero, value):
    broken = gradients()
    broken[1][5] = value
    assert zero.get_grad_norm_direct(broken, PARAMETERS).item() == math.inf
    [([number], _, _)] = zero.asked
    assert not number.isfinite()


def test_the_largest_value_is_deepspeeds(zero):
    given = gradients()
    zero.get_grad_norm_direct(given, PARAMETERS, norm_type=math.inf)
    ((passed, parameters, norm_type),) = zero.asked
    assert passed is given and parameters is PARAMETERS and norm_type == math.inf


def test_the_norm_is_deepspeeds_again():
    optimizer, replacements = Zero(), Replacements()
    model = nn.Linear(2, 2)
    model.weight._z3_optimizer = optimizer
    take_norms_in_place(model, replacements)
    model(torch.ones(2))
    assert "get_grad_norm_direct" in vars(optimizer)
    replacements.revert()
    assert "get_grad_norm_direct" not in vars(optimizer)
    replacements.revert()


def test_a_model_that_knows_no_optimizer_of_zero_is_told_of():
    model = nn.Linear(2, 2)
    take_norms_in_place(model, Replacements())
    with pytest.raises(
        RuntimeError, match="has no _z3_optimizer .*; install a tested one: .*pip install"
    ):
        model(torch.ones(2))
