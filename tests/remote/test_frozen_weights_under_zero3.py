"""``frozen_parameters_held``: what it does to ZeRO-3's bookkeeping, on parameters that only look
like ZeRO-3's. Under the real one: tests/distributed.
"""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from glm4v_patched.remote.checkpointing import frozen_parameters_held

OUTER_MODULE = 99  # the id of a module outside of the layer


def shard(module: nn.Module) -> nn.Module:
    """Give a module and its own parameters the attributes that ZeRO-3 gives them."""
    for number, part in enumerate(module.modules()):
        part.ds_id = number
        part.ds_recompute_parameters = set()
        for parameter in part.parameters(recurse=False):
            parameter.ds_active_sub_modules = set()
    return module


def frozen_layer() -> nn.Sequential:
    layer = shard(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    return layer.requires_grad_(False)


def users(layer: nn.Module) -> list[set[int]]:
    return [parameter.ds_active_sub_modules for parameter in layer.parameters()]


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


@contextmanager
def forward_hooks(module: nn.Module):
    """What ZeRO-3's hooks do around a module's forward: enter it as a user, and take it away."""
    for parameter in module.parameters(recurse=False):
        parameter.ds_active_sub_modules.add(module.ds_id)
    yield
    for parameter in module.parameters(recurse=False):
        parameter.ds_active_sub_modules.discard(module.ds_id)


def is_partitioned_after_forward(module: nn.Module) -> bool:
    """ZeRO-3 partitions a parameter after a module's forward unless it still has a user."""
    return not any(
        parameter.ds_active_sub_modules for parameter in module.parameters(recurse=False)
    )


def test_frozen_parameters_stay_gathered_through_the_recomputation():
    layer = frozen_layer()
    partitioned = []

    def recompute():
        with frozen_parameters_held(layer):
            for module in layer:
                with forward_hooks(module):
                    pass
                partitioned.append(is_partitioned_after_forward(module))

    in_backward(recompute)
    assert partitioned == [False, False]


def test_nobody_is_left_as_a_user_afterwards():
    layer = frozen_layer()

    def recompute():
        with frozen_parameters_held(layer):
            assert all(users(layer))

    in_backward(recompute)
    assert users(layer) == [set()] * 4


def test_the_modules_that_own_a_parameter_stay_its_users():
    layer = frozen_layer()
    linear, norm = layer

    def recompute():
        with frozen_parameters_held(layer):
            for module in layer:
                for parameter in module.parameters():
                    parameter.ds_active_sub_modules.add(module.ds_id)

    in_backward(recompute)
    assert users(linear) == [{linear.ds_id}] * 2
    assert users(norm) == [{norm.ds_id}] * 2


def test_a_parameter_of_two_modules_keeps_both():
    layer = shard(nn.Sequential(nn.LayerNorm(2), nn.LayerNorm(2))).requires_grad_(False)
    layer[1].weight = layer[0].weight
    shared = layer[0].weight

    def recompute():
        with frozen_parameters_held(layer):
            shared.ds_active_sub_modules |= {layer[0].ds_id, layer[1].ds_id}

    in_backward(recompute)
    assert shared.ds_active_sub_modules == {layer[0].ds_id, layer[1].ds_id}


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_module_outside_of_the_layer_does_not_keep_its_parameters(when):
    """DeepSpeed 0.19.3 enters the module whose backward is under way, and keeps a list there."""
    layer = frozen_layer()

    def enter():
        for module in layer:
            for parameter in module.parameters():
                parameter.ds_active_sub_modules.add(OUTER_MODULE)
                module.ds_recompute_parameters.add(parameter)

    def recompute():
        if when == "before":
            enter()
        with frozen_parameters_held(layer):
            if when == "during":
                enter()

    in_backward(recompute)
    assert users(layer) == [set()] * 4
    assert [module.ds_recompute_parameters for module in layer.modules()] == [set()] * 3


def test_trainable_parameters_are_left_alone():
    layer = frozen_layer()
    trainable = layer[0].weight.requires_grad_(True)
    trainable.ds_active_sub_modules.add(OUTER_MODULE)
    during = []

    def recompute():
        with frozen_parameters_held(layer):
            during.append(set(trainable.ds_active_sub_modules))

    in_backward(recompute)
    assert during == [{OUTER_MODULE}]
    assert trainable.ds_active_sub_modules == {OUTER_MODULE}


def test_a_layer_with_nothing_frozen_keeps_what_deepspeed_entered():
    layer = frozen_layer().requires_grad_(True)
    layer[0].ds_recompute_parameters.add(layer[0].weight)

    def recompute():
        with frozen_parameters_held(layer):
            pass

    in_backward(recompute)
    assert layer[0].ds_recompute_parameters == {layer[0].weight}


def test_nothing_happens_outside_of_a_backward_pass():
    layer = frozen_layer()
    layer[0].weight.ds_active_sub_modules.add(OUTER_MODULE)
    with frozen_parameters_held(layer):
        during = [set(of_one) for of_one in users(layer)]
    assert during == users(layer) == [{OUTER_MODULE}, set(), set(), set()]


def test_parameters_that_zero3_does_not_shard_are_left_alone():
    layer = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)).requires_grad_(False)
    sharded = layer[1].weight
    sharded.ds_active_sub_modules, layer[1].ds_id = set(), 7
    during = []

    def recompute():
        with frozen_parameters_held(layer):
            during.append(bool(sharded.ds_active_sub_modules))

    in_backward(recompute)
    assert during == [True]
    assert [hasattr(p, "ds_active_sub_modules") for p in layer.parameters()] == [
        parameter is sharded for parameter in layer.parameters()
    ]


def test_it_lets_go_when_the_layer_raises():
    layer = frozen_layer()

    def recompute():
        with frozen_parameters_held(layer):
            layer[0].weight.ds_active_sub_modules.add(OUTER_MODULE)
            layer[0].ds_recompute_parameters.add(layer[0].weight)
            raise RuntimeError("in the layer")

    with pytest.raises(RuntimeError, match="in the layer"):
        in_backward(recompute)
    assert users(layer) == [set()] * 4
    assert layer[0].ds_recompute_parameters == set()
