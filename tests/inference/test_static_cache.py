"""How a step of ``generate`` is compiled."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from glm4v_patched.inference.decoding.small_batch_matmul import ProductsOfFewRows
from glm4v_patched.inference.decoding.static_cache import StaticCaches, compiling
from tests.helpers.tiny import tiny_model

REDUCTIONS = {"coordinate_descent_tuning", "realize_opcount_threshold", "max_autotune_pointwise"}


def test_this_torch_has_all_options():
    for rows, own_products in ((1, True), (8, True), (1, False)):
        changes = {"epilogue_fusion": False}
        options = compiling(rows, changes, own_products=own_products).to_dict()["options"]
        assert options["triton.cudagraphs"] and not options["epilogue_fusion"]
        torch.compile(torch.sin, options=options)
    with pytest.raises(RuntimeError, match="no_such_option"):
        torch.compile(torch.sin, options=options | {"no_such_option": 1})


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_row_of_other_weights_has_inductors_reductions(monkeypatch, rows, dtype):
    model = nn.Linear(8, 8).to(dtype)
    model.device = SimpleNamespace(type="cuda")
    caches = StaticCaches(model, 64)
    monkeypatch.setattr(caches, "of", lambda *asked: None)
    options = caches.options(rows, 64)["compile_config"].options
    wanted = REDUCTIONS if rows == 1 and dtype == torch.float32 else set()
    assert REDUCTIONS & options.keys() == wanted
    assert options["post_grad_custom_pre_pass"] == ProductsOfFewRows()


def test_a_cache_is_used_again_as_long_as_it_has_room():
    caches = StaticCaches(tiny_model(), 64)
    first = caches.of(1, 64)
    assert caches.of(1, 64) is first is not caches.of(2, 64)
    larger = caches.of(1, 65)
    assert first is not larger is caches.of(1, 128) is not caches.of(1, 129)
