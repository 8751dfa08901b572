"""Plug-ins without their frameworks. tests/patch/test_run.py tests that they are registered."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from glm4v_patched.integrations.api_check import require_members
from glm4v_patched.integrations.image_tags import move_images_first
from glm4v_patched.terminal_text import pip_install


def test_the_file_for_external_plugins_is_printed():
    command = [sys.executable, "-m", "glm4v_patched.integrations", "ms-swift"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert "register()" in Path(printed.rstrip("\n")).read_text()


@pytest.mark.parametrize(
    "names", [[], ["ms_swift"], ["ms-swift", "axolotl"]], ids=["no name", "ms_swift", "two names"]
)
def test_other_names_print_no_file_and_the_exit_status_is_not_0(monkeypatch, capsys, names):
    monkeypatch.setattr(sys, "argv", ["integrations", *names])
    with pytest.raises(SystemExit) as exit:
        runpy.run_module("glm4v_patched.integrations", run_name="__main__")
    assert exit.value.code not in (None, 0) and not capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "num_images", "text"),
    [
        ("<image> What?\n<image>", 2, "What?"),
        ("\n<image>\nWhat?\n <image>\n<image> \n", 3, "What?"),
        ("\nWhat?", 0, "\nWhat?"),
        ("Is <image> like <image>", 0, "Is <image> like <image>"),
        ("<image>Is <image> like\n<image>", 1, "Is <image> like\n<image>"),
    ],
)
def test_image_tags_move_before_the_text_in_their_order(content, num_images, text):
    assert move_images_first(content) == (num_images, text)


def test_a_renamed_method_is_an_error_with_both_versions(words):
    class Template:
        def encode(self): ...

    require_members(Template, ["encode"], "pytest", "1.0")
    versions = {"pip": pip_install(), "version": pytest.__version__}
    with words.refused(RuntimeError, "_encode", **versions):
        require_members(Template, ["encode", "_encode"], "pytest", "1.0")
