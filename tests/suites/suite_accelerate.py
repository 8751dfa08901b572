"""accelerate's own tests of offloading and device maps, with the tiny model in their models."""

import inspect
import unittest

import torch
from accelerate_tests import test_big_modeling as big
from accelerate_tests import test_modeling_utils as utils

from tests.suites import tiny_folder


class Layer(torch.nn.Module):
    """In the place of Linear(3, 4): numbers scale the images, logits come out."""

    def __init__(self):
        super().__init__()
        self.model = tiny_folder.build()

    @property
    def weight(self) -> torch.Tensor:
        return self.model.transformer.vision.linear_proj.linear_proj.weight

    def forward(self, numbers):
        inputs = tiny_folder.image_prompts(torch.ones(len(numbers), 3, dtype=torch.long))
        inputs["pixel_values"] *= numbers.mean(-1)[:, None, None, None].cpu()
        inputs = {name: value.to(numbers.device) for name, value in inputs.items()}
        return self.model(**inputs).logits[:, -1, :4]


def having_their_model(of_class: type, part: str = "") -> dict:
    """Return a class's helpers, and its tests that build the model and are named so."""
    return {
        name: value
        for name, value in vars(of_class).items()
        if not name.startswith("test_")
        or (value and part in name and "ModelForTest" in inspect.unwrap(value).__code__.co_names)
    }


class WithOurLayer(big.ModelForTest):
    def __init__(self):
        super().__init__()
        self.linear1 = Layer()


big.ModelForTest = utils.ModelForTest = WithOurLayer


class BigModeling(unittest.TestCase):
    locals().update(having_their_model(big.BigModelingTester))


class LoadCheckpoint(unittest.TestCase):
    # The other tests of this class compare the names and sizes of weights.
    locals().update(having_their_model(utils.ModelingUtilsTester, part="load_checkpoint"))
