"""Changes to ZeRO-3: gathers in place, the device of gradients, the gradient norm.

In tests/distributed, processes train with them (test_gathering.py, test_recipe_choices.py).
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
    """Run forward twice, with a model whose weights refer to this optimizer."""
    model = nn.Linear(2, 2, device=device)
    for parameter in model.parameters():
        parameter._z3_optimizer = optimizer
    zero3.adapt_zero3(model, options)
    for _ in range(2):
        model(torch.ones(2, device=device))


def make_offloading_optimizer() -> SimpleNamespace:
    """Stand-in for ZeRO-3's optimizer with gradients of three weights, the last one padded."""
    buffer = torch.ones(10, dtype=torch.bfloat16)
    views = {7: buffer.narrow(0, 0, 4), 3: buffer.narrow(0, 4, 1), 5: buffer.narrow(0, 5, 3)}
    return SimpleNamespace(**{BUFFER: buffer, VIEWS: views}, get_grad_norm_direct=None)


def test_gradients_are_on_the_device_of_the_weights():
    optimizer = make_offloading_optimizer()
    forward_twice(optimizer, OFFLOADING, device="meta")  # which stands for the GPU
    buffer, views = getattr(optimizer, BUFFER), getattr(optimizer, VIEWS)
    assert (buffer.device.type, buffer.dtype, buffer.shape) == ("meta", torch.bfloat16, (10,))
    layout = {name: (view.storage_offset(), view.numel()) for name, view in views.items()}
    assert layout == {7: (0, 4), 3: (4, 1), 5: (5, 3)}
    assert all(view._base is buffer for view in views.values())


class FakeOptimizer:
    """Stand-in for ZeRO-3's optimizer that records the arguments of its norm in ``calls``."""

    def __init__(self):
        self.calls = []

    def get_grad_norm_direct(self, gradients, parameters, norm_type=2):
        self.calls.append((gradients, parameters, norm_type))
        total = torch.stack([gradient.double().norm(norm_type) for gradient in gradients]).norm(
            norm_type
        )
        return total if total.isfinite() else torch.tensor(-1.0)  # as DeepSpeed does


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).bfloat16() for size in (7, 1_000_000, 1)]


def test_deepspeed_gets_the_norm_of_all_gradients_as_one_number():
    optimizer, names = FakeOptimizer(), ["a", "b", "c"]
    forward_twice(optimizer, IN_PLACE)
    norm = optimizer.get_grad_norm_direct(gradients(), names)
    exact = torch.cat(gradients()).double().norm()
    assert norm.item() == pytest.approx(exact.item(), rel=1e-12)
    ([number], parameters, norm_type) = optimizer.calls.pop()
    assert number.numel() == 1 and parameters == ["a"] and norm_type == 2
    for value in (math.inf, math.nan):  # DeepSpeed's -1, squared, would be 1
        broken = gradients()
        broken[1][5] = value
        assert optimizer.get_grad_norm_direct(broken, names).item() == math.inf
        ([number], _, _) = optimizer.calls.pop()
        assert not number.isfinite()
    unchanged = gradients()
    optimizer.get_grad_norm_direct(unchanged, names, norm_type=math.inf)
    assert optimizer.calls.pop() == (unchanged, names, math.inf)
    with pytest.raises(RuntimeError, match="has no _z3_optimizer .*; install a tested one: "):
        forward_twice(None, IN_PLACE)


def sharded(**changes) -> SimpleNamespace:
    """Return a bf16 weight sharded over two processes, on a device that does not exist here."""
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
def test_uniformly_sharded_weights_are_gathered_in_place_and_others_by_deepspeed(
    changes, monkeypatch
):
    sizes = {"all": 2, "one": 1}
    monkeypatch.setattr(torch.distributed, "get_world_size", sizes.__getitem__)
    assert zero3._are_uniformly_sharded([sharded(), sharded()])
    for others in ([], [sharded(ds_process_group="one")], [sharded(), sharded(**changes)]):
        assert not zero3._are_uniformly_sharded(others)


def test_gathers_with_other_options_are_left_to_deepspeed(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    calls, weights = [], [sharded(ds_id=1), sharded()]
    gather = zero3.gather_in_place(lambda weights, **kwargs: calls.append((weights, kwargs)))
    for options in ({"quantize": True}, {"safe_mode": True}):
        gather(weights, **options)
        assert calls.pop() == (weights[::-1], {"quantize": False} | options)
    monkeypatch.setattr(zero3, "COALESCED_GATHER", "renamed")
    with pytest.raises(RuntimeError, match=r"torch .* has no .*ProcessGroup.renamed.*install"):
        zero3.adapt_zero3(nn.Linear(1, 1), EngineOptions(compile=True))


def test_a_missing_attribute_of_a_weight_is_reported_before_the_first_gather():
    model = tiny_model(num_layers=1)
    for weight in model.parameters():
        as_sharded(weight)
    del weight.ds_shape
    zero3.adapt_zero3(model, EngineOptions(compile=True))
    with pytest.raises(RuntimeError, match="has no ds_shape .*install a tested one"):
        model(torch.ones(1, 3, dtype=torch.long))


def test_the_number_of_layers_in_flight_is_limited_on_a_gpu(monkeypatch):
    limits = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        zero3, "limit_layers_in_flight", lambda model, layers: limits.append(layers)
    )
    zero3.adapt_zero3(nn.Linear(1, 1), IN_PLACE)
    assert limits == [zero3.MAX_LAYERS_IN_FLIGHT]


@pytest.mark.parametrize(
    "installed, gathers", [("0.19.7", [[1], [2], [3]]), ("0.19.8", [[1, 2, 3]])]
)
def test_an_old_deepspeed_loads_one_weight_at_a_time(installed, gathers, monkeypatch):
    name, seen = "_allgather_params_coalesced", []
    monkeypatch.setattr(zero3, "version", lambda package: installed)
    monkeypatch.setattr(Init, name, lambda self, weights, hierarchy: seen.append(weights))
    zero3.serialize_gloo_gathers.__wrapped__()
    Init._allgather_params_coalesced(None, [1, 2, 3], 0)
    assert seen == gathers
