"""Call an encoder of the model type `chatglm` before and after gptqmodel has prepared the model.

The encoder stands for code of a repository of 2026: its forward takes other arguments than that of
GLM-4. Expected is that it computes the same, and that GLM-4's own encoder is still replaced.
"""

import sys
from importlib.metadata import version
from types import SimpleNamespace

import torch
from gptqmodel.models.definitions.chatglm import ChatGLMQModel
from torch import nn


class Encoder(nn.Module):
    def forward(self, hidden_states, attention_mask=None, *, position_ids=None):
        return hidden_states + 1


class Glm4Encoder(nn.Module):  # the arguments of the published GLM-4
    def forward(
        self, hidden_states, attention_mask, rotary_pos_emb, kv_caches=None, use_cache=True,
        output_hidden_states=False,
    ):  # fmt: skip
        return hidden_states


def prepare(encoder: nn.Module) -> bool:
    """Prepare a model as `GPTQModel.load` does; return whether the encoder's forward is its own."""
    own = type(encoder).forward
    model = SimpleNamespace(transformer=SimpleNamespace(encoder=encoder))
    ChatGLMQModel.monkey_patch(SimpleNamespace(model=model, load_quantized_model=False))
    return type(encoder).forward is own


print("gptqmodel", version("gptqmodel"), "torch", torch.__version__)
assert not prepare(Glm4Encoder()), "GLM-4's encoder is not replaced any more"
encoder = Encoder()
prepare(encoder)
try:
    encoder(torch.zeros(1), position_ids=torch.zeros(1))
except TypeError as error:
    print(f"the encoder cannot be called: {error}")
    sys.exit(1)
print("the encoder is called with its own arguments")
