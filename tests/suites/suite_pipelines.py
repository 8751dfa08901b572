"""transformers' own tests of pipelines, which need a checkout, by this package's classes."""

import copy
from importlib import import_module

import pytest
import transformers

from glm4v_patched import applied
from glm4v_patched.remote.modeling_chatglm import (
    ChatGLMForSequenceClassification,
    ChatGLMModel,
    GLM4VForCausalLM,
)
from tests.suites import tiny_folder

pytest.importorskip("transformers_tests.pipelines", reason="needs a checkout")
# The suites import the source of their checkout as a second transformers.
transformers.utils.direct_transformers_import = lambda path: transformers

TASKS = {
    "text_generation": ("TextGeneration", GLM4VForCausalLM),
    "image_text_to_text": ("ImageTextToText", GLM4VForCausalLM),
    "feature_extraction": ("FeatureExtraction", ChatGLMModel),
    "text_classification": ("TextClassification", ChatGLMForSequenceClassification),
    "zero_shot": ("ZeroShotClassification", ChatGLMForSequenceClassification),
}


class TestPipelines:
    """What transformers' PipelineTesterMixin does with a model of the Hub, with one of a folder."""

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    @pytest.mark.parametrize("task", TASKS)
    def test_pipeline(self, task, dtype):
        name, kind = TASKS[task]
        module = import_module(f"transformers_tests.pipelines.test_pipelines_{task}")
        suite = getattr(module, f"{name}PipelineTests")()
        processor = copy.deepcopy(tiny_folder.PROCESSOR)
        processor.tokenizer.image_token = "<|begin_of_image|><|endoftext|><|end_of_image|>"
        processors = {"processor": processor, "image_processor": processor.image_processor}
        with applied():
            model = kind.from_pretrained(tiny_folder.write()).eval()
            tokenizer = processor.tokenizer
            pipeline, examples = suite.get_test_pipeline(
                model, tokenizer, **processors, dtype=dtype
            )
            suite.run_pipeline_test(pipeline, copy.deepcopy(examples))
            batches = pipeline((copy.deepcopy(examples[0]) for _ in range(10)), batch_size=4)
            assert len(list(batches)) == 10
