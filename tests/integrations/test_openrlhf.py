"""OpenRLHF's plug-in, without OpenRLHF, which asks for a GPU."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

import glm4v_patched
from glm4v_patched.integrations import openrlhf
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import (
    ChatGLMForSequenceClassification,
    GLM4VForCausalLM,
)
from tests.helpers.tiny import text, tiny_model


@pytest.fixture
def registered():
    openrlhf.register()
    openrlhf.register()
    yield
    AutoModel._model_mapping._extra_content.pop(ChatGLMConfig)
    glm4v_patched.revert()


def test_a_reward_model_is_made_as_openrlhf_makes_it(registered, tmp_path):
    """As its get_llm_for_sequence_regression and _get_reward_model do."""
    tiny_model().save_pretrained(tmp_path / "model")
    config = AutoConfig.from_pretrained(tmp_path / "model", trust_remote_code=True)
    base = AutoModel._model_mapping[type(config)]

    class RewardModel(base.__base__):
        def __init__(self, config):
            super().__init__(config)
            setattr(self, self.base_model_prefix, base(config))
            self.score = nn.Linear(config.hidden_size, 1, bias=False)
            self.post_init()

        def forward(self, input_ids):
            positions = torch.arange(input_ids.shape[1])[None]
            mask = torch.ones_like(input_ids)
            outputs = getattr(self, self.base_model_prefix)(
                input_ids, attention_mask=mask, position_ids=positions
            )
            return self.score(outputs["last_hidden_state"]).squeeze(-1)[:, -1]

    model, report = RewardModel.from_pretrained(
        tmp_path / "model", config=config, output_loading_info=True
    )
    assert {*report["missing_keys"]} == {"score.weight"}
    ids = torch.tensor([text(9, seed=0)])
    score = model.eval()(ids)
    score.sum().backward()
    assert all(p.grad is not None for p in model.transformer.encoder.parameters())

    # What it saves is our sequence classifier, by its names.
    model.save_pretrained(tmp_path / "reward")
    judge = ChatGLMForSequenceClassification.from_pretrained(tmp_path / "reward", num_labels=1)
    torch.testing.assert_close(judge.eval()(ids).logits.squeeze(-1), score)


def test_automodel_loads_what_it_loaded_before(registered, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    assert type(AutoModel.from_pretrained(tmp_path, trust_remote_code=True)) is GLM4VForCausalLM
