"""Which weights are gathered in place; tests/distributed/test_gathering.py gathers them."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus

from glm4v_patched.engine.deepspeed import gather as gathering
from glm4v_patched.engine.deepspeed.internals import Replacements


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


@pytest.fixture(autouse=True)
def processes(monkeypatch):
    sizes = {"all": 2, "one": 1}
    monkeypatch.setattr(torch.distributed, "get_world_size", sizes.__getitem__)


@pytest.mark.parametrize(
    "changes",
    [
        {"ds_status": ZeroParamStatus.INFLIGHT},
        {"ds_status": ZeroParamStatus.AVAILABLE},
        {"ds_secondary_tensor": "of hpZ"},
        {"ds_process_group": "others"},
        {"ds_tensor": SimpleNamespace(device="cpu", dtype=torch.bfloat16)},
        {"ds_tensor": SimpleNamespace(device="gpu", dtype=torch.int8)},
        {"ds_tensor": SimpleNamespace(device="gpu", dtype=torch.float32), "dtype": torch.float32},
        {"comm": "of MiCS"},
        {"comm_dtype": torch.bfloat16},
    ],
)
def test_weights_sharded_alike_are_gathered_in_place_and_others_left_to_deepspeed(changes):
    assert gathering._are_plain([sharded(), sharded()])
    assert not gathering._are_plain([sharded(), sharded(**changes)])


def test_one_process_and_no_weight_are_left_to_deepspeed():
    assert not gathering._are_plain([sharded(ds_process_group="one")])
    assert not gathering._are_plain([])


@pytest.mark.parametrize("options", [{"quantize": True}, {"safe_mode": True}])
def test_what_deepspeed_is_asked_for_beside_is_left_to_it(options):
    asked = []
    gather = gathering._in_place(lambda weights, **given: asked.append((weights, given)))
    weights = [sharded(ds_id=1), sharded()]
    gather(weights, **options)
    assert asked == [(weights[::-1], {"quantize": False} | options)]


def test_a_torch_without_the_manager_of_one_launch_is_told(monkeypatch):
    monkeypatch.delattr(gathering.distributed_c10d, "_coalescing_manager")
    with pytest.raises(RuntimeError, match=r"torch .* has no .*_coalescing_manager.*install"):
        gathering.gather_in_place(torch.nn.Linear(1, 1), Replacements())


@pytest.mark.parametrize(
    "installed, gathers", [("0.19.7", [[1], [2], [3]]), ("0.19.8", [[1, 2, 3]])]
)
def test_an_old_deepspeed_gathers_one_weight_at_a_time_when_it_loads(
    installed, gathers, monkeypatch
):
    name, seen = "_allgather_params_coalesced", []
    monkeypatch.setattr(gathering, "version", lambda package: installed)
    monkeypatch.setattr(Init, name, lambda self, weights, hierarchy: seen.append(weights))
    gathering.wait_for_every_gather.__wrapped__()
    Init._allgather_params_coalesced(None, [1, 2, 3], 0)
    assert seen == gathers
    monkeypatch.undo()
    monkeypatch.setattr(gathering, "version", lambda package: "0.19.7")
    monkeypatch.delattr(Init, name)
    with pytest.raises(RuntimeError, match=f"has no {name} .*install a tested"):
        gathering.wait_for_every_gather.__wrapped__()
