"""The plug-in for LLaMA-Factory: what its template makes of rows, and what parts are frozen."""

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
NO_PICTURES: list = []


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("factory")
    write_legacy_repository(folder / "published")
    Image.new("RGB", (1200, 800), "red").save(folder / "large.png")
    return folder


@pytest.fixture(scope="module")
def processor(place):
    return ChatGLMProcessor.from_pretrained(place / "published")


@pytest.fixture(scope="module")
def template(processor):
    from llamafactory.data.template import TEMPLATES

    import glm4v_patched
    from glm4v_patched.integrations import llamafactory, llamafactory_parts

    llamafactory.register()
    llamafactory_parts.register()
    template = TEMPLATES["glm4"]
    template.fix_special_tokens(processor.tokenizer)
    yield template
    glm4v_patched.revert()


def encode(template, processor, messages, pictures=NO_PICTURES) -> list[int]:
    messages = template.mm_plugin.process_messages(messages, pictures, [], [], processor)
    prompt, answer = template.encode_oneturn(processor.tokenizer, messages)
    return prompt + answer


def wanted(processor, conversation) -> list[int]:
    return processor.apply_chat_template([conversation], tokenize=True, return_dict=True)[
        "input_ids"
    ][0]


@pytest.mark.parametrize("words", ["What?", "\n What?"])
def test_rows_of_text_are_those_of_the_models_own_template(words, template, processor):
    conversation = [USER | {"content": words}, ANSWER]
    assert encode(template, processor, conversation) == wanted(processor, conversation)


@pytest.mark.parametrize("content", ["<image>What?", "<image>\nWhat?", "What?\n<image>"])
def test_a_picture_takes_its_positions_before_the_words(content, template, processor, place):
    picture = str(place / "large.png")
    got = encode(template, processor, [USER | {"content": content}, ANSWER], [picture])
    conversation = [USER | {"content": "What?", "image": picture}, ANSWER]
    assert got == wanted(processor, conversation)


def test_a_picture_is_not_shrunk_before_the_processor_has_it(template, processor, place):
    picture = str(place / "large.png")
    processor.image_max_pixels, processor.image_min_pixels = 64, 16
    try:
        made = template.mm_plugin.get_mm_inputs([picture], [], [], [1], [0], [0], [[]], processor)
    finally:
        del processor.image_max_pixels, processor.image_min_pixels
    assert torch.equal(
        made["pixel_values"], processor.image_processor(picture, return_tensors="pt").pixel_values
    )


def test_pictures_and_places_must_be_as_many(template, processor, place):
    with pytest.raises(ValueError, match="number of images does not match"):
        encode(template, processor, [USER | {"content": "What?"}, ANSWER], ["red.png"])


def test_the_template_of_other_models_stays_as_it_is(template):
    from llamafactory.data.mm_plugin import BasePlugin
    from llamafactory.data.template import TEMPLATES

    from glm4v_patched.integrations.llamafactory import GLM4VTemplate

    other = GLM4VTemplate(**vars(TEMPLATES["glm4_moe"]))
    before = other.format_user
    tokenizer = SimpleNamespace(
        eos_token_id=1, pad_token_id=1, add_special_tokens=lambda *args, **kwargs: 0
    )
    other.fix_special_tokens(tokenizer)
    assert other.format_user is before
    assert type(other.mm_plugin) is BasePlugin


FREEZE = {
    "freeze_vision_tower": {"transformer.vision.transformer", "transformer.vision.boi"},
    "freeze_multi_modal_projector": {"transformer.vision.linear_proj", "transformer.vision.conv"},
    "freeze_language_model": {"transformer.encoder", "transformer.output_layer"},
}


@pytest.mark.parametrize("option", FREEZE)
def test_each_option_freezes_its_part_and_no_other(option, template):
    from llamafactory.model.model_utils.visual import get_forbidden_modules

    model = tiny_model()
    arguments = SimpleNamespace(**{name: name == option for name in FREEZE})
    forbidden = get_forbidden_modules(model.config, arguments)
    names = [name for name, _ in model.named_parameters()]
    frozen = {name for name in names if any(part in name for part in forbidden)}
    for other, parts in FREEZE.items():
        for part in parts:
            of_part = {name for name in names if name.startswith(part)}
            assert of_part
            assert of_part <= frozen if other == option else not of_part & frozen


def test_every_weight_belongs_to_one_part(template):
    from llamafactory.model.model_utils.visual import COMPOSITE_MODELS

    parts = COMPOSITE_MODELS["chatglm"]
    keys = [*parts.projector_keys, *parts.vision_model_keys, *parts.language_model_keys]
    for name, _ in tiny_model().named_parameters():
        assert sum(key in name for key in keys) == 1, name


def test_lora_target_all_finds_layers_that_can_have_lora(template):
    from llamafactory.model.model_utils.misc import find_all_linear_modules
    from llamafactory.model.model_utils.visual import patch_target_modules

    model = tiny_model()
    arguments = SimpleNamespace(**dict.fromkeys(FREEZE, False))
    targets = patch_target_modules(model, arguments, find_all_linear_modules(model, False))
    modules = dict(model.named_modules())
    assert all(isinstance(modules[name], torch.nn.Linear) for name in targets)
    assert any("vision" in name for name in targets) and any("encoder" in name for name in targets)
