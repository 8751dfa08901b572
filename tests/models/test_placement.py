"""On what processes run, and how long a name of the Hub may be."""

import pytest

from glm4v_patched.engine.gpus import Gpu, Gpus
from glm4v_patched.models import placement
from glm4v_patched.models.find import LONGEST_HUB_ID, fault_of_model
from glm4v_patched.models.placement import NoPlace, Placement, place


@pytest.mark.parametrize(
    ("gpus", "asked", "placed"),
    [
        (4, {"processes": None}, Placement(4)),
        (4, {"processes": 4}, Placement(4)),
        (4, {"processes": None, "zero_stage": 0}, Placement(1)),
        (0, {"processes": None, "device": "cpu"}, Placement(1, on_cpu=True)),
        (4, {"processes": 2, "device": "cpu"}, Placement(2, on_cpu=True)),
        (4, {"processes": 5}, "--processes"),
        (0, {"processes": None}, "--device"),
        (4, {"processes": 2, "zero_stage": 0}, "engine.zero_stage"),
    ],
)
def test_each_process_has_a_gpu_or_all_are_on_the_cpu(monkeypatch, gpus, asked, placed):
    found = Gpus((Gpu("a GPU", 80, (9, 0)),) * gpus, "" if gpus else "none is here")
    monkeypatch.setattr(placement, "find_gpus", lambda: found)
    if isinstance(placed, Placement):
        assert place(**asked) == placed
        return
    with pytest.raises(NoPlace) as refused:
        place(**asked)
    assert refused.value.field == placed


def test_ids_of_the_hub_have_a_length():
    longest = f"our-org/{'a' * (LONGEST_HUB_ID - len('our-org/'))}"
    assert fault_of_model(longest) is None
    assert "there is no such folder" in fault_of_model(longest + "a")
