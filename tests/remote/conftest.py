"""What most files of this folder set up: the tiny model, once a file."""

import pytest

from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.tiny import tiny_model


@pytest.fixture(scope="module")
def model() -> GLM4VForCausalLM:
    return tiny_model()
