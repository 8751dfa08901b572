"""The plug-in for ms-swift: encoded samples, and its registration in child processes."""

import importlib.util
import shutil
import sys

import pytest
import torch
from PIL import Image

from glm4v_patched.data.collate import ConversationCollator
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.processes import run_with_limit
from tests.helpers.tiny import update_json

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("swift") is None,
    reason="ms-swift is not installed: nox -f tests/noxfile.py -s ms_swift",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swift")
    write_legacy_repository(folder / "published")
    for name, color in (("red", "red"), ("turned", "blue")):
        image, exif = Image.new("RGB", (40, 60), color), Image.Exif()
        image.putpixel((0, 0), (255, 255, 255))
        exif[0x0112] = 6 if name == "turned" else 1
        image.save(folder / f"{name}.png", exif=exif)
    return folder


@pytest.fixture(scope="module")
def template(folder):
    import glm4v_patched
    from glm4v_patched.integrations import ms_swift

    ms_swift.register()
    from swift import get_processor, get_template

    template = get_template(get_processor(str(folder / "published")), max_length=1000)
    template.set_mode("train")
    yield template
    glm4v_patched.revert()


def encode(template, messages, images=()):
    return template.encode({"messages": messages, "images": [str(image) for image in images]})


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def assert_same(encoded, template, conversation):
    """Check that a sample is encoded as in a recipe."""
    expected = ConversationCollator(template.processor)([conversation])
    for name in ("input_ids", "labels"):
        assert encoded[name] == expected[name][0].tolist()
    if "pixel_values" in expected:
        assert torch.equal(encoded["pixel_values"], expected["pixel_values"])


def test_text_samples_are_encoded_as_in_a_recipe(template):
    system = {"role": "system", "content": "\nBe kind."}
    first = [user("\n What?"), assistant("\n\nA cat.")]
    for messages in (first, [system, *first], [*first, user("Why?"), assistant("So.")]):
        encoded = encode(template, messages)
        assert_same(encoded, template, messages)
        assert "pixel_values" not in encoded


@pytest.mark.parametrize("content", ["<image>\nWhat?", "What?\n<image>"])
def test_an_image_comes_first_and_is_rotated_by_its_exif(content, template, folder):
    image = folder / "turned.png"
    answer = assistant("A cat.")
    conversation = [user("What?") | {"image": str(image)}, answer]
    assert_same(encode(template, [user(content), answer], [image]), template, conversation)


def test_several_images_keep_their_order(template, folder):
    answers = assistant("That."), assistant("No.")
    messages = [user("<image><image>Which?"), answers[0], user("<image>So?"), answers[1]]
    images = [folder / "red.png", folder / "turned.png", folder / "red.png"]
    first, second, third = ({"type": "image", "image": str(path)} for path in images)
    question, other = ({"type": "text", "text": text} for text in ("Which?", "So?"))
    conversation = [user([first, second, question]), answers[0], user([third, other]), answers[1]]
    assert_same(encode(template, messages, images), template, conversation)


def test_image_tags_and_tokens_without_an_image_are_refused(template, folder):
    messages = [user("<image><image>Which?"), assistant("That.")]
    message = "a sample has 1 image, and its messages have 2 <image> tags"
    with pytest.raises(ValueError, match=message):
        encode(template, messages, [folder / "red.png"])
    messages = [user("<|begin_of_image|>What?"), assistant("That.")]
    message = r"a sample has 0 images, and its texts have 1 <\|begin_of_image\|> token"
    with pytest.raises(ValueError, match=message):
        encode(template, messages)


def test_the_end_of_an_unsupervised_turn_is_not_supervised(template):
    messages = [user("What?"), assistant("A cat.", loss=False), user("Why?"), assistant("So.")]
    supervised = [token for token in encode(template, messages)["labels"] if token != -100]
    assert template.tokenizer.decode(supervised).replace(" ", "") == "\nSo.<|endoftext|>"


def test_a_prompt_ends_with_the_role_and_an_answer_loses_its_line_feed(template, folder):
    template.set_mode("transformers")
    try:
        encoded = encode(template, [user("<image>What?")], [folder / "red.png"])
        conversation = [user("What?") | {"image": str(folder / "red.png")}]
        options = {"tokenize": True, "return_dict": True, "add_generation_prompt": True}
        expected = template.processor.apply_chat_template([conversation], **options)
        assert encoded["input_ids"] == expected["input_ids"][0]
        answer = "\nA cat.<|endoftext|>"
        generated = template.tokenizer(answer, add_special_tokens=False)["input_ids"]
        assert template.decode_generate_ids(generated) == "A cat."
    finally:
        template.set_mode("train")


@pytest.mark.parametrize("original_rope", [True, False], ids=["glm-4v", "cogagent"])
def test_children_of_the_run_entry_register_it(original_rope, folder):
    """swift starts itself again as a child process."""
    model = folder / f"published_{original_rope}"
    shutil.copytree(folder / "published", model)
    update_json(model / "config.json", original_rope=original_rope)
    (folder / "found.py").write_text(
        "from swift import get_model_processor\n"
        "from swift.model import get_model_info_meta\n"
        f"_, meta = get_model_info_meta('{model.name}')\n"
        "print(meta.model_type, meta.loader.__module__, meta.template)\n"
        f"model, _ = get_model_processor('{model.name}')\n"
        "print(type(model).__module__, model.config.original_rope)\n"
    )
    (folder / "starts.py").write_text(
        "import subprocess, sys; sys.exit(subprocess.call([sys.executable, 'found.py']))"
    )
    command = [sys.executable, "-m", "glm4v_patched.run", "starts.py"]
    ended = run_with_limit(command, 120, folder=folder)
    assert ended.status == 0, ended.output[-3000:]
    assert "chatglm4v glm4v_patched.integrations.ms_swift chatglm4v" in ended.output
    assert f"glm4v_patched.remote.modeling_chatglm {original_rope}" in ended.output
