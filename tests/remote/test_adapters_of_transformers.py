"""Adapters that transformers loads by itself, where it wants a newer peft than there is."""

import pytest
import transformers.integrations.peft
from peft import LoraConfig, PeftModel, get_peft_model

from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.tiny import tiny_model


@pytest.fixture
def folders(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    config = LoraConfig(target_modules=["query_key_value"])
    base = GLM4VForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(base, config).save_pretrained(tmp_path / "adapters")
    return tmp_path / "base", tmp_path / "adapters"


def test_one_error_before_weights_are_read_and_what_works_meanwhile(folders, monkeypatch):
    base, adapters = folders
    monkeypatch.setattr(transformers.integrations.peft, "MIN_PEFT_VERSION", "99.0")
    monkeypatch.setattr(GLM4VForCausalLM, "__init__", None)  # called before weights are read
    with pytest.raises(ImportError, match=r"wants peft 99.0 or newer.*PeftModel.from_pretrained"):
        GLM4VForCausalLM.from_pretrained(adapters)
    monkeypatch.undo()
    monkeypatch.setattr(transformers.integrations.peft, "MIN_PEFT_VERSION", "99.0")
    model = GLM4VForCausalLM.from_pretrained(base)
    assert PeftModel.from_pretrained(model, adapters).peft_config["default"].r == 8
