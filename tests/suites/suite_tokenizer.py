"""transformers' suites of tokenizers, on a small BPE with GLM-4's special tokens."""

import tempfile
import unittest

from transformers_tests import test_tokenization_common

from glm4v_patched import applied
from glm4v_patched.remote.tokenization_chatglm import ChatGLM4Tokenizer
from tests.conftest import train_backend

try:
    from transformers_tests.test_tokenizers_backend_mixin import TokenizersBackendTesterMixin
except ModuleNotFoundError:  # transformers 4.57
    TokenizersBackendTesterMixin = type("Nothing", (), {})


class OfTokenizer:
    tokenizer_class = rust_tokenizer_class = ChatGLM4Tokenizer
    from_pretrained_kwargs = {}

    @classmethod
    def setUpClass(cls):
        # The suites load by AutoTokenizer, too.
        cls.enterClassContext(applied())
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        ChatGLM4Tokenizer(tokenizer_object=train_backend(), model_max_length=512).save_pretrained(
            folder
        )
        cls.from_pretrained_id = [folder]
        super().setUpClass()


class Tokenizer(OfTokenizer, test_tokenization_common.TokenizerTesterMixin, unittest.TestCase):
    test_slow_tokenizer = False  # for transformers 4, which has two kinds

    def setUp(self):
        super().setUp()
        ChatGLM4Tokenizer.from_pretrained(self.from_pretrained_id[0]).save_pretrained(
            self.tmpdirname
        )

    def get_tokenizers(self, fast=True, **options):
        return [self.get_tokenizer(**options)]


class Backend(OfTokenizer, TokenizersBackendTesterMixin, unittest.TestCase):
    pass
