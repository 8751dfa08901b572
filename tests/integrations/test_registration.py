"""Plug-ins are registered in every process that imports a framework, and only there.

With a package that stands in for ours and frameworks that are nearly empty, so that it is quick.
"""

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
MODULES = {
    "axolotl/model_support/__init__.py": "",
    "openrlhf/models/model.py": "",
    "swift/model/__init__.py": "",
    "llamafactory/data/template.py": "",
    "llamafactory/model/model_utils/visual.py": "",
}
PLUGIN = """
import json, os, sys
def register():
    with open(os.environ["REGISTERED"], "a") as file:
        print(json.dumps([__name__.rpartition(".")[2], os.getpid()]), file=file)
"""
IMPORT = (
    "import swift.model, llamafactory.data.template, llamafactory.model.model_utils.visual\n"
    "import axolotl.model_support, openrlhf.models.model\n"
)
CHILD = "import subprocess, sys; subprocess.run([sys.executable, 'child.py'], check=True)\n"
NAMES = ["ms_swift", "llamafactory", "llamafactory_parts", "axolotl", "openrlhf"]


@pytest.fixture
def quick(tmp_path, monkeypatch):
    package = tmp_path / "packages" / "glm4v_patched"
    shutil.copytree(PACKAGE / "patch" / "startup", package / "patch" / "startup")
    for name in ("run.py", "patch/run.py"):
        shutil.copyfile(PACKAGE / name, package / name)
    (package / "__init__.py").write_text("def apply(**options): pass")
    (package / "integrations").mkdir()
    for name in NAMES:
        (package / "integrations" / f"{name}.py").write_text(PLUGIN)
    for name, source in MODULES.items():
        path = package.parent / name
        path.parent.mkdir(parents=True)
        path.write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("REGISTERED", str(tmp_path / "registered"))
    monkeypatch.delenv("GLM4V_PATCHED", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    environment = os.environ | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def registered(folder: Path) -> list[list[str]]:
    """For each process, what was registered in it."""
    path = folder / "registered"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    pids = dict.fromkeys(pid for _, pid in lines)
    return [[name for name, of in lines if of == pid] for pid in pids]


def test_a_script_and_its_children_have_them(quick):
    (quick / "script.py").write_text(IMPORT + CHILD)
    (quick / "child.py").write_text(IMPORT)
    done = run(sys.executable, "-m", "glm4v_patched.run", "script.py")
    assert done.returncode == 0, done.stderr
    assert registered(quick) == [NAMES, NAMES]


def test_the_variables_do_without_the_run_entry(quick):
    paths = os.pathsep.join([str(STARTUP), os.environ["PYTHONPATH"]])
    for value, want in (("0", []), ("1", [NAMES])):
        done = run(sys.executable, "-c", IMPORT, GLM4V_PATCHED=value, PYTHONPATH=paths)
        assert done.returncode == 0, done.stderr
        assert registered(quick) == want


def test_what_a_plug_in_raises_comes_out_of_the_import(quick):
    path = quick / "packages" / "glm4v_patched" / "integrations" / "ms_swift.py"
    path.write_text("def register(): raise RuntimeError('ms-swift 9 has no _encode')")
    (quick / "script.py").write_text("import swift.model")
    done = run(sys.executable, "-m", "glm4v_patched.run", "script.py")
    assert done.returncode == 1
    assert "RuntimeError: ms-swift 9 has no _encode" in done.stderr


def test_the_file_for_external_plugins_is_printed():
    done = run(sys.executable, "-m", "glm4v_patched.integrations", "ms-swift")
    path = Path(done.stdout.rstrip("\n"))
    assert path.is_file() and "register()" in path.read_text()
    assert "ms-swift" in run(sys.executable, "-m", "glm4v_patched.integrations", "trl").stderr


@pytest.mark.parametrize(
    ("content", "number", "words"),
    [
        ("<image>\n<image>\nWhat?", 2, "What?"),
        ("What?\n<image>", 1, "What?"),
        ("<image>", 1, ""),
        ("\nWhat?", 0, "\nWhat?"),
        ("Is <image> this?", 0, "Is <image> this?"),
        ("<image> What?\n<image>", 2, "What?"),
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
