"""``glm4v_patched.run`` runs a script as python does, patched in all processes that it starts.

Most tests run a copy of its two files in a package whose ``apply`` only logs its options: how a
script is run does not depend on what is patched. The others load the stand-in for the published
repository with the real package.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import glm4v_patched
from glm4v_patched.patch.run import (
    PATCHED_VARIABLE,
    STARTUP_FOLDER,
    find_script,
    patch_child_processes,
)
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.processes import cpu_environment, run_with_limit

PACKAGE = Path(glm4v_patched.__file__).parent
RUN = [sys.executable, "-m", "glm4v_patched.run"]

QUICK_PACKAGE = """
import json, os, sys
def apply(**options):
    if "refused" in options:
        raise TypeError(f"unknown option {options}")
    half_imported = [name for name in ("peft", "transformers")
        if not getattr(sys.modules.get(name), "done", True)]
    with open(os.environ["APPLIED"], "a") as file:
        print(json.dumps([options, half_imported]), file=file)
"""

# Prints everything that a script can see of how it was started.
INSPECT = """
import json, sys
names = ("__name__", "__file__", "__package__")
print(json.dumps([sys.argv, sys.path[0], {name: globals()[name] for name in names}]))
print(sys.flags.optimize, sys.dont_write_bytecode, getattr(__spec__, "name", None))
"""


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """Set the environment for processes with a package whose ``apply`` only logs its options."""
    package = tmp_path / "packages" / "glm4v_patched"
    shutil.copytree(PACKAGE / "patch" / "startup", package / "patch" / "startup")
    for name in ("run.py", "patch/run.py"):
        shutil.copyfile(PACKAGE / name, package / name)
    (package / "__init__.py").write_text(QUICK_PACKAGE)
    for name, source in {
        "transformers": "done = False\nimport transformers.utils\ndone = True",
        "peft": "done = False\nimport transformers\ndone = True",
    }.items():
        (package.parent / name).mkdir()
        (package.parent / name / "__init__.py").write_text(source)
    (package.parent / "transformers" / "utils.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("APPLIED", str(tmp_path / "applied"))
    monkeypatch.delenv("GLM4V_PATCHED", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def applied(folder: Path) -> list:
    path = folder / "applied"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(*command, **environment) -> subprocess.CompletedProcess:
    command = [str(argument) for argument in command]
    changes = {name: str(value) for name, value in environment.items()}
    return subprocess.run(
        command, env=os.environ | changes, capture_output=True, text=True, timeout=60
    )


def run_hooked(code: str, value: str = "1", *paths) -> subprocess.CompletedProcess:
    """Run code with GLM4V_PATCHED and the startup folder on PYTHONPATH, without ``run``."""
    others = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path]
    startup = Path(others[0]) / "glm4v_patched" / "patch" / "startup"
    path = os.pathsep.join(map(str, [startup, *paths, *others]))
    return run(sys.executable, "-c", code, GLM4V_PATCHED=value, PYTHONPATH=path)


def outcome(done: subprocess.CompletedProcess) -> tuple:
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "command", [["below/script.py"], ["-m", "package"], ["./a-command"]], ids=" ".join
)
def test_a_script_or_module_sees_what_it_sees_under_python(command, quick):
    for name in ("below/script.py", "package/__main__.py"):
        (quick / name).parent.mkdir(exist_ok=True)
        (quick / name).write_text(INSPECT)
    # pip writes a command so if the interpreter's path is too long for the first line.
    head = "#!/bin/sh\n'''exec' python \"$0\" \"$@\"\n' '''"
    (quick / "a-command").write_text(head + INSPECT)
    (quick / "a-command").chmod(0o755)
    python, *entry = RUN
    flags = [python, "-B", "-O"]
    arguments = ["one", "--", "--help", "-m", "--fused-linear-cross-entropy", "--local_rank=7", ""]
    expected = run(*flags, *command, *arguments)
    assert expected.returncode == 0, expected.stderr
    assert outcome(run(*flags, *entry, *command, *arguments)) == outcome(expected)


def test_options_that_launchers_put_before_the_script_reach_the_script(quick):
    (quick / "script.py").write_text("import sys; print(*sys.argv); 1 / 0")
    done = run(*RUN, "--local_rank=3", "--fused-linear-cross-entropy", "script.py", "--lr", "1")
    assert done.stdout.split() == ["script.py", "--local_rank=3", "--lr", "1"], done.stderr
    assert done.returncode == 1 and done.stderr.count("File ") == 1


CHILDREN = """
import multiprocessing, subprocess, sys
def load():
    import transformers
if __name__ == "__main__":
    code = "import os, transformers; print(os.environ['GLM4V_PATCHED'])"
    subprocess.run([sys.executable, "-c", code])
    spawned = multiprocessing.get_context("spawn").Process(target=load)
    spawned.start()
    spawned.join()
"""


@pytest.mark.parametrize(
    "arguments, value, options",
    [
        ("", "", {}),
        ("", "0", {}),
        (
            "--attn-implementation sdpa",
            '{"attn_implementation": "eager", "fused_linear_cross_entropy": true}',
            {"attn_implementation": "sdpa", "fused_linear_cross_entropy": True},
        ),
    ],
    ids=["none", "switched off outside", "command line wins"],
)
def test_options_reach_apply_and_child_processes(arguments, value, options, quick):
    (quick / "script.py").write_text(CHILDREN)
    (quick / "sitecustomize.py").touch()  # another one, which ours shadows
    path = os.pathsep.join([str(quick), os.environ["PYTHONPATH"]])
    environment = {"GLM4V_PATCHED": value, "PYTHONPATH": path}
    done = run(*RUN, *arguments.split(), "script.py", "--fused-linear-cross-entropy", **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n" if not options else json.loads(done.stdout) == options
    assert applied(quick) == [[options, []]] * 2


@pytest.mark.parametrize(
    "arguments, value, message",
    [
        ("--rms script.py", "", "--rms"),
        ("sh", "", "sh is not a Python script"),
        ("script.py", "false", "GLM4V_PATCHED='false'"),
    ],
)
def test_mistakes_are_reported_before_the_script_runs(arguments, value, message, quick):
    (quick / "script.py").write_text("print('ran')")
    done = run(*RUN, *arguments.split(), GLM4V_PATCHED=value)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and "Traceback" not in done.stderr


def test_a_python_that_reads_no_startup_file_is_refused(quick):
    (quick / "script.py").write_text("print('ran')")
    done = run(sys.executable, "-S", *RUN[1:], "script.py")
    assert (done.returncode, done.stdout) == (2, "") and "-E, -I and -S" in done.stderr


@pytest.mark.parametrize("value", ["", "0", "1"])
def test_a_hidden_sitecustomize_still_runs_and_may_fail(value, quick):
    hidden = quick / "hidden" / "sitecustomize.py"
    hidden.parent.mkdir()
    source = "import sys\nsys.hidden = [__name__, __file__, __spec__.origin]\n"
    hidden.write_text(f"{source}raise ValueError('of the hidden one')")
    code = "import sys, transformers; print(*sys.hidden)"
    done = run_hooked(code, value, hidden.parent)
    assert done.returncode == 0 and "of the hidden one" in done.stderr
    assert done.stdout.split() == ["sitecustomize", str(hidden), str(hidden)]
    assert applied(quick) == ([[{}, []]] if value == "1" else [])


@pytest.mark.parametrize("first, value", [("transformers", "yes"), ("peft", '{"refused": 1}')])
def test_errors_come_out_of_the_import_of_transformers_each_time(first, value, quick):
    code = f"""
for name in ({first!r}, "transformers", "transformers"):
    try:
        __import__(name)
    except ImportError:
        pass
    except RuntimeError as error:
        print(error)
"""
    done = run_hooked(code, value)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and len(set(lines)) == 1
    assert f"GLM4V_PATCHED={value!r}" in lines[0] and "unset GLM4V_PATCHED" in lines[0]
    assert applied(quick) == []


# Plug-ins by the module whose import registers them.
PLUGINS = {
    "swift.model": "ms_swift",
    "llamafactory.data.template": "llamafactory",
    "llamafactory.model.model_utils.visual": "llamafactory_composite",
    "axolotl.model_support": "axolotl",
    "openrlhf.models.model": "openrlhf",
}
PLUGIN = """
import json, os
def register():
    with open("registered", "a") as file:
        print(json.dumps([__name__.rpartition(".")[2], os.getpid()]), file=file)
"""


def registered(done: subprocess.CompletedProcess) -> list[list[str]]:
    """Return the names of the plug-ins that were registered in each process of a command."""
    assert done.returncode == 0, done.stderr
    file = Path("registered")
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    file.unlink(missing_ok=True)
    pids = dict.fromkeys(pid for _, pid in lines)
    return [[name for name, owner in lines if owner == pid] for pid in pids]


def test_plug_ins_are_registered_in_every_process_that_imports_their_framework(quick):
    packages, names = quick / "packages", [*PLUGINS.values()]
    (packages / "glm4v_patched" / "integrations").mkdir()
    for module, plugin in PLUGINS.items():
        (packages / "glm4v_patched" / "integrations" / f"{plugin}.py").write_text(PLUGIN)
        path = packages / module.replace(".", "/") / "__init__.py"
        path.parent.mkdir(parents=True)
        path.touch()
    imports = "".join(f"import {name}\n" for name in PLUGINS)
    child = "import subprocess, sys; subprocess.run([sys.executable, 'child.py'], check=True)\n"
    Path("script.py").write_text(imports + child)
    Path("child.py").write_text(imports)
    assert registered(run(*RUN, "script.py")) == [names, names]
    # The two environment variables work without the run entry.
    assert registered(run_hooked(imports)) == [names]
    assert registered(run_hooked(imports, "0")) == []
    # transformers is also patched if a framework imports it.
    (quick / "applied").unlink(missing_ok=True)
    assert registered(run_hooked(f"import {next(iter(PLUGINS))}\nimport peft"))
    assert applied(quick) == [[{}, []]]  # and not while transformers or peft is half imported
    # Errors of a plug-in are raised from the framework's import.
    error = "RuntimeError('ms-swift 9 has no _encode')"
    plugin = packages / "glm4v_patched" / "integrations" / "ms_swift.py"
    plugin.write_text(f"def register(): raise {error}")
    done = run(*RUN, "script.py")
    assert done.returncode == 1 and "RuntimeError: ms-swift 9 has no _encode" in done.stderr


FIRST_IMPORTS = [
    "from transformers.models.auto.modeling_auto import AutoModelForCausalLM",
    "import peft",
    "import glm4v_patched; glm4v_patched.apply()",
]
EACH_IN_A_FORK = f"""
import json, multiprocessing, sys
import torch._dynamo, torch.distributed.checkpoint, torch.distributed.tensor, torch.export
assert not {{"transformers", "huggingface_hub", "peft", "accelerate"}} & sys.modules.keys()
def attempt(first):
    exec(first)
    import transformers
    config = transformers.AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
    return type(config).__module__.partition(".")[0]
with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
    print(json.dumps(pool.map(attempt, {FIRST_IMPORTS!r}, chunksize=1)))
"""


def test_the_variable_patches_whatever_is_imported_first(tmp_path):
    """Runs the real package; each case is a fork of one process that has imported torch."""
    write_legacy_repository(tmp_path / "legacy")
    path = os.pathsep.join([str(PACKAGE / "patch" / "startup"), cpu_environment()["PYTHONPATH"]])
    environment = cpu_environment() | {"GLM4V_PATCHED": "1", "PYTHONPATH": path}
    environment |= {"HF_MODULES_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", EACH_IN_A_FORK, str(tmp_path / "legacy")]
    result = run_with_limit(command, 120, environment)
    assert result.status == 0, result.output[-8000:]
    assert json.loads(result.output.splitlines()[-1]) == ["glm4v_patched"] * len(FIRST_IMPORTS)


def test_a_name_is_that_of_a_command_first_as_for_a_shell(tmp_path, monkeypatch):
    """A script in the current folder is run only by its path."""
    command = tmp_path / "bin" / "train-it"
    command.parent.mkdir()
    script = tmp_path / "train-it"
    for path in (command, script):
        path.write_text(f"#!{sys.executable}\n")
        path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(command.parent))
    assert find_script("train-it") == str(command)
    assert find_script("./train-it") == "./train-it"
    script.write_text("import sys")  # named by its path, it needs no first line for a shell
    assert find_script("./train-it") == "./train-it"
    # The command is beside a python whose environment is not activated.
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(command.parent / "python"))
    assert find_script("train-it") == str(command)
    command.unlink()
    assert find_script("train-it") == "train-it"


@pytest.mark.parametrize(
    ("before", "others"), [("/other", ["/other"]), ("", []), (":/other:", ["/other"])]
)
def test_pythonpath_gets_the_startup_folder_once_and_no_empty_entry_which_is_the_current_folder(
    monkeypatch, before, others
):
    monkeypatch.setenv("PYTHONPATH", before)
    monkeypatch.setenv(PATCHED_VARIABLE, "")
    for options in ({}, {"attn_implementation": "eager"}):  # a script that runs a script
        patch_child_processes(options)
        assert os.environ["PYTHONPATH"] == os.pathsep.join([str(STARTUP_FOLDER), *others])


def test_a_script_in_the_home_folder_is_found(quick, monkeypatch):
    monkeypatch.setenv("HOME", str(quick))
    (quick / "script.py").write_text("import sys; print(sys.argv[0])")
    assert run(*RUN, "~/script.py").stdout == f"{quick}/script.py\n"
    error = run(*RUN, "$HOME/script.py").stderr
    assert "there is no file $HOME/script.py" in error
