"""Plug-ins without their frameworks; tests/patch/test_run.py has how they come to be registered."""

import subprocess
import sys
from pathlib import Path

import pytest

from glm4v_patched.integrations.api_check import require_members
from glm4v_patched.integrations.image_tags import move_images_first
from glm4v_patched.terminal_text import pip_install


def test_the_file_for_external_plugins_is_printed():
    command = [sys.executable, "-m", "glm4v_patched.integrations", "ms-swift"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert "register()" in Path(told.rstrip("\n")).read_text()


@pytest.mark.parametrize(
    ("content", "number", "words"),
    [
        ("<image> What?\n<image>", 2, "What?"),
        ("\nWhat?", 0, "\nWhat?"),
        ("Is <image> like <image>", 0, "Is <image> like <image>"),
        ("<image>Is <image> like\n<image>", 1, "Is <image> like\n<image>"),
    ],
)
def test_images_go_before_the_words_in_their_order(content, number, words):
    assert move_images_first(content) == (number, words)


def test_a_method_that_was_renamed_is_an_error_with_the_version(words):
    class Template:
        def encode(self): ...

    require_members(Template, ["encode"], "pytest", "1.0")
    found = {"pip": pip_install(), "version": pytest.__version__}
    with words.refused(RuntimeError, "_encode", **found):
        require_members(Template, ["encode", "_encode"], "pytest", "1.0")
