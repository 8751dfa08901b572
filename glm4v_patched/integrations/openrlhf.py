"""glm-4v's class for OpenRLHF, whose reward models and critics begin with ``AutoModel``'s table.

``python -m glm4v_patched.run -m openrlhf.cli.train_rm ...`` registers it by itself. Without it:
``KeyError: 'ChatGLMConfig'``, as for every model whose code is not transformers' own.
"""

from transformers import AutoModel

import glm4v_patched

from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.modeling_chatglm import ChatGLMModel


def register() -> None:
    """Enter the model without a head. Again does nothing."""
    glm4v_patched.apply()
    AutoModel.register(ChatGLMConfig, ChatGLMModel, exist_ok=True)
