"""Where ZeRO-3 keeps gradients of an offloaded optimizer; ``meta`` stands for the GPU.

tests/distributed/test_recipe_choices.py trains with an offloaded optimizer.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from glm4v_patched.engine.deepspeed.gradient_buffer import keep_gradients_on_gpu
from glm4v_patched.engine.deepspeed.internals import gradient_views, set_gradient_views

VIEWS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


def offloading() -> SimpleNamespace:
    """In the place of ZeRO-3's optimizer; shares of three weights, the last one padded."""
    buffer = torch.ones(10, dtype=torch.bfloat16)
    views = {7: buffer.narrow(0, 0, 4), 3: buffer.narrow(0, 4, 1), 5: buffer.narrow(0, 5, 3)}
    return SimpleNamespace(grad_partitions_flat_buffer=buffer, **{VIEWS: views})


def forward(optimizer: SimpleNamespace) -> None:
    model = nn.Linear(2, 2, device="meta")
    for parameter in model.parameters():
        parameter._z3_optimizer = optimizer
    keep_gradients_on_gpu(model)
    for _ in range(2):
        model(torch.ones(2, device="meta"))


def test_gradients_are_where_the_weights_are():
    optimizer = offloading()
    forward(optimizer)
    buffer, views = optimizer.grad_partitions_flat_buffer, gradient_views(optimizer)
    assert buffer.device.type == "meta"
    assert buffer.dtype == torch.bfloat16 and buffer.shape == (10,)
    placed = {name: (view.storage_offset(), view.numel()) for name, view in views.items()}
    assert placed == {7: (0, 4), 3: (4, 1), 5: (5, 3)}
    assert all(view._base is buffer for view in views.values())


@pytest.mark.parametrize("name", [VIEWS, "grad_partitions_flat_buffer"])
def test_a_renamed_name_is_told_and_nothing_moved(name):
    optimizer = offloading()
    kept = vars(optimizer).pop(name)
    with pytest.raises(RuntimeError, match=f"has no {name} .*install a tested one"):
        forward(optimizer)
    assert name not in vars(optimizer) and kept is not None
    if name == VIEWS:
        with pytest.raises(RuntimeError, match=f"has no {VIEWS} "):
            set_gradient_views(optimizer, {})
