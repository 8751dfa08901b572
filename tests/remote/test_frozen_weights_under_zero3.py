"""``frozen_parameters_held``: what it does to ZeRO-3's bookkeeping, on parameters that only look
like ZeRO-3's. Under the real one: tests/distributed.
"""

import pytest
import torch
from torch import nn

from glm4v_patched.remote.checkpointing import frozen_parameters_held

OUTER_MODULE = 99  # the id of a module outside of the layer


@pytest.fixture
def layer() -> nn.Sequential:
    """Frozen, with the attributes that ZeRO-3 gives to modules and their parameters."""
    layer = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)).requires_grad_(False)
    for number, part in enumerate(layer.modules()):
        part.ds_id = number
        part.ds_recompute_parameters = set()
        for parameter in part.parameters(recurse=False):
            parameter.ds_active_sub_modules = set()
    return layer


def users(layer: nn.Module) -> list[set[int]]:
    return [set(parameter.ds_active_sub_modules) for parameter in layer.parameters()]


def enter(module_id: int, parameters) -> None:
    for parameter in parameters:
        parameter.ds_active_sub_modules.add(module_id)


def in_backward(function) -> None:
    """Call ``function`` where a checkpoint recomputes: inside a running backward pass."""
    called = []

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            called.append(True)
            function()
            return gradient

    Recompute.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert called


def test_frozen_parameters_stay_gathered_through_the_recomputation_and_no_longer(layer):
    """ZeRO-3 partitions a parameter after a module's forward unless it still has a user."""

    def recompute():
        with frozen_parameters_held(layer):
            for module in layer:
                enter(module.ds_id, module.parameters())  # as ZeRO-3's hooks do around a forward
                for parameter in module.parameters():
                    parameter.ds_active_sub_modules.discard(module.ds_id)
                assert all(users(module))

    in_backward(recompute)
    assert users(layer) == [set()] * 4
    enter(OUTER_MODULE, [layer[0].weight])
    with frozen_parameters_held(layer):  # outside of a backward pass
        assert users(layer) == [{OUTER_MODULE}, set(), set(), set()]


def test_trainable_parameters_are_left_alone(layer):
    trainable = layer[0].weight.requires_grad_(True)

    def recompute():
        enter(OUTER_MODULE, [trainable])
        with frozen_parameters_held(layer):
            assert trainable.ds_active_sub_modules == {OUTER_MODULE}

    in_backward(recompute)
    assert trainable.ds_active_sub_modules == {OUTER_MODULE}
    layer.requires_grad_(True)[0].ds_recompute_parameters.add(trainable)
    in_backward(recompute)
    assert layer[0].ds_recompute_parameters == {trainable}


def test_modules_outside_of_the_layer_do_not_keep_its_parameters_but_their_owners_do(layer):
    """DeepSpeed 0.19.3 enters the module whose backward is under way, and keeps a list there."""

    def recompute():
        with frozen_parameters_held(layer):
            for module in layer:
                enter(module.ds_id, module.parameters())
                enter(OUTER_MODULE, module.parameters())
                module.ds_recompute_parameters.update(module.parameters())

    in_backward(recompute)
    assert users(layer) == [{module.ds_id} for module in layer for _ in range(2)]
    assert [module.ds_recompute_parameters for module in layer.modules()] == [set()] * 3


def test_parameters_that_zero3_does_not_shard_are_left_alone(layer):
    """Also those inside of a leaf module, which has no id and is gathered from outside."""
    norm_weight, norm_bias = layer[1].parameters()
    del norm_bias.ds_active_sub_modules, layer[0].ds_id

    def recompute():
        with frozen_parameters_held(layer):
            assert norm_weight.ds_active_sub_modules
            assert not layer[0].weight.ds_active_sub_modules

    in_backward(recompute)
    assert not hasattr(norm_bias, "ds_active_sub_modules")


def test_it_lets_go_when_the_layer_raises(layer):
    def recompute():
        with frozen_parameters_held(layer):
            enter(OUTER_MODULE, [layer[0].weight])
            layer[0].ds_recompute_parameters.add(layer[0].weight)
            raise RuntimeError("in the layer")

    with pytest.raises(RuntimeError, match="in the layer"):
        in_backward(recompute)
    assert users(layer) == [set()] * 4
    assert layer[0].ds_recompute_parameters == set()
