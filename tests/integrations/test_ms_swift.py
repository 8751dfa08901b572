"""The plug-in for ms-swift: what its template makes of rows, and how it is found."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from PIL import Image

from glm4v_patched.data.collate import ConversationCollator
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.processes import cpu_environment

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("swift") is None,
    reason="ms-swift is not installed: nox -f tests/noxfile.py -s ms_swift",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swift")
    write_legacy_repository(folder / "published")
    Image.new("RGB", (60, 40), "red").save(folder / "red.png")
    turned = Image.new("RGB", (40, 60), "blue")
    turned.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(folder / "turned.png", exif=exif)
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


def want(template, conversation):
    return ConversationCollator(template.processor)([conversation])


@pytest.mark.parametrize(
    "messages",
    [
        [user("What?"), assistant("A cat.")],
        [user("\n What?"), assistant("\n\nA cat.")],
        [{"role": "system", "content": "\nBe kind."}, user("What?"), assistant("A cat.")],
        [user("What?"), assistant("A cat."), user("Why?"), assistant("So.")],
    ],
)
def test_rows_of_text_are_what_a_recipe_trains_on(messages, template):
    got, expected = encode(template, messages), want(template, messages)
    for name in ("input_ids", "labels"):
        assert got[name] == expected[name][0].tolist()
    assert "pixel_values" not in got


@pytest.mark.parametrize("content", ["<image>What?", "<image>\nWhat?", "What?\n<image>"])
def test_a_picture_comes_first_and_is_turned_upright(content, template, place):
    for name in ("red.png", "turned.png"):
        got = encode(template, [user(content), assistant("A cat.")], [place / name])
        conversation = [user("What?") | {"image": str(place / name)}, assistant("A cat.")]
        expected = want(template, conversation)
        assert got["input_ids"] == expected["input_ids"][0].tolist()
        assert got["labels"] == expected["labels"][0].tolist()
        assert torch.equal(got["pixel_values"], expected["pixel_values"])


def test_several_pictures_each_have_their_place(template, place):
    messages = [
        user("<image><image>Which?"),
        assistant("That."),
        user("<image>So?"),
        assistant("No."),
    ]
    pictures = [place / "red.png", place / "turned.png", place / "red.png"]
    got = encode(template, messages, pictures)
    first, second, third = ({"type": "image", "image": str(path)} for path in pictures)
    conversation = [
        {"role": "user", "content": [first, second, {"type": "text", "text": "Which?"}]},
        messages[1],
        {"role": "user", "content": [third, {"type": "text", "text": "So?"}]},
        messages[3],
    ]
    expected = want(template, conversation)
    assert got["input_ids"] == expected["input_ids"][0].tolist()
    assert torch.equal(got["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize("number", [0, 1])
def test_more_places_than_pictures_are_refused(number, template, place):
    messages = [user("<image><image>Which?"), assistant("That.")]
    with pytest.raises(ValueError, match=f"{number} pictures and 2 places"):
        encode(template, messages, [place / "red.png"] * number)


def test_the_token_of_a_picture_in_a_text_is_refused(template):
    messages = [user("<|begin_of_image|>What?"), assistant("That.")]
    with pytest.raises(ValueError, match=r"0 pictures and 1 times <\|begin_of_image\|>"):
        encode(template, messages)


def test_a_turn_that_is_not_learned_has_no_learned_end(template):
    messages = [user("What?"), assistant("A cat.", loss=False), user("Why?"), assistant("So.")]
    got = encode(template, messages)
    learned = [token for token in got["labels"] if token != -100]
    assert template.tokenizer.decode(learned) == "\nSo.<|endoftext|>"


def test_a_prompt_ends_with_the_role_and_an_answer_loses_its_line_feed(template, place):
    template.set_mode("transformers")
    try:
        got = encode(template, [user("<image>What?")], [place / "red.png"])
        conversation = [user("What?") | {"image": str(place / "red.png")}]
        expected = template.processor.apply_chat_template(
            [conversation], tokenize=True, return_dict=True, add_generation_prompt=True
        )
        assert got["input_ids"] == expected["input_ids"][0]
        drawn = template.tokenizer("\nA cat.<|endoftext|>", add_special_tokens=False)["input_ids"]
        assert template.decode_generate_ids(drawn) == "A cat."
    finally:
        template.set_mode("train")


def test_samples_of_a_packed_row_begin_again(template):
    rows = [encode(template, [user("What?"), assistant(text)]) for text in ("A.", "A cat.")]
    for row in rows:
        row["length"] = len(row["input_ids"])
    packed = template.packing_row(rows)
    assert packed["position_ids"] == [n for row in rows for n in range(row["length"])]


FOUND = """
import json, sys
from swift.model import get_model_info_meta
info, meta = get_model_info_meta(sys.argv[1])
print(json.dumps([meta.model_type, meta.loader.__module__, meta.template]))
"""


def test_children_of_the_run_entry_find_it(place):
    """swift starts itself again in another process."""
    script = place / "starts.py"
    script.write_text(
        "import subprocess, sys; sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))"
    )
    (place / "found.py").write_text(FOUND)
    command = [sys.executable, "-m", "glm4v_patched.run", str(script), str(place / "found.py")]
    done = subprocess.run(
        [*command, str(place / "published")],
        env=cpu_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [
        "chatglm4v",
        "glm4v_patched.integrations.ms_swift",
        "chatglm4v",
    ]
