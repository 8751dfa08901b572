"""The tiny model, made once a file, and both forms of an image."""

import pytest

from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.tiny import expanded_image, unexpanded_image, tiny_model


@pytest.fixture(scope="module")
def model() -> GLM4VForCausalLM:
    return tiny_model()


@pytest.fixture(params=["three ids", "grown"])
def image(request) -> list[int]:
    """The ids of an image, in either form."""
    return unexpanded_image() if request.param == "three ids" else expanded_image()
