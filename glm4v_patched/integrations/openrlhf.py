"""Register glm-4v with OpenRLHF, whose reward models and critics are built from ``AutoModel``.

``python -m glm4v_patched.run -m openrlhf.cli.train_rm ...`` registers glm-4v by itself. Otherwise
OpenRLHF raises ``KeyError: 'ChatGLMConfig'``, as for every model outside transformers.
"""

from transformers import AutoModel

import glm4v_patched

from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.modeling_chatglm import ChatGLMModel


def register() -> None:
    """Register the model without its loss with ``AutoModel``; calling it again changes nothing."""
    glm4v_patched.apply()
    AutoModel.register(ChatGLMConfig, ChatGLMModel, exist_ok=True)
