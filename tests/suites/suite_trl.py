"""TRL's own tests of chats and of batches with images, on this package's tokenizer and processor."""

import copy

import pytest
from transformers import AutoProcessor, AutoTokenizer
from trl_tests.test_chat_template_utils import (
    TestIsChatTemplatePrefixPreserving,
    TestIsChatTemplateStopTokenTrained,
)
from trl_tests.test_data_utils import TestApplyChatTemplate
from trl_tests.test_dpo_trainer import TestDataCollatorForVisionPreference
from trl_tests.test_kto_trainer import TestDataCollatorForVisionUnpairedPreference

from tests.suites import tiny_folder

__all__ = [
    "TestApplyChatTemplate",
    "TestDataCollatorForVisionPreference",
    "TestDataCollatorForVisionUnpairedPreference",
    "TestIsChatTemplatePrefixPreserving",
    "TestIsChatTemplateStopTokenTrained",
]
TestApplyChatTemplate.tokenizers[:] = ["our tokenizer", "our processor"]


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """Load this package's tokenizer or processor in the place of any other."""

    def load_processor(name: str):
        return copy.deepcopy(tiny_folder.PROCESSOR)

    def load_tokenizer(name: str):
        processor = load_processor(name)
        return processor if name == "our processor" else processor.tokenizer

    monkeypatch.setattr(AutoProcessor, "from_pretrained", load_processor)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load_tokenizer)
