"""The plug-in for LLaMA-Factory: encoded samples, and the modules that its options freeze."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.tiny import tiny_model

NEEDED = ("llamafactory", "torchaudio", "av", "omegaconf", "trl")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING),
    reason=f"not installed: {', '.join(MISSING)}; nox -f tests/noxfile.py -s llamafactory",
)
USER, ANSWER = {"role": "user"}, {"role": "assistant", "content": "A cat."}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """LLaMA-Factory's template glm4 with the model's processor, and the path of an image."""
    from llamafactory.data.template import TEMPLATES

    import glm4v_patched
    from glm4v_patched.integrations import llamafactory, llamafactory_composite

    llamafactory.register()
    llamafactory_composite.register()
    folder, template = tmp_path_factory.mktemp("factory"), TEMPLATES["glm4"]
    write_legacy_repository(folder)
    template.image = str(folder / "large.png")
    Image.new("RGB", (1200, 800), "red").save(template.image)
    template.processor = ChatGLMProcessor.from_pretrained(folder)
    template.fix_special_tokens(template.processor.tokenizer)
    yield template
    glm4v_patched.revert()


@pytest.mark.parametrize(
    "content", ["\n What?", "<image>What?", "<image>\nWhat?", "What?\n<image>"]
)
def test_samples_are_encoded_as_by_the_model_s_own_template(content, template):
    """The image's tokens come before the text."""
    processor = template.processor
    conversation = [USER | {"content": content}, ANSWER]
    images = [template.image] * content.count("<image>")
    messages = template.mm_plugin.process_messages(conversation, images, [], [], processor)
    prompt, answer = template.encode_oneturn(processor.tokenizer, messages)
    if images:
        conversation = [USER | {"content": "What?", "image": images[0]}, ANSWER]
    expected = processor.apply_chat_template([conversation], tokenize=True, return_dict=True)
    assert prompt + answer == expected["input_ids"][0]


def test_an_image_reaches_the_processor_at_full_size(template):
    image, processor = template.image, template.processor
    processor.image_max_pixels, processor.image_min_pixels = 64, 16
    inputs = template.mm_plugin.get_mm_inputs([image], [], [], [1], [0], [0], [[]], processor)
    expected = processor.image_processor(image, return_tensors="pt")
    assert torch.equal(inputs["pixel_values"], expected["pixel_values"])


def test_the_template_of_other_models_does_not_change(template):
    from llamafactory.data.mm_plugin import BasePlugin
    from llamafactory.data.template import TEMPLATES

    from glm4v_patched.integrations.llamafactory import GLM4VTemplate

    other = GLM4VTemplate(**vars(TEMPLATES["glm4_moe"]))
    before = other.format_user
    add = {"add_special_tokens": lambda *args, **kwargs: 0}
    other.fix_special_tokens(SimpleNamespace(eos_token_id=1, pad_token_id=1, **add))
    assert other.format_user is before and type(other.mm_plugin) is BasePlugin


FREEZE = {
    "freeze_vision_tower": {"transformer.vision.transformer", "transformer.vision.boi"},
    "freeze_multi_modal_projector": {"transformer.vision.linear_proj", "transformer.vision.conv"},
    "freeze_language_model": {"transformer.encoder", "transformer.output_layer"},
}


@pytest.mark.parametrize("option", FREEZE)
def test_each_option_freezes_its_modules_only_and_all_weights_are_covered(option, template):
    from llamafactory.model.model_utils.visual import COMPOSITE_MODELS, get_forbidden_modules

    model, composite = tiny_model(), COMPOSITE_MODELS["chatglm"]
    arguments = SimpleNamespace(**{name: name == option for name in FREEZE})
    forbidden = get_forbidden_modules(model.config, arguments)
    names = [name for name, _ in model.named_parameters()]
    keys = [*composite.projector_keys, *composite.vision_model_keys]
    keys += composite.language_model_keys
    assert all(sum(key in name for key in keys) == 1 for name in names)
    frozen = {name for name in names if any(module in name for module in forbidden)}
    for other, modules in FREEZE.items():
        for module in modules:
            weights = {name for name in names if name.startswith(module)}
            assert weights and weights & frozen == (weights if other == option else set())
