"""Where ZeRO-3's gradients wait, and their norm, without copies.

tests/distributed has processes that train so (test_gathering.py, test_recipe_choices.py).
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from glm4v_patched.engine.deepspeed.gradient_buffer import keep_gradients_on_gpu
from glm4v_patched.engine.deepspeed.gradient_norm import take_norms_in_place
from glm4v_patched.engine.deepspeed.internals import Replacements, gradient_views

VIEWS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
BUFFER = "grad_partitions_flat_buffer"


def forward_twice(optimizer, adapt, *given, device: str = "cpu") -> None:
    """Of a model whose weights know this optimizer."""
    model = nn.Linear(2, 2, device=device)
    for parameter in model.parameters():
        parameter._z3_optimizer = optimizer
    adapt(model, *given)
    for _ in range(2):
        model(torch.ones(2, device=device))


def offloading() -> SimpleNamespace:
    """In the place of ZeRO-3's optimizer; shares of three weights, the last one padded."""
    buffer = torch.ones(10, dtype=torch.bfloat16)
    views = {7: buffer.narrow(0, 0, 4), 3: buffer.narrow(0, 4, 1), 5: buffer.narrow(0, 5, 3)}
    return SimpleNamespace(**{BUFFER: buffer, VIEWS: views})


def test_gradients_are_where_the_weights_are():
    optimizer = offloading()
    forward_twice(optimizer, keep_gradients_on_gpu, device="meta")  # which stands for the GPU
    buffer, views = optimizer.grad_partitions_flat_buffer, gradient_views(optimizer)
    assert (buffer.device.type, buffer.dtype, buffer.shape) == ("meta", torch.bfloat16, (10,))
    placed = {name: (view.storage_offset(), view.numel()) for name, view in views.items()}
    assert placed == {7: (0, 4), 3: (4, 1), 5: (5, 3)}
    assert all(view._base is buffer for view in views.values())


@pytest.mark.parametrize("name", [VIEWS, BUFFER])
def test_a_renamed_name_is_told_and_nothing_moved(name):
    optimizer = offloading()
    del vars(optimizer)[name]
    with pytest.raises(RuntimeError, match=f"has no {name} .*install a tested one"):
        forward_twice(optimizer, keep_gradients_on_gpu, device="meta")
    assert name not in vars(optimizer)


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
    optimizer = Zero()
    forward_twice(optimizer, take_norms_in_place, Replacements())
    return optimizer


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).bfloat16() for size in (7, 1_000_000, 1)]


def test_the_norm_of_all_gradients_is_one_number_for_deepspeed(zero):
    norm = zero.get_grad_norm_direct(gradients(), ["a", "b", "c"])
    exact = torch.cat(gradients()).double().norm()
    assert norm.item() == pytest.approx(exact.item(), rel=1e-12)
    [([number], parameters, norm_type)] = zero.asked
    assert number.numel() == 1 and parameters == ["a"] and norm_type == 2


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_has_an_infinite_norm(zero, value):
    """DeepSpeed's -1, squared, would be 1."""
    broken = gradients()
    broken[1][5] = value
    assert zero.get_grad_norm_direct(broken, ["a", "b", "c"]).item() == math.inf
    [([number], _, _)] = zero.asked
    assert not number.isfinite()


def test_the_largest_value_is_deepspeeds(zero):
    given, parameters = gradients(), ["a", "b", "c"]
    zero.get_grad_norm_direct(given, parameters, norm_type=math.inf)
    ((passed, of, norm_type),) = zero.asked
    assert passed is given and of is parameters and norm_type == math.inf


def test_the_norm_is_deepspeeds_again():
    optimizer, replacements = Zero(), Replacements()
    forward_twice(optimizer, take_norms_in_place, replacements)
    assert "get_grad_norm_direct" in vars(optimizer)
    replacements.revert()
    assert "get_grad_norm_direct" not in vars(optimizer)


def test_a_model_that_knows_no_optimizer_of_zero_is_told_of():
    with pytest.raises(RuntimeError, match="has no _z3_optimizer .*; install a tested one: "):
        forward_twice(None, take_norms_in_place, Replacements())
