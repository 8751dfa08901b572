"""LLaMA-Factory's own checkpointing functions, taken from the package, on both towers.

Before 0.9.3 they ask the function they are given for its ``__self__``; from 0.9.3 on, a partial for
its function's. Which of the two is tested depends on the version that is installed.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from glm4v_patched.remote.checkpointing import CheckpointedLayer
from tests.helpers.tiny import grown_image, padded, pictures, text, tiny_model

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("llamafactory") is None,
        reason="LLaMA-Factory is not installed: nox -f tests/noxfile.py -s frameworks",
    ),
    pytest.mark.filterwarnings("ignore:.torch.cuda.amp.custom_:FutureWarning"),
]

# The packages on the way to the module. Their __init__ files import all of LLaMA-Factory, which
# wants older versions of its dependencies; the module itself runs with any.
PACKAGES = ["llamafactory", "llamafactory.model", "llamafactory.model.model_utils"]


@pytest.fixture(scope="module")
def llamafactory():
    """The module ``llamafactory.model.model_utils.checkpointing``."""
    root = Path(importlib.util.find_spec("llamafactory").origin).parents[1]
    with pytest.MonkeyPatch.context() as patch:
        for name in PACKAGES:
            package = ModuleType(name)
            package.__path__ = [str(root.joinpath(*name.split(".")))]
            patch.setitem(sys.modules, name, package)
        yield importlib.import_module(f"{PACKAGES[-1]}.checkpointing")
    for name in [name for name in sys.modules if name.startswith("llamafactory.")]:
        del sys.modules[name]


@pytest.fixture
def cuda_is_the_cpu(monkeypatch):
    """The Unsloth mode brings hidden states back "to cuda", wherever the model is."""
    original = torch.Tensor.to

    def to(tensor, *target, **options):
        return original(tensor, *("cpu" if part == "cuda" else part for part in target), **options)

    monkeypatch.setattr(torch.Tensor, "to", to)


def knows_partials() -> bool:
    version = importlib.metadata.version("llamafactory")
    return tuple(int(part) for part in version.split(".")[:3]) >= (0, 9, 3)


def hands_over_a_bound_method() -> bool:
    """True if transformers' own layer passes a partial of ``__call__``, not of a function."""
    return "__call__" in vars(GradientCheckpointingLayer)


class LayerOfTransformers(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden):
        return self.linear(hidden)


class LayerOfOurs(CheckpointedLayer):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def layer_forward(self, hidden):
        return self.linear(hidden)


def run_wrapped(layer: nn.Module, llamafactory) -> None:
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = llamafactory.get_custom_gradient_checkpointing_func(
        lambda function, *inputs: checkpoint(function, *inputs, use_reentrant=False)
    )
    layer.train()(torch.randn(2, 4)).sum().backward()


def test_the_layer_of_transformers_fails_where_llamafactory_finds_no_module(llamafactory):
    """The reported failure, and where it ends: the reason for a layer of our own."""
    if knows_partials() and hands_over_a_bound_method():
        run_wrapped(LayerOfTransformers(), llamafactory)
        return
    asked = "function" if knows_partials() else "functools.partial"
    with pytest.raises(AttributeError, match=f"'{asked}' object has no attribute '__self__'"):
        run_wrapped(LayerOfTransformers(), llamafactory)


def test_our_layer_is_found_by_every_version(llamafactory):
    layer = LayerOfOurs()
    run_wrapped(layer, llamafactory)
    assert layer.linear.weight.grad is not None


def batch() -> dict[str, torch.Tensor]:
    rows = [[*text(3, seed=1), *grown_image(), *text(6, seed=2)], text(7, seed=3)]
    inputs = padded(rows, "left")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return inputs | {"pixel_values": pictures(1), "labels": labels}


def built(weights: str, prepare: Callable = lambda model: None) -> nn.Module:
    """A model of LLaMA-Factory's making: it prepares the loaded model, then adds adapters."""
    model = tiny_model().train()
    model.transformer.vision.requires_grad_(weights != "frozen vision")
    prepare(model)
    if weights == "adapters":
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["query_key_value"], init_lora_weights=False)
        model = get_peft_model(model, config)
    return model.train()


def gradients(model) -> dict[str, torch.Tensor]:
    loss = model(**batch()).loss
    loss.backward()
    got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return got | {"loss": loss.detach()}


def count_runs(model, monkeypatch) -> dict[str, int]:
    runs = {}
    for name, layer in model.named_modules():
        if isinstance(layer, CheckpointedLayer):
            runs[name] = 0

            def counted(*inputs, name=name, original=layer.layer_forward):
                runs[name] += 1
                return original(*inputs)

            monkeypatch.setattr(layer, "layer_forward", counted)
    return runs


@pytest.mark.parametrize("weights", ["all", "frozen vision", "adapters"])
@pytest.mark.parametrize("mode", ["custom reentrant", "custom non-reentrant", "unsloth"])
def test_gradients_equal_plain_ones_and_layers_are_recomputed(
    mode, weights, llamafactory, monkeypatch, cuda_is_the_cpu
):
    if mode == "unsloth" and not knows_partials():
        pytest.skip(
            "before 0.9.3 the Unsloth mode takes only layers that return a tuple, which those of "
            "transformers do not either since 4.57: pip install 'llamafactory>=0.9.3'"
        )
    settings = SimpleNamespace(
        upcast_layernorm=False,
        upcast_lmhead_output=False,
        disable_gradient_checkpointing=False,
        use_unsloth_gc=mode == "unsloth",
        use_reentrant_gc=mode == "custom reentrant",
    )
    want = gradients(built(weights))
    model = built(weights, lambda model: llamafactory.prepare_model_for_training(model, settings))
    runs = count_runs(model, monkeypatch)
    got = gradients(model)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert torch.equal(got[name], gradient), name
    assert len(runs) == 4
    for name, number in runs.items():
        is_frozen = weights == "frozen vision" and "vision" in name
        assert number == (1 if is_frozen else 2), name
