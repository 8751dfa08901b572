"""OpenRLHF's plug-in, without OpenRLHF, which asks for a GPU."""

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


def test_a_reward_model_is_made_as_openrlhf_makes_it(tmp_path):
    """As its get_llm_for_sequence_regression and _get_reward_model do."""
    openrlhf.register()
    openrlhf.register()
    try:
        model, reward = tmp_path / "model", tmp_path / "reward"
        tiny_model().save_pretrained(model)
        # AutoModel loads what it loaded before.
        assert type(AutoModel.from_pretrained(model, trust_remote_code=True)) is GLM4VForCausalLM
        config = AutoConfig.from_pretrained(model, trust_remote_code=True)
        base = AutoModel._model_mapping[type(config)]
    finally:
        AutoModel._model_mapping._extra_content.pop(ChatGLMConfig)
        glm4v_patched.revert()

    class RewardModel(base.__base__):
        def __init__(self, config):
            super().__init__(config)
            setattr(self, self.base_model_prefix, base(config))
            self.score = nn.Linear(config.hidden_size, 1, bias=False)
            self.post_init()

        def forward(self, input_ids):
            positions = torch.arange(input_ids.shape[1])[None]
            inputs = {"attention_mask": torch.ones_like(input_ids), "position_ids": positions}
            outputs = getattr(self, self.base_model_prefix)(input_ids, **inputs)
            return self.score(outputs["last_hidden_state"]).squeeze(-1)[:, -1]

    made, report = RewardModel.from_pretrained(model, config=config, output_loading_info=True)
    assert {*report["missing_keys"]} == {"score.weight"}
    ids = torch.tensor([text(9, seed=0)])
    score = made.eval()(ids)
    score.sum().backward()
    assert all(p.grad is not None for p in made.transformer.encoder.parameters())
    # What it saves is our sequence classifier, by its names.
    made.save_pretrained(reward)
    judge = ChatGLMForSequenceClassification.from_pretrained(reward, num_labels=1).eval()
    torch.testing.assert_close(judge(ids).logits.squeeze(-1), score)
