"""What tests of chats say, and a process that has only a saved folder."""

import textwrap

from PIL import Image

from tests.helpers.fresh_process import run_without_package

IMAGE = "<|begin_of_image|><|endoftext|><|end_of_image|>"


def user(content, **rest) -> list[dict]:
    return [{"role": "user", "content": content, **rest}]


def picture(color="red", size=(30, 20)) -> Image.Image:
    return Image.new("RGB", size, color)


def printed_without_package(script, folder, tmp_path) -> str:
    """The last line that a script prints where this package cannot be imported."""
    head = "import sys\nsys.modules['glm4v_patched'] = None\nfolder = sys.argv[1]\n"
    printed = run_without_package(head + textwrap.dedent(script), tmp_path, str(folder))
    return printed.strip().splitlines()[-1]
