"""Which weights are trained, and what is said of adapters in peft's words."""

import re

import pytest
from safetensors.torch import load_file, save_file

from glm4v_patched.engine.options import LoraOptions
from glm4v_patched.engine.trainable import continue_adapters, select_weights
from tests.helpers.tiny import tiny_model


@pytest.mark.parametrize(
    ("trained", "inside", "outside"),
    [
        ("full", "vision", None),
        ("lm", "encoder", "vision"),
        ("lora_lm", "encoder", "vision"),
        ("lora_all", "vision", None),
    ],
)
def test_what_is_trained(trained, inside, outside):
    model = select_weights(tiny_model(), trained)
    learned = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any(inside in name for name in learned)
    assert not any(outside and outside in name for name in learned)
    assert all("lora_" in name for name in learned) == trained.startswith("lora")


@pytest.mark.parametrize("trained", ["all", "tower+towr", "tower+tower", ""])
def test_an_unknown_choice_of_weights_is_refused(trained):
    with pytest.raises(
        ValueError, match=re.escape(f"{trained!r}; expected one of full, lm, lora_lm")
    ):
        select_weights(tiny_model(), trained)


@pytest.mark.parametrize(
    ("said", "alpha"), [({}, 6), ({"alpha": 5}, 5), ({"dropout": 0.25, "use_rslora": True}, 6)]
)
def test_what_is_said_of_lora_reaches_peft(said, alpha):
    model = select_weights(tiny_model(), "lora_lm", LoraOptions(rank=3, **said))
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha) == (3, alpha)
    assert config.lora_dropout == said.get("dropout", 0)
    assert config.use_rslora is said.get("use_rslora", False) and not config.use_dora


@pytest.mark.parametrize("change", ["more", "fewer"])
def test_adapters_that_do_not_fit_their_config_are_refused(tmp_path, change):
    """peft would warn, and leave what it does not find as new adapters begin."""
    select_weights(tiny_model(), "lora_lm").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = next(iter(tensors))
    if change == "more":
        tensors[name.replace("lora", "lara")] = tensors[name].clone()
    else:
        del tensors[name]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    told = f"holds {len(tensors)} tensors, of which 1 do not fit its adapter_config.json"
    with pytest.raises(ValueError, match=told):
        continue_adapters(tiny_model(), tmp_path)
