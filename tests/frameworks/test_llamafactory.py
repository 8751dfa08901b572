"""LLaMA-Factory's own checkpointing functions, taken from the package, on both towers. Before 0.9.3
they ask the function they are given for its ``__self__``; later, a partial for its function's."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.helpers.steps import count_runs
from tests.helpers.tiny import tiny_model
from tests.remote.inputs import assert_close, gradients, two_sequences

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llamafactory") is None,
    reason="LLaMA-Factory is not installed: nox -f tests/noxfile.py -s frameworks",
)
# The packages on the way to the module. Their __init__ files import all of LLaMA-Factory, which
# wants older versions of its dependencies; the module itself runs with any.
PACKAGES = ["llamafactory", "llamafactory.model", "llamafactory.model.model_utils"]


@pytest.fixture(scope="module")
def llamafactory():
    root = Path(importlib.util.find_spec("llamafactory").origin).parents[1]
    with pytest.MonkeyPatch.context() as patch:
        for name in PACKAGES:
            package = ModuleType(name)
            package.__path__ = [str(root.joinpath(*name.split(".")))]
            patch.setitem(sys.modules, name, package)
        yield importlib.import_module(f"{PACKAGES[-1]}.checkpointing")
    for name in [name for name in sys.modules if name.startswith("llamafactory.")]:
        del sys.modules[name]


def trained(weights: str, prepare=None) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Gradients, and how often each layer ran. LLaMA-Factory prepares the loaded model, then adds
    adapters."""
    model = tiny_model()
    model.transformer.vision.requires_grad_(weights != "frozen vision")
    if prepare:
        prepare(model)
    if weights == "adapters":
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["query_key_value"], init_lora_weights=False)
        model = get_peft_model(model, config)
    runs = count_runs(model)
    return gradients(model.train(), **two_sequences()), runs


@pytest.mark.parametrize("weights", ["all", "frozen vision", "adapters"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_equal_plain_ones_and_layers_are_recomputed(reentrant, weights, llamafactory):
    off = ("upcast_layernorm", "upcast_lmhead_output", "disable_gradient_checkpointing")
    settings = SimpleNamespace(
        **dict.fromkeys(off, False), use_unsloth_gc=False, use_reentrant_gc=reentrant
    )
    expected, _ = trained(weights)
    grads, runs = trained(
        weights, lambda model: llamafactory.prepare_model_for_training(model, settings)
    )
    assert_close(grads, expected)
    assert len(runs) == 4
    for name, number in runs.items():
        assert number == (1 if weights == "frozen vision" and "vision" in name else 2), name
