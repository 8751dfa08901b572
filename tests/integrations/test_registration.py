"""Plug-ins are registered in every process that imports a framework, and only there: with a package
that stands in for ours and empty frameworks, so that it is quick."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import glm4v_patched
from glm4v_patched.integrations.api_check import require_members
from glm4v_patched.integrations.image_places import images_first
from glm4v_patched.patch.run import STARTUP
from glm4v_patched.terminal_text import pip_install

PACKAGE = Path(glm4v_patched.__file__).parent
# By the module that it waits for.
PLUGINS = {
    "swift.model": "ms_swift",
    "llamafactory.data.template": "llamafactory",
    "llamafactory.model.model_utils.visual": "llamafactory_parts",
    "axolotl.model_support": "axolotl",
    "openrlhf.models.model": "openrlhf",
}
PLUGIN = """
import json, os
def register():
    with open("registered", "a") as file:
        print(json.dumps([__name__.rpartition(".")[2], os.getpid()]), file=file)
"""
IMPORT = "".join(f"import {name}\n" for name in PLUGINS)
NAMES = [*PLUGINS.values()]
RUN = (sys.executable, "-m", "glm4v_patched.run")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    environment = os.environ | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def registered(*command: str, **environment: str) -> list[list[str]]:
    """For each process of a command, what was registered in it."""
    Path("registered").write_text("")
    done = run(*command, **environment)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in Path("registered").read_text().splitlines()]
    pids = dict.fromkeys(pid for _, pid in lines)
    return [[name for name, of in lines if of == pid] for pid in pids]


def test_a_process_and_its_children_have_them(tmp_path, monkeypatch):
    package = tmp_path / "packages" / "glm4v_patched"
    shutil.copytree(PACKAGE / "patch" / "startup", package / "patch" / "startup")
    for name in ("run.py", "patch/run.py"):
        shutil.copyfile(PACKAGE / name, package / name)
    (package / "__init__.py").write_text("def apply(**options): pass")
    (package / "integrations").mkdir()
    for module, plugin in PLUGINS.items():
        (package / "integrations" / f"{plugin}.py").write_text(PLUGIN)
        path = package.parent / module.replace(".", "/") / "__init__.py"
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.delenv("GLM4V_PATCHED", raising=False)
    monkeypatch.chdir(tmp_path)
    child = "import subprocess, sys; subprocess.run([sys.executable, 'child.py'], check=True)\n"
    Path("script.py").write_text(IMPORT + child)
    Path("child.py").write_text(IMPORT)
    assert registered(*RUN, "script.py") == [NAMES, NAMES]
    # The variables do without the run entry.
    paths = {"PYTHONPATH": os.pathsep.join([str(STARTUP), os.environ["PYTHONPATH"]])}
    assert registered(sys.executable, "child.py", GLM4V_PATCHED="1", **paths) == [NAMES]
    assert registered(sys.executable, "child.py", GLM4V_PATCHED="0", **paths) == []
    # What a plug-in raises comes out of the import.
    error = "RuntimeError('ms-swift 9 has no _encode')"
    (package / "integrations" / "ms_swift.py").write_text(f"def register(): raise {error}")
    done = run(*RUN, "script.py")
    assert done.returncode == 1 and "RuntimeError: ms-swift 9 has no _encode" in done.stderr


def test_the_file_for_external_plugins_is_printed():
    command = (sys.executable, "-m", "glm4v_patched.integrations", "ms-swift")
    path = Path(run(*command).stdout.rstrip("\n"))
    assert path.is_file() and "register()" in path.read_text()


@pytest.mark.parametrize(
    ("content", "number", "words"),
    [
        ("<image> What?\n<image>", 2, "What?"),
        ("\nWhat?", 0, "\nWhat?"),
        ("Is <image> like <image>", 0, "Is <image> like <image>"),
        ("<image>Is <image> like\n<image>", 1, "Is <image> like\n<image>"),
    ],
)
def test_pictures_go_before_the_words_in_their_order(content, number, words):
    assert images_first(content) == (number, words)


def test_a_method_that_was_renamed_is_an_error_with_the_version(words):
    class Template:
        def encode(self): ...

    require_members(Template, ["encode"], "pytest", "1.0")
    found = {"pip": pip_install(), "version": pytest.__version__}
    with words.refused(RuntimeError, "_encode", **found):
        require_members(Template, ["encode", "_encode"], "pytest", "1.0")
