"""OpenRLHF's plug-in, without OpenRLHF, which asks for a GPU."""

import torch
from transformers import AutoConfig, AutoModel

import glm4v_patched
from glm4v_patched.integrations import openrlhf
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import ChatGLMModel, GLM4VForCausalLM
from tests.helpers.tiny import text, tiny_model


def test_a_reward_model_begins_with_the_model_without_a_head(tmp_path):
    """As its get_llm_for_sequence_regression makes it; AutoModel loads what it loaded before."""
    tiny_model().save_pretrained(tmp_path)
    openrlhf.register()
    openrlhf.register()
    try:
        whole = AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
        config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
        base = AutoModel._model_mapping[type(config)]
    finally:
        AutoModel._model_mapping._extra_content.pop(ChatGLMConfig)
        glm4v_patched.revert()
    assert type(whole) is GLM4VForCausalLM and base is ChatGLMModel
    hidden = base(config).eval()(torch.tensor([text(9, seed=0)]))["last_hidden_state"]
    assert hidden.shape == (1, 9, config.hidden_size)
