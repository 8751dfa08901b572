"""llm-compressor quantizes the model with images, and what it saves answers after loading."""

import importlib.util
import json

import pytest
import torch

import glm4v_patched
from glm4v_patched.data.rows import read_conversations
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.recipes import drawn_recipe

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llmcompressor") is None,
    reason="not installed: llmcompressor; nox -f tests/noxfile.py -s llm_compressor",
)
LEFT_ALONE = ["re:.*vision.*", "re:.*output_layer"]


@pytest.mark.parametrize(
    ("modifier", "scheme"), [("RTN", "W4A16"), ("GPTQ", "W4A16"), ("RTN", "W8A8")]
)
def test_a_quantized_model_answers_after_loading_as_before(tmp_path, modifier, scheme):
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    recipe = drawn_recipe(tmp_path)
    model = GLM4VForCausalLM.from_pretrained(recipe.model, dtype=torch.float32)
    processor = ChatGLMProcessor.from_pretrained(recipe.model)
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    batches = [
        dict(processor.apply_chat_template([row[:1]], add_generation_prompt=True, **options))
        for row in read_conversations(recipe.data.train)
    ]

    @torch.no_grad()
    def logits(model) -> torch.Tensor:
        return torch.cat([model(**batch).logits[:, -1] for batch in batches])

    plain = logits(model)
    kind = {"RTN": QuantizationModifier, "GPTQ": GPTQModifier}[modifier]
    glm4v_patched.apply()  # it asks Auto classes about the model's folder
    try:
        oneshot(
            model=model,
            processor=processor,
            dataset=torch.utils.data.DataLoader(
                batches, batch_size=1, collate_fn=lambda batch: batch[0]
            ),
            recipe=kind(targets="Linear", scheme=scheme, ignore=LEFT_ALONE),
            pipeline="basic",
        )
    finally:
        glm4v_patched.revert()
    quantized = logits(model)
    assert not torch.equal(quantized, plain)
    model.save_pretrained(tmp_path / "quantized", save_compressed=True)
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())
    assert "transformer.output_layer" in config["quantization_config"]["ignore"]
    loaded = GLM4VForCausalLM.from_pretrained(tmp_path / "quantized", dtype=torch.float32)
    assert torch.equal(logits(loaded), quantized)
