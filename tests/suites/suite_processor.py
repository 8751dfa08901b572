"""transformers' suite of processors."""

import shutil
import tempfile
import unittest

from transformers_tests import test_processing_common

from glm4v_patched import applied
from glm4v_patched.remote.image_processing_chatglm import ChatGLMImageProcessor
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from glm4v_patched.remote.tokenization_chatglm import ChatGLM4Tokenizer
from tests.conftest import train_backend


class Processor(test_processing_common.ProcessorTesterMixin, unittest.TestCase):
    processor_class = ChatGLMProcessor
    image_token = "<|begin_of_image|><|endoftext|><|end_of_image|>"

    @classmethod
    def setUpClass(cls):
        cls.enterClassContext(applied())
        if hasattr(test_processing_common.ProcessorTesterMixin, "setUpClass"):
            super().setUpClass()
        else:  # transformers 4.57
            cls.tmpdirname = tempfile.mkdtemp()
            cls.addClassCleanup(shutil.rmtree, cls.tmpdirname)
        parts = cls._setup_image_processor(), cls._setup_tokenizer()
        ChatGLMProcessor(*parts).save_pretrained(cls.tmpdirname)

    @classmethod
    def _setup_image_processor(cls) -> ChatGLMImageProcessor:
        return ChatGLMImageProcessor(size=56)

    @classmethod
    def _setup_tokenizer(cls) -> ChatGLM4Tokenizer:
        return ChatGLM4Tokenizer(tokenizer_object=train_backend())

    @classmethod
    def _setup_test_attributes(cls, processor) -> None:
        pass  # image_token is three ids here; the processor's is what fills them

    def get_component(self, attribute, **options):
        return getattr(ChatGLMProcessor.from_pretrained(self.tmpdirname, **options), attribute)
