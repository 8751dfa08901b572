"""Fixtures: the tiny model, built once per file, and an image, unexpanded and expanded."""

import pytest

from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.tiny import expanded_image, tiny_model, unexpanded_image


@pytest.fixture(scope="module")
def model() -> GLM4VForCausalLM:
    return tiny_model()


@pytest.fixture(params=["unexpanded", "expanded"])
def image(request) -> list[int]:
    """The ids of an image, unexpanded and expanded."""
    return unexpanded_image() if request.param == "unexpanded" else expanded_image()
