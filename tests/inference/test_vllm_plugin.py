"""What the plug-in holds without vLLM: test_vllm_model.py has what needs it."""

import importlib.util
import pkgutil
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from glm4v_patched.inference import vllm_plugin
from glm4v_patched.inference.vllm_plugin import SharedPositions, register, shared_positions
from glm4v_patched.remote.image_checks import ImageFormat
from glm4v_patched.remote.image_layout import GivenRows, grow_rows
from glm4v_patched.terminal_text import own_command, pip_install
from tests.helpers.tiny import BOI, EOI, FILL, tiny_model

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


class FakeModel:
    hf_to_vllm_mapper = None

    def forward(
        self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **kwargs
    ): ...

    def get_mrope_input_positions(self, input_tokens, mm_features): ...

    def compute_logits(self, hidden_states): ...


class FakeVllm:
    """The modules of a vLLM that has what the plug-in wants."""

    def __init__(self) -> None:
        self.registered: dict[str, str] = {}
        self.hooks: dict[str, object] = {}
        registry = SimpleNamespace(register_model=self.registered.__setitem__)
        self.vllm = SimpleNamespace(__version__=vllm_plugin.NEWEST, ModelRegistry=registry)
        self.config = SimpleNamespace(MODELS_CONFIG_MAP=self.hooks)
        self.glm4v = SimpleNamespace(
            GLM4VForCausalLM=FakeModel,
            GLM4VProcessingInfo=SimpleNamespace(get_supported_mm_limits=lambda self: {}),
            GLM4VMultiModalProcessor=object,
            GLM4VDummyInputsBuilder=object,
        )
        processors = SimpleNamespace(register_processor=lambda processor, info, dummy_inputs: None)
        self.multimodal = SimpleNamespace(MULTIMODAL_REGISTRY=processors)
        mapper = SimpleNamespace(_map_name=lambda self, key: key)
        self.modules = {
            "vllm": self.vllm,
            "vllm.model_executor.models.config": self.config,
            "vllm.transformers_utils.config": SimpleNamespace(uses_mrope=lambda config: True),
            "vllm.model_executor.models.glm4v": self.glm4v,
            "vllm.model_executor.models.utils": SimpleNamespace(WeightsMapper=mapper),
            "vllm.multimodal": self.multimodal,
        }


@pytest.fixture
def fake(monkeypatch) -> FakeVllm:
    fake = FakeVllm()
    for name, module in fake.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake


@pytest.fixture
def logged(caplog):
    vllm_plugin.logger.addHandler(caplog.handler)
    yield caplog
    vllm_plugin.logger.removeHandler(caplog.handler)


def settings(**fields) -> SimpleNamespace:
    """vLLM's settings of a model."""
    config = SimpleNamespace(kv_channels=128, **fields)
    return SimpleNamespace(hf_config=config, uses_mrope=True)


@pytest.mark.parametrize("inner", [2, 1600])
@pytest.mark.parametrize("parts", ["7", "i i 7", "7 8 i 9 9 9 i 5 6 7"])
def test_positions_are_those_of_the_model(parts, inner):
    row, images = [], []
    for part in parts.split():
        ids = [BOI, *[FILL] * inner, EOI] if part == "i" else [int(part)]
        images += [(len(row), len(ids))] if part == "i" else []
        row += ids
    form = ImageFormat(BOI, EOI, num_image_tokens=inner, vocab_size=512, max_positions=8192)
    grown = grow_rows(GivenRows(torch.tensor([row])), form, num_images=len(images))
    assert grown.input_ids[0].tolist() == row
    assert shared_positions(len(row), images).tolist() == grown.position_ids[0].tolist()


def test_the_entry_point_and_the_model_that_it_names_are_there():
    [(name, place)] = PROJECT["entry-points"]["vllm.general_plugins"].items()
    assert name == "glm4v_patched" and pkgutil.resolve_name(place) is register
    module, _, name = vllm_plugin.MODEL.partition(":")
    assert f"class {name}(" in Path(importlib.util.find_spec(module).origin).read_text()
    # The extra asks for what was tested.
    oldest, newest = [part.split(".") for part in (vllm_plugin.OLDEST, vllm_plugin.NEWEST)]
    above = f"{newest[0]}.{int(newest[1]) + 1}"
    assert PROJECT["optional-dependencies"]["vllm"] == [f"vllm>={'.'.join(oldest[:2])},<{above}"]


def test_it_is_imported_without_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    again = importlib.util.spec_from_file_location(
        "glm4v_patched.inference.vllm_plugin_again", vllm_plugin.__file__
    )
    module = importlib.util.module_from_spec(again)
    again.loader.exec_module(module)
    with pytest.raises(RuntimeError, match=r"vllm is not installed: .*install.*\[vllm\]"):
        module.register()


def test_a_vllm_that_has_moved_serves_other_models_and_no_glm4v(fake, logged, words):
    fake.hooks["Qwen3ForCausalLM"] = other = object()
    register()
    register()
    assert fake.hooks == {"Qwen3ForCausalLM": other, "GLM4VForCausalLM": SharedPositions}
    registry = fake.vllm.__dict__.pop("ModelRegistry")
    register()
    assert "other positions than it has" in logged.text and "ModelRegistry" in logged.text
    fake.vllm.ModelRegistry = registry
    del fake.config.MODELS_CONFIG_MAP
    register()
    assert fake.registered == {"GLM4VForCausalLM": vllm_plugin.MODEL}
    with words.refused(RuntimeError, "models.config.MODELS_CONFIG_MAP", pip=pip_install()):
        vllm_plugin.check_vllm()
    fake.config.MODELS_CONFIG_MAP = others = {"GLM4VForCausalLM": dict}  # of somebody else
    register()
    assert others == {"GLM4VForCausalLM": dict}
    with pytest.raises(RuntimeError, match="MODELS_CONFIG_MAP has <class 'dict'>"):
        vllm_plugin.check_vllm()


def test_names_that_have_moved_are_all_said_with_version_and_cure(fake, words):
    register()
    vllm_plugin.check_vllm()
    del fake.glm4v.GLM4VProcessingInfo, fake.multimodal.MULTIMODAL_REGISTRY
    fake.glm4v.GLM4VForCausalLM = type("Moved", (FakeModel,), {"compute_logits": lambda grid: 0})
    moved = ("GLM4VProcessingInfo", "MULTIMODAL_REGISTRY", "takes ('grid',)", vllm_plugin.NEWEST)
    with words.refused(RuntimeError, *moved, pip=pip_install()):
        vllm_plugin.check_vllm()


def test_an_older_vllm_is_refused_and_a_newer_one_that_fits_taken_with_a_word(fake, logged):
    for version, is_said in (("0.33.0+cpu", False), ("0.33.1", True)):
        fake.vllm.__version__ = version
        register()
        vllm_plugin.check_vllm()
        assert ("tested with vLLM up to 0.33.0" in logged.text) == is_said
    fake.vllm.__version__ = "0.25.1"
    register()
    with pytest.raises(RuntimeError, match="in vLLM 0.25.1: tests run with"):
        SharedPositions.verify_and_update_model_config(settings())


def test_vllm_will_ask_the_model_for_positions(fake):
    register()
    for kept in (None, {"a": 1}):
        model = settings(rope_parameters=kept)
        SharedPositions.verify_and_update_model_config(model)
        wanted = {"rope_type": "default", "mrope_section": [32, 0, 0]}
        assert model.hf_config.rope_parameters == (kept or {}) | wanted
    model.uses_mrope = False
    with pytest.raises(RuntimeError, match="uses_mrope stays False"):
        SharedPositions.verify_and_update_model_config(model)


def test_adapters_on_the_tower_are_refused(words):
    for lora in (None, SimpleNamespace(enable_tower_connector_lora=False)):
        SharedPositions.verify_and_update_config(SimpleNamespace(lora_config=lora))
    asked = SimpleNamespace(lora_config=SimpleNamespace(enable_tower_connector_lora=True))
    with words.refused(ValueError, "--enable-tower-connector-lora", program=own_command()):
        SharedPositions.verify_and_update_config(asked)


def test_it_draws_no_id_that_our_model_does_not():
    for fill in (None, 7):
        model = tiny_model(image_token_id=fill)
        assert vllm_plugin.never_drawn(model.config) == model._image_ids()
        published = vars(model.config) | {}
        published.pop("image_token_id")
        assert vllm_plugin.never_drawn(SimpleNamespace(**published)) == model._image_ids()[:2]
