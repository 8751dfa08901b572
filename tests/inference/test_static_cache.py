"""How a step of ``generate`` is compiled."""

import pytest
import torch

from glm4v_patched.inference.static_cache import compiling


@pytest.mark.parametrize("rows", [1, 8])
def test_this_torch_has_all_options(rows):
    options = compiling(rows, {"epilogue_fusion": False}).to_dict()["options"]
    assert options["triton.cudagraphs"] and not options["epilogue_fusion"]
    assert "coordinate_descent_tuning" not in options
    torch.compile(torch.sin, options=options)
    with pytest.raises(RuntimeError, match="no_such_option"):
        torch.compile(torch.sin, options=options | {"no_such_option": 1})
