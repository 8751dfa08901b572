"""What ZeRO-3 gathers in place, where its gradients wait, and their norm, without copies.

tests/distributed has processes that train so (test_gathering.py, test_recipe_choices.py).
"""

import math
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus
from torch import nn

from glm4v_patched.engine.deepspeed import zero3
from glm4v_patched.engine.deepspeed.internals import GRADIENT_BUFFER as BUFFER
from glm4v_patched.engine.deepspeed.internals import GRADIENT_VIEWS as VIEWS
from glm4v_patched.engine.options import EngineOptions
from tests.helpers.sharded import as_sharded
from tests.helpers.tiny import tiny_model

IN_PLACE = EngineOptions(offload=False, compile=False)
OFFLOADING = EngineOptions(offload=True, compile=False)


def forward_twice(optimizer, options: EngineOptions, device: str = "cpu") -> None:
    """Of a model whose weights know this optimizer."""
    model = nn.Linear(2, 2, device=device)
    for parameter in model.parameters():
        parameter._z3_optimizer = optimizer
    zero3.adapt_zero3(model, options)
    for _ in range(2):
        model(torch.ones(2, device=device))


def offloading() -> SimpleNamespace:
    """In the place of ZeRO-3's optimizer; shares of three weights, the last one padded."""
    buffer = torch.ones(10, dtype=torch.bfloat16)
    views = {7: buffer.narrow(0, 0, 4), 3: buffer.narrow(0, 4, 1), 5: buffer.narrow(0, 5, 3)}
    return SimpleNamespace(**{BUFFER: buffer, VIEWS: views}, get_grad_norm_direct=None)


def test_gradients_are_where_the_weights_are():
    optimizer = offloading()
    forward_twice(optimizer, OFFLOADING, device="meta")  # which stands for the GPU
    buffer, views = getattr(optimizer, BUFFER), getattr(optimizer, VIEWS)
    assert (buffer.device.type, buffer.dtype, buffer.shape) == ("meta", torch.bfloat16, (10,))
    placed = {name: (view.storage_offset(), view.numel()) for name, view in views.items()}
    assert placed == {7: (0, 4), 3: (4, 1), 5: (5, 3)}
    assert all(view._base is buffer for view in views.values())


class Zero:
    """In the place of ZeRO-3's optimizer; ``asked`` is what its norm was asked for."""

    def __init__(self):
        self.asked = []

    def get_grad_norm_direct(self, gradients, parameters, norm_type=2):
        self.asked.append((gradients, parameters, norm_type))
        total = torch.stack([part.double().norm(norm_type) for part in gradients]).norm(norm_type)
        return total if total.isfinite() else torch.tensor(-1.0)  # as DeepSpeed says that


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).bfloat16() for size in (7, 1_000_000, 1)]


def test_the_norm_of_all_gradients_is_one_number_for_deepspeed():
    zero, names = Zero(), ["a", "b", "c"]
    forward_twice(zero, IN_PLACE)
    norm = zero.get_grad_norm_direct(gradients(), names)
    exact = torch.cat(gradients()).double().norm()
    assert norm.item() == pytest.approx(exact.item(), rel=1e-12)
    ([number], parameters, norm_type) = zero.asked.pop()
    assert number.numel() == 1 and parameters == ["a"] and norm_type == 2
    for value in (math.inf, math.nan):  # DeepSpeed's -1, squared, would be 1
        broken = gradients()
        broken[1][5] = value
        assert zero.get_grad_norm_direct(broken, names).item() == math.inf
        ([number], _, _) = zero.asked.pop()
        assert not number.isfinite()
    given = gradients()
    zero.get_grad_norm_direct(given, names, norm_type=math.inf)
    assert zero.asked.pop() == (given, names, math.inf)
    with pytest.raises(RuntimeError, match="has no _z3_optimizer .*; install a tested one: "):
        forward_twice(None, IN_PLACE)


def sharded(**changes) -> SimpleNamespace:
    """A bf16 weight of which this process, of two, holds a half; on no device that exists here."""
    weight = {
        "ds_id": 0,
        "ds_status": ZeroParamStatus.NOT_AVAILABLE,
        "ds_secondary_tensor": None,
        "ds_process_group": "all",
        "ds_tensor": SimpleNamespace(device="gpu", dtype=torch.bfloat16),
        "device": "gpu",
        "dtype": torch.bfloat16,
    }
    return SimpleNamespace(**(weight | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"ds_status": ZeroParamStatus.AVAILABLE},
        {"ds_secondary_tensor": "of hpZ"},
        {"ds_process_group": "others"},
        {"ds_tensor": SimpleNamespace(device="cpu", dtype=torch.bfloat16)},
        {"ds_tensor": SimpleNamespace(device="gpu", dtype=torch.float32), "dtype": torch.float32},
        {"comm": "of MiCS"},
        {"comm_dtype": torch.bfloat16},
    ],
)
def test_weights_sharded_alike_are_gathered_in_place_and_others_left_to_deepspeed(
    changes, monkeypatch
):
    sizes = {"all": 2, "one": 1}
    monkeypatch.setattr(torch.distributed, "get_world_size", sizes.__getitem__)
    assert zero3._are_plain([sharded(), sharded()])
    for others in ([], [sharded(ds_process_group="one")], [sharded(), sharded(**changes)]):
        assert not zero3._are_plain(others)


def test_what_deepspeed_is_asked_for_beside_is_left_to_it(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    asked, weights = [], [sharded(ds_id=1), sharded()]
    gather = zero3.gather_in_place(lambda weights, **given: asked.append((weights, given)))
    for options in ({"quantize": True}, {"safe_mode": True}):
        gather(weights, **options)
        assert asked.pop() == (weights[::-1], {"quantize": False} | options)
    monkeypatch.setattr(zero3, "GATHERS_AT_ONCE", "renamed")
    with pytest.raises(RuntimeError, match=r"torch .* has no .*ProcessGroup.renamed.*install"):
        zero3.adapt_zero3(nn.Linear(1, 1), EngineOptions(compile=True))


def test_a_renamed_name_of_a_weight_is_told_before_one_is_gathered():
    model = tiny_model(num_layers=1)
    for weight in model.parameters():
        as_sharded(weight)
    del weight.ds_shape
    zero3.adapt_zero3(model, EngineOptions(compile=True))
    with pytest.raises(RuntimeError, match="has no ds_shape .*install a tested one"):
        model(torch.ones(1, 3, dtype=torch.long))


def test_the_cpu_waits_for_a_gpu_that_is_so_many_layers_behind(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(zero3, "limit_layers_in_flight", lambda model, layers: waits.append(layers))
    zero3.adapt_zero3(nn.Linear(1, 1), IN_PLACE)
    assert waits == [zero3.MAX_LAYERS_IN_FLIGHT]


@pytest.mark.parametrize(
    "installed, gathers", [("0.19.7", [[1], [2], [3]]), ("0.19.8", [[1, 2, 3]])]
)
def test_an_old_deepspeed_gathers_one_weight_at_a_time_when_it_loads(
    installed, gathers, monkeypatch
):
    name, seen = "_allgather_params_coalesced", []
    monkeypatch.setattr(zero3, "version", lambda package: installed)
    monkeypatch.setattr(Init, name, lambda self, weights, hierarchy: seen.append(weights))
    zero3.serialize_gloo_gathers.__wrapped__()
    Init._allgather_params_coalesced(None, [1, 2, 3], 0)
    assert seen == gathers
