"""transformers' suite of image processors."""

import unittest

from transformers_tests import test_image_processing_common as common

from glm4v_patched import applied
from glm4v_patched.remote.image_processing_chatglm import ChatGLMImageProcessor


class Tester:
    """Images of many sizes, which become 56 x 56."""

    batch_size = 7
    num_channels = 3
    image_processing_classes = {"pil": ChatGLMImageProcessor}  # as transformers 5 reads it

    def __init__(self, parent):
        self.parent = parent

    def prepare_image_processor_dict(self) -> dict:
        return {"size": {"height": 56, "width": 56}}

    def expected_output_image_shape(self, images) -> tuple[int, int, int]:
        return 3, 56, 56

    def prepare_image_inputs(self, num_channels=3, **options) -> list:
        sizes = {"batch_size": self.batch_size, "min_resolution": 30, "max_resolution": 80}
        return common.prepare_image_inputs(**(sizes | options), num_channels=num_channels)

    def prepare_processor_inputs(self, **options) -> dict:
        return {"images": self.prepare_image_inputs(**options)}


class Images(common.ImageProcessingTestMixin, unittest.TestCase):
    image_processor_tester_class = Tester
    image_processing_class = ChatGLMImageProcessor  # as transformers 4 reads it

    @classmethod
    def setUpClass(cls):
        # The suite loads by AutoImageProcessor, too.
        cls.enterClassContext(applied())
        super().setUpClass()

    def setUp(self):
        super().setUp()
        self.image_processor_tester = Tester(self)

    @property
    def image_processor_dict(self) -> dict:
        return self.image_processor_tester.prepare_image_processor_dict()
