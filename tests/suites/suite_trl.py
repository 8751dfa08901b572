"""TRL's own tests of chats and of batches with images, on our tokenizer and processor."""

import copy

import pytest
from transformers import AutoProcessor, AutoTokenizer
from trl_tests.test_chat_template_utils import (
    TestIsChatTemplatePrefixPreserving,  # noqa: F401
    TestIsChatTemplateStopTokenTrained,  # noqa: F401
)
from trl_tests.test_data_utils import TestApplyChatTemplate
from trl_tests.test_dpo_trainer import TestDataCollatorForVisionPreference  # noqa: F401
from trl_tests.test_kto_trainer import TestDataCollatorForVisionUnpairedPreference  # noqa: F401

from tests.suites.tiny_folder import PROCESSOR

TestApplyChatTemplate.tokenizers[:] = ["tokenizer", "processor"]


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """Whatever is loaded by its name, load this package's."""
    for auto, part in ((AutoProcessor, PROCESSOR), (AutoTokenizer, PROCESSOR.tokenizer)):

        def load(name: str, part=part):
            return copy.deepcopy(PROCESSOR if name == "processor" else part)

        monkeypatch.setattr(auto, "from_pretrained", load)
