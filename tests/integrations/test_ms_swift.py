"""The plug-in for ms-swift: what its template makes of rows, and how it is found."""

import importlib.util
import sys

import pytest
import torch
from PIL import Image

from glm4v_patched.data.collate import ConversationCollator
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.processes import run_with_limit

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("swift") is None,
    reason="ms-swift is not installed: nox -f tests/noxfile.py -s ms_swift",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swift")
    write_legacy_repository(folder / "published")
    for name, color in (("red", "red"), ("turned", "blue")):
        image, exif = Image.new("RGB", (40, 60), color), Image.Exif()
        image.putpixel((0, 0), (255, 255, 255))
        exif[0x0112] = 6 if name == "turned" else 1
        image.save(folder / f"{name}.png", exif=exif)
    return folder


@pytest.fixture(scope="module")
def template(place):
    import glm4v_patched
    from glm4v_patched.integrations import ms_swift

    ms_swift.register()
    from swift import get_processor, get_template

    template = get_template(get_processor(str(place / "published")), max_length=1000)
    template.set_mode("train")
    yield template
    glm4v_patched.revert()


def encode(template, messages, images=()):
    return template.encode({"messages": messages, "images": [str(image) for image in images]})


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def assert_same(got, template, conversation):
    """As what a recipe trains on."""
    expected = ConversationCollator(template.processor)([conversation])
    for name in ("input_ids", "labels"):
        assert got[name] == expected[name][0].tolist()
    if "pixel_values" in expected:
        assert torch.equal(got["pixel_values"], expected["pixel_values"])


def test_rows_of_text_are_what_a_recipe_trains_on(template):
    system = {"role": "system", "content": "\nBe kind."}
    first = [user("\n What?"), assistant("\n\nA cat.")]
    for messages in (first, [system, *first], [*first, user("Why?"), assistant("So.")]):
        got = encode(template, messages)
        assert_same(got, template, messages)
        assert "pixel_values" not in got


@pytest.mark.parametrize("content", ["<image>\nWhat?", "What?\n<image>"])
def test_an_image_comes_first_and_is_turned_upright(content, template, place):
    image = place / "turned.png"
    answer = assistant("A cat.")
    conversation = [user("What?") | {"image": str(image)}, answer]
    assert_same(encode(template, [user(content), answer], [image]), template, conversation)


def test_several_images_each_have_their_place(template, place):
    answers = assistant("That."), assistant("No.")
    messages = [user("<image><image>Which?"), answers[0], user("<image>So?"), answers[1]]
    images = [place / "red.png", place / "turned.png", place / "red.png"]
    first, second, third = ({"type": "image", "image": str(path)} for path in images)
    which, so = ({"type": "text", "text": text} for text in ("Which?", "So?"))
    conversation = [user([first, second, which]), answers[0], user([third, so]), answers[1]]
    assert_same(encode(template, messages, images), template, conversation)


def test_places_and_tokens_without_an_image_are_refused(template, place):
    messages = [user("<image><image>Which?"), assistant("That.")]
    with pytest.raises(ValueError, match="1 images and 2 places"):
        encode(template, messages, [place / "red.png"])
    messages = [user("<|begin_of_image|>What?"), assistant("That.")]
    with pytest.raises(ValueError, match=r"0 images and 1 times <\|begin_of_image\|>"):
        encode(template, messages)


def test_a_turn_that_is_not_learned_has_no_learned_end(template):
    messages = [user("What?"), assistant("A cat.", loss=False), user("Why?"), assistant("So.")]
    learned = [token for token in encode(template, messages)["labels"] if token != -100]
    assert template.tokenizer.decode(learned).replace(" ", "") == "\nSo.<|endoftext|>"


def test_a_prompt_ends_with_the_role_and_an_answer_loses_its_line_feed(template, place):
    template.set_mode("transformers")
    try:
        got = encode(template, [user("<image>What?")], [place / "red.png"])
        conversation = [user("What?") | {"image": str(place / "red.png")}]
        options = {"tokenize": True, "return_dict": True, "add_generation_prompt": True}
        expected = template.processor.apply_chat_template([conversation], **options)
        assert got["input_ids"] == expected["input_ids"][0]
        drawn = template.tokenizer("\nA cat.<|endoftext|>", add_special_tokens=False)["input_ids"]
        assert template.decode_generate_ids(drawn) == "A cat."
    finally:
        template.set_mode("train")


def test_children_of_the_run_entry_find_it(place):
    """swift starts itself again in another process."""
    (place / "found.py").write_text(
        "from swift.model import get_model_info_meta\n"
        "_, meta = get_model_info_meta('published')\n"
        "print(meta.model_type, meta.loader.__module__, meta.template)\n"
    )
    (place / "starts.py").write_text(
        "import subprocess, sys; sys.exit(subprocess.call([sys.executable, 'found.py']))"
    )
    command = [sys.executable, "-m", "glm4v_patched.run", "starts.py"]
    ended = run_with_limit(command, 120, folder=place)
    found = "chatglm4v glm4v_patched.integrations.ms_swift chatglm4v"
    assert ended.status == 0 and found in ended.output, ended.output[-3000:]
