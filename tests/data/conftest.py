"""A processor whose words are those of this room's tests."""

import pytest

from glm4v_patched.demo.tiny_model import build_processor

WORDS = ["Which colour is it? What is 0123456789 in the picture? 007 NA blue, green"]
WORDS += ["a red circle", "a green square", "red it is", "white"]


@pytest.fixture(scope="module")
def processor():
    return build_processor(WORDS)
