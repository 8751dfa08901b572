"""peft's own tests of custom models and of language models, with images in every sequence."""

import pytest
import torch
from peft_tests import test_custom_models as custom
from peft_tests import test_decoder_models as decoders

from glm4v_patched import applied
from tests.suites import tiny_folder

# A method of each kind. tests/frameworks/test_peft.py trains all of them; these suites would have
# 3,500 tests.
OF_CUSTOM_MODELS = ("LoraConfig", "IA3Config", "OFTConfig")
OF_DECODERS = ("LoraConfig", "PromptTuningConfig")
TARGETS = {"target_modules": ["query_key_value"]}


class LogProbabilities(torch.nn.Module):
    """The tiny model as peft's custom models are: one tensor in, log probabilities out."""

    def __init__(self):
        super().__init__()
        self.model = tiny_folder.build()

    def forward(self, X):  # noqa: N803  peft's name
        return self.model(**tiny_folder.image_prompts(X)).logits[:, -1].log_softmax(-1)

    @classmethod
    def from_pretrained(cls, model_id: str, dtype: torch.dtype = torch.float32):
        return cls().to(dtype)


def only_over(parameters: list, of_class: type) -> dict:
    """Return what a class of tests has, without the tests that do not run over these parameters."""
    return {
        name: value
        for name, value in vars(of_class).items()
        if not name.startswith("test_")
        or any(mark.args[1:2] == (parameters,) for mark in getattr(value, "pytestmark", []))
    }


def first_cases(cases: list[tuple], column: int, methods: tuple[str, ...]) -> list[tuple]:
    """Return the first case of each method, whose class is in this column."""
    first = {case[column].__name__: case for case in reversed(cases)}
    return [first[method] for method in methods]


@pytest.fixture(scope="module", autouse=True)
def patched():
    with applied():  # they load by Auto classes
        yield


class TestCustomModel(custom.PeftCommonTester):
    locals().update(only_over(custom.TEST_CASES, custom.TestPeftCustomModel))
    transformers_class = LogProbabilities


class TestDecoder(decoders.PeftCommonTester):
    locals().update(only_over(decoders.PEFT_DECODER_MODELS_TO_TEST, decoders.TestDecoderModels))

    def prepare_inputs_for_testing(self) -> dict[str, torch.Tensor]:
        return tiny_folder.image_prompts(torch.tensor([[1, 1, 1], [1, 2, 1]]))


custom.TEST_CASES[:] = [
    (name, "glm-4v", kind, options | TARGETS)
    for name, _, kind, options in first_cases(custom.TEST_CASES, 2, OF_CUSTOM_MODELS)
]
decoders.ALL_CONFIGS[:] = first_cases(decoders.ALL_CONFIGS, 0, OF_DECODERS)
decoders.PEFT_DECODER_MODELS_TO_TEST[:] = [tiny_folder.write()]
