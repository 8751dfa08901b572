"""transformers' suite of models (and of generation and export, from a checkout), a class a form."""

import unittest

import torch
from transformers.models.auto import modeling_auto
from transformers_tests import test_modeling_common
from transformers_tests.generation.test_utils import GenerationTesterMixin

from glm4v_patched import applied
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import (
    ChatGLMForSequenceClassification,
    ChatGLMModel,
    GLM4VForCausalLM,
)
from tests.helpers.tiny import NUM_IMAGE_TOKENS, random_pixels, tiny_config

try:
    from transformers_tests.test_training_mixin import TrainingTesterMixin
except ModuleNotFoundError:  # transformers 4.57
    TrainingTesterMixin = type("Nothing", (), {})

# By these lists the suites decide what inputs a class takes and whether it has a loss. Those with a
# loss are there already, as they are for users. The suites alone get one more: a Trainer reads it.
test_modeling_common.MODEL_MAPPING_NAMES = dict(
    modeling_auto.MODEL_MAPPING_NAMES, chatglm="ChatGLMModel"
)


# Neither among the lowest ids, which the suite draws, nor at the vocabulary's end, which it cuts.
BEGIN, END, PAD, FILL = 450, 451, 452, 453
UNEXPANDED_IMAGE = [BEGIN, PAD, END]
EXPANDED_IMAGE = [BEGIN, *[FILL] * NUM_IMAGE_TOKENS, END]


class SettableDict(dict):
    """A dict that takes attributes: the suite sets norms' epsilons on every part of a config."""


class Tester:
    """Rows of one form, and the sizes that the suite compares with."""

    batch_size = 7  # as many as the suite wants: it fills up with rows of its own
    num_hidden_layers = 2
    is_training = True
    causal_lm_class = GLM4VForCausalLM

    def __init__(self, parent, image: list[int], images_per_row: int):
        self.parent = parent
        self.images_per_row = images_per_row
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(10, 400, (self.batch_size, 8), generator=generator)
        images = torch.tensor((image + [9]) * images_per_row, dtype=torch.long)
        images = images.expand(self.batch_size, -1)
        self.rows = torch.cat((rows[:, :3], images, rows[:, 3:]), dim=1)
        config = self.get_config()
        self.seq_length = self.rows.shape[1]
        # What comes out.
        self.encoder_seq_length = self.seq_length
        if image == UNEXPANDED_IMAGE:
            added_per_image = len(EXPANDED_IMAGE) - len(UNEXPANDED_IMAGE)
            self.encoder_seq_length += images_per_row * added_per_image
        self.key_length = self.encoder_seq_length
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.vision_config = config.vision_config
        self.vocab_size = config.vocab_size

    def get_config(self) -> ChatGLMConfig:
        config = tiny_config(boi_token_id=BEGIN, eoi_token_id=END, pad_token_id=PAD)
        config.vision_config = SettableDict(config.vision_config)
        return config

    def prepare_config_and_inputs_for_common(self) -> tuple[ChatGLMConfig, dict]:
        inputs = {"input_ids": self.rows.clone(), "attention_mask": torch.ones_like(self.rows)}
        if self.images_per_row:
            inputs["pixel_values"] = random_pixels(self.batch_size * self.images_per_row)
        return self.get_config(), inputs

    prepare_config_and_inputs = prepare_config_and_inputs_for_common


class Suite(test_modeling_common.ModelTesterMixin, GenerationTesterMixin):
    all_model_classes = (ChatGLMModel, GLM4VForCausalLM, ChatGLMForSequenceClassification)
    all_generative_model_classes = (GLM4VForCausalLM,)
    additional_model_inputs = ["pixel_values"]
    # Of transformers 4.57, for what models of other kinds had.
    fx_compatible = test_torchscript = test_pruning = test_head_masking = False
    image = EXPANDED_IMAGE
    images_per_row = 1

    @classmethod
    def setUpClass(cls):
        # The suite loads by Auto classes, too.
        cls.enterClassContext(applied())
        super().setUpClass()

    def setUp(self):
        super().setUp()
        self.model_tester = Tester(self, self.image, self.images_per_row)

    def prepare_config_and_inputs_for_generate(self, batch_size: int = 2):
        """As testers of models with images cut them: those of the rows that are left."""
        config, inputs = super().prepare_config_and_inputs_for_generate(batch_size)
        if self.images_per_row:
            _, whole = self.model_tester.prepare_config_and_inputs_for_common()
            inputs["pixel_values"] = whole["pixel_values"][: batch_size * self.images_per_row]
        return config, inputs

    def _image_features_prepare_config_and_inputs(self):
        return self.model_tester.get_config(), {"pixel_values": random_pixels(Tester.batch_size)}


class Text(Suite, TrainingTesterMixin, unittest.TestCase):
    model_tester = None  # TrainingTesterMixin has an abstract property of this name
    images_per_row = 0
    test_all_params_have_gradient = False  # the tower's do not


class OneImage(Suite, unittest.TestCase):
    pass


class TwoImages(Suite, unittest.TestCase):
    images_per_row = 2


class Unexpanded(Suite, unittest.TestCase):
    image = UNEXPANDED_IMAGE
