"""transformers' suite of models (and of generation and export, from a checkout), a class a form."""

import unittest

import torch
from names import know_by_name
from tiny import BOI, EOI, PAD, grown_image, pictures, text, three_id_image, tiny_config
from transformers_tests import test_modeling_common
from transformers_tests.generation.test_utils import GenerationTesterMixin

from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import ChatGLMModel, GLM4VForCausalLM

know_by_name(
    "chatglm",
    MODEL_MAPPING_NAMES="ChatGLMModel",
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES="GLM4VForCausalLM",
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES="GLM4VForCausalLM",
)


class SettableDict(dict):
    """A dict that takes attributes: the suite sets norms' epsilons on every part of a config."""


class Tester:
    """Rows of one form, and the sizes that the suite compares with."""

    batch_size = 2
    num_hidden_layers = 2
    is_training = True

    def __init__(self, parent, images_per_row: int = 0, image=()):
        self.parent = parent
        self.images_per_row = images_per_row
        rows = [
            [*text(3, seed=i), *(list(image) + text(2, seed=7)) * images_per_row, *text(4, seed=9)]
            for i in range(self.batch_size)
        ]
        self.rows = torch.tensor(rows)
        config = self.get_config()
        self.seq_length = self.encoder_seq_length = self.key_length = self.rows.shape[1]
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.vision_config = config.vision_config
        self.vocab_size = config.vocab_size

    def get_config(self) -> ChatGLMConfig:
        config = tiny_config(boi_token_id=BOI, eoi_token_id=EOI, pad_token_id=PAD)
        config.vision_config = SettableDict(config.vision_config)
        return config

    def prepare_config_and_inputs_for_common(self) -> tuple[ChatGLMConfig, dict]:
        inputs = {"input_ids": self.rows.clone(), "attention_mask": torch.ones_like(self.rows)}
        if self.images_per_row:
            inputs["pixel_values"] = pictures(self.batch_size * self.images_per_row)
        return self.get_config(), inputs

    prepare_config_and_inputs = prepare_config_and_inputs_for_common


class Suite(test_modeling_common.ModelTesterMixin, GenerationTesterMixin):
    all_model_classes = (ChatGLMModel, GLM4VForCausalLM)
    all_generative_model_classes = (GLM4VForCausalLM,)
    pipeline_model_mapping = {}
    test_resize_embeddings = True
    test_torchscript = test_pruning = test_head_masking = False
    images = {}

    def setUp(self):
        super().setUp()
        self.model_tester = Tester(self, **self.images)

    def _image_features_prepare_config_and_inputs(self):
        return self.model_tester.get_config(), {"pixel_values": pictures(Tester.batch_size)}


class Text(Suite, unittest.TestCase):
    pass


class Grown(Suite, unittest.TestCase):
    images = {"images_per_row": 1, "image": grown_image()}


class TwoImages(Suite, unittest.TestCase):
    images = {"images_per_row": 2, "image": grown_image()}


class ThreeIds(Suite, unittest.TestCase):
    images = {"images_per_row": 1, "image": three_id_image()}
