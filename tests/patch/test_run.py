"""``glm4v_patched.run`` runs what it is given as python does, and patches all that it starts.

Most tests run a copy of its two files in a package whose ``apply`` only writes its options down:
how a script is run does not depend on what is patched. The rest load the stand-in for the
published repository with the real one.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import glm4v_patched
from glm4v_patched.patch.run import find_script
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.processes import cpu_environment, heed_signals, run_with_limit, two_processes

PACKAGE = Path(glm4v_patched.__file__).parent
RUN = [sys.executable, "-m", "glm4v_patched.run"]

QUICK_PACKAGE = """
import json, os, sys
def apply(**options):
    if "refused" in options:
        raise ValueError(f"unknown option {options}")
    half_imported = [name for name in ("peft", "transformers")
        if not getattr(sys.modules.get(name), "done", True)]
    with open(os.environ["APPLIED"], "a") as file:
        print(json.dumps([options, half_imported]), file=file)
"""

# All that a script can see of how it was started.
INSPECT = """
import json, os, pickle, sys
class Pickled: pass
main = sys.modules["__main__"]
names = ("__name__", "__file__", "__package__", "__cached__", "__doc__")
print(json.dumps([sys.argv, sys.path[0], {name: globals()[name] for name in names}]))
print(type(__loader__).__name__, getattr(__spec__, "name", None), vars(main) is globals())
print(type(pickle.loads(pickle.dumps(Pickled()))) is Pickled, "annotations" in globals())
"""

# Written to a file, because several processes would mix their lines.
LOAD = """
import json, os, sys
def what_is_loaded():
    from transformers import AutoConfig, AutoModel, AutoTokenizer
    folder = os.environ["LEGACY"]
    autos = (AutoConfig, AutoModel, AutoTokenizer)
    loaded = [auto.from_pretrained(folder, trust_remote_code=True) for auto in autos]
    return [type(one).__module__.partition(".")[0] for one in loaded]
def tell(who, **more):
    with open(os.path.join(os.environ["TOLD"], f"{who}.json"), "w") as file:
        json.dump({"loaded": what_is_loaded()} | more, file)
"""
OURS = ["glm4v_patched"] * 3


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """The environment of processes with the quick package, and the file of what was applied."""
    package = tmp_path / "packages" / "glm4v_patched"
    shutil.copytree(PACKAGE / "patch" / "startup", package / "patch" / "startup")
    for name in ("run.py", "patch/run.py"):
        shutil.copyfile(PACKAGE / name, package / name)
    (package / "__init__.py").write_text(QUICK_PACKAGE)
    for name, source in {
        "transformers": "done = False\nimport transformers.utils\ndone = True",
        "peft": "done = False\nimport transformers\ndone = True",
        "failing_peft": "import peft\nraise KeyError",
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
    command = [str(part) for part in command]
    given = {name: str(value) for name, value in environment.items()}
    return subprocess.run(
        command, env=os.environ | given, capture_output=True, text=True, timeout=60
    )


def run_hooked(code: str, value: str = "1", *paths) -> subprocess.CompletedProcess:
    """Python with the variable and the folder, without ``run``."""
    others = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path]
    startup = Path(others[0]) / "glm4v_patched" / "patch" / "startup"
    path = os.pathsep.join(map(str, [startup, *paths, *others]))
    return run(sys.executable, "-c", code, GLM4V_PATCHED=value, PYTHONPATH=path)


def ended(done: subprocess.CompletedProcess) -> tuple:
    return done.returncode, done.stdout, done.stderr


# As python runs it


@pytest.mark.parametrize(
    "command",
    [
        ["script.py"],
        ["below/script.py"],
        ["link.py"],
        ["./script.py"],
        ["-m", "package"],
        ["-m", "package.module"],
    ],
    ids=" ".join,
)
def test_a_script_or_module_sees_what_it_sees_under_python(command, quick):
    for name in ("below/script.py", "script.py", "package/__main__.py", "package/module.py"):
        (quick / name).parent.mkdir(exist_ok=True)
        (quick / name).write_text(INSPECT)
    (quick / "link.py").symlink_to(quick / "below" / "script.py")
    arguments = ["one", "--", "--help", "-m", "--swiglu", "--local_rank=7", ""]
    expected = run(sys.executable, *command, *arguments)
    assert expected.returncode == 0, expected.stderr
    assert ended(run(*RUN, *command, *arguments)) == ended(expected)
    assert applied(quick) == [[{}, []]]


@pytest.mark.parametrize(
    "head", [f"#!{sys.executable}", "#!/bin/sh\n'''exec' python \"$0\" \"$@\""]
)
def test_a_command_on_path_runs_as_python_runs_it(head, quick, monkeypatch):
    command = quick / "bin" / "a-command"
    command.parent.mkdir()
    source = INSPECT if "sh" not in head else f"' '''{INSPECT}"
    command.write_text(f"{head}\n{source}")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
    expected = run(sys.executable, command, "train", "x.yaml")
    assert expected.returncode == 0, expected.stderr
    assert ended(run(*RUN, "a-command", "train", "x.yaml")) == ended(expected)


@pytest.mark.parametrize(
    "source",
    [
        "raise SystemExit('a message')",
        "def f():\n    raise ValueError('in the script')\nf()",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e",
        "this is not python",
        "import os, sys; print('written', flush=True); os._exit(9)",
        "import atexit; atexit.register(print, 'at the end'); raise KeyboardInterrupt",
        "import sys; sys.excepthook = lambda *_: print('own hook'); raise ValueError",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    ],
)
def test_a_script_ends_as_under_python(source, quick):
    (quick / "script.py").write_text(source)
    expected = run(sys.executable, "script.py")
    assert expected.returncode != 0
    assert ended(run(*RUN, "script.py")) == ended(expected)


def test_an_interrupt_reaches_the_script(quick):
    (quick / "script.py").write_text("import time; print('ready', flush=True); time.sleep(60)")
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*RUN, "script.py"], **piped, preexec_fn=heed_signals)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert "glm4v_patched" not in errors and errors.endswith("KeyboardInterrupt\n")


def test_errors_of_a_module_begin_where_it_does(quick):
    (quick / "module.py").write_text("raise ValueError('in the module')")
    done = run(*RUN, "-m", "module")
    assert (done.returncode, done.stderr.count("File ")) == (1, 1)
    assert done.stderr.endswith("ValueError: in the module\n")
    done = run(*RUN, "-m", "nothing")
    assert (done.returncode, done.stderr) == (1, "ImportError: No module named nothing\n")


# Options


ALL_OPTIONS = {
    "fused_linear_cross_entropy": True,
    "attn_implementation": "eager",
    "rms_norm": True,
    "swiglu": True,
}


@pytest.mark.parametrize(
    "given, variable, options",
    [
        (
            "--fused-linear-cross-entropy --attn-implementation eager --rms-norm --swiglu",
            {},
            ALL_OPTIONS,
        ),
        ("", {}, {}),
        ("", {"swiglu": True}, {"swiglu": True}),
        (
            "--attn-implementation sdpa",
            {"attn_implementation": "eager", "swiglu": True},
            {"attn_implementation": "sdpa", "swiglu": True},
        ),
    ],
    ids=["all", "none", "of the variable", "given wins"],
)
def test_options_reach_apply_and_the_processes_that_are_started(given, variable, options, quick):
    (quick / "script.py").write_text("import os; print(os.environ['GLM4V_PATCHED'])")
    value = json.dumps(variable) if variable else ""
    done = run(*RUN, *given.split(), "script.py", "--rms-norm", GLM4V_PATCHED=value)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n" if not options else json.loads(done.stdout) == options
    assert applied(quick) == [[options, []]]


@pytest.mark.parametrize("spelling", ["--local_rank=1", "--local-rank=1"])
def test_the_rank_that_launchers_insert_is_handed_on(spelling, quick):
    (quick / "script.py").write_text("import sys; print(sys.argv)")
    done = run(*RUN, spelling, "--swiglu", "script.py", "--lr", "1")
    assert done.stdout == f"{['script.py', spelling, '--lr', '1']}\n", done.stderr
    assert applied(quick) == [[{"swiglu": True}, []]]


@pytest.mark.parametrize(
    "arguments, value, named",
    [
        ("--rms script.py", "", "--rms"),
        ("", "", "give a script, a command, or -m and a module"),
        ("no-such.py", "", "no-such.py"),
        ("sh", "", "sh is not a Python script"),
        ("a.yaml", "", "glm4v-patched train a.yaml"),
        ("script.py", "false", "GLM4V_PATCHED='false'"),
        ("script.py", '{"swiglu": true, "swiglu": false}', "each once"),
        ("script.py", '{"refused": 1}', "unknown option {'refused': 1}"),
    ],
)
def test_mistakes_are_told_before_the_script_runs(arguments, value, named, quick):
    (quick / "script.py").write_text("print('ran')")
    (quick / "a.yaml").touch()
    done = run(*RUN, *arguments.split(), GLM4V_PATCHED=value)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr and "Traceback" not in done.stderr


def test_help_and_the_folder_are_printed_and_nothing_is_patched(quick):
    done = run(*RUN, "--help")
    assert done.returncode == 0
    assert "--attn-implementation NAME" in done.stdout and "local_rank" not in done.stdout
    folder = run(*RUN, "--startup-folder").stdout.rstrip("\n")
    assert os.listdir(folder).count("sitecustomize.py") == 1
    assert applied(quick) == []


# The processes that are started


def test_a_child_of_a_script_is_patched_with_its_options(quick):
    (quick / "script.py").write_text(
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import transformers'])"
    )
    done = run(*RUN, "--swiglu", "script.py")
    assert ended(done) == (0, "", "")
    # In the script's process and in its child.
    assert applied(quick) == [[{"swiglu": True}, []]] * 2


def test_the_variable_does_nothing_without_the_folder_nor_the_folder_without_it(quick):
    assert run(sys.executable, "-c", "import transformers", GLM4V_PATCHED=1).returncode == 0
    for value in ("", "0"):
        assert run_hooked("import transformers", value).returncode == 0
    assert applied(quick) == []
    assert run_hooked("import transformers").returncode == 0
    assert applied(quick) == [[{}, []]]


@pytest.mark.parametrize("value", ["", "1"])
def test_nothing_is_imported_when_python_starts(value, quick):
    code = "import sys; print(*sorted(sys.modules))"
    plain = run(sys.executable, "-c", code).stdout.split()
    # Some installations have a sitecustomize of their own; then it is in both.
    hooked = run_hooked(code, value).stdout.split()
    assert set(hooked) - set(plain) <= {"sitecustomize"}
    assert not {"torch", "transformers", "glm4v_patched", "json"} & set(hooked)


@pytest.mark.parametrize("value", ["", "1"])
def test_a_hidden_sitecustomize_still_runs_and_may_fail(value, quick):
    hidden = quick / "hidden" / "sitecustomize.py"
    hidden.parent.mkdir()
    source = "import sys\nsys.hidden = [__name__, __file__, __spec__.origin]\n"
    hidden.write_text(f"{source}raise ValueError('of the hidden one')")
    code = "import sys, transformers; print(*sys.hidden)"
    done = run_hooked(code, value, hidden.parent)
    assert done.returncode == 0 and "of the hidden one" in done.stderr
    assert done.stdout.split() == ["sitecustomize", str(hidden), str(hidden)]
    assert applied(quick) == ([[{}, []]] if value else [])


def test_the_patch_waits_for_packages_that_import_transformers(quick):
    value = '{"swiglu": false}'
    done = run_hooked("import peft; import transformers; import transformers.utils", value)
    assert done.returncode == 0, done.stderr
    assert applied(quick) == [[{"swiglu": False}, []]]


@pytest.mark.parametrize("value", ["yes", '{"refused": 1}'])
@pytest.mark.parametrize("first", ["transformers", "peft"])
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
    assert f"GLM4V_PATCHED={value!r}" in lines[0] or "unknown option" in lines[0]
    assert "unset GLM4V_PATCHED" in lines[0] and applied(quick) == []


def test_a_package_that_cannot_be_imported_is_an_error(quick):
    code = "import sys; sys.modules['glm4v_patched.patch.run'] = None; import transformers"
    done = run_hooked(code)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: glm-4v could not be patched (import of glm4v_patched")
    assert "install glm4v-patched for this Python" in last


# With the real package and the stand-in for the published repository


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_legacy_repository(folder / "legacy")
    return folder


def told_by(command: list, folder: Path, name: str, source: str, **environment) -> dict:
    """Run ``source`` by a command that ends with a script; what its processes told, by who."""
    told = folder / name
    told.mkdir()
    script = told / "script.py"
    script.write_text(LOAD + source)
    environment |= {"LEGACY": folder / "legacy", "TOLD": told, "HF_MODULES_CACHE": told / "cache"}
    everything = cpu_environment() | {key: str(value) for key, value in environment.items()}
    ended = run_with_limit([*map(str, command), str(script), "--lr", "1"], 120, everything)
    assert ended.status == 0, ended.output[-8000:]
    return {path.stem: json.loads(path.read_text()) for path in told.glob("*.json")}


@pytest.mark.newest  # how Python and launchers start children
def test_a_script_and_its_children_get_our_classes(folder):
    source = """
if __name__ == "__main__":
    import multiprocessing, subprocess
    code = f"import sys; sys.path.append({os.path.dirname(__file__)!r}); import script as s; "
    child = subprocess.Popen([sys.executable, "-c", code + "s.tell('child')"])
    spawned = multiprocessing.get_context("spawn").Process(target=tell, args=("spawned",))
    spawned.start()
    tell("script", argv=sys.argv[1:])
    spawned.join()
    sys.exit(child.wait() or spawned.exitcode)
"""
    told = told_by(RUN, folder, "children", source)
    assert told == {
        "script": {"loaded": OURS, "argv": ["--lr", "1"]},
        "child": {"loaded": OURS},
        "spawned": {"loaded": OURS},
    }


@pytest.mark.newest  # how Python and launchers start children
def test_two_processes_of_torchrun_get_our_classes(folder):
    source = """
import torch.distributed as dist
dist.init_process_group("gloo")
everywhere = [None, None]
dist.all_gather_object(everywhere, what_is_loaded())
tell(f"rank{dist.get_rank()}", everywhere=everywhere, argv=sys.argv[1:])
dist.destroy_process_group()
"""
    told = told_by(two_processes("-m", "glm4v_patched.run"), folder, "torchrun", source)
    expected = {"loaded": OURS, "everywhere": [OURS, OURS], "argv": ["--lr", "1"]}
    assert told == {"rank0": expected, "rank1": expected}


@pytest.mark.newest  # how Python and launchers start children
def test_two_processes_of_deepspeed_get_what_deepspeed_gives_them(quick):
    """With the quick package: DeepSpeed itself takes long enough to start."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    (quick / "script.py").write_text(
        "import os, sys; open('rank' + os.environ['RANK'], 'w').write(' '.join(sys.argv[1:]))"
    )
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
    command += ["--master_port", str(port), "--module", "glm4v_patched.run"]
    paths = os.pathsep.join([os.environ["PYTHONPATH"], cpu_environment()["PYTHONPATH"]])
    environment = cpu_environment() | {"PYTHONPATH": paths}
    ended = run_with_limit([*command, "--swiglu", "script.py", "--lr", "1"], 60, environment)
    assert ended.status == 0, ended.output[-8000:]
    arguments = [(quick / f"rank{rank}").read_text() for rank in range(2)]
    assert arguments == [f"--local_rank={rank} --lr 1" for rank in range(2)]
    assert applied(quick) == [[{"swiglu": True}, []]] * 2


FIRST_IMPORTS = [
    "import transformers; transformers.AutoModel",
    "from transformers import AutoModel",
    "from transformers.models.auto.modeling_auto import AutoModelForCausalLM",
    "import peft",
    "from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM",
    "import glm4v_patched; glm4v_patched.apply()",
]


def test_whatever_is_imported_first_the_variable_patches(folder):
    """Each in a fork of one process, which has imported torch for all of them, with those parts of
    it that transformers imports."""
    source = f"""
import multiprocessing
import torch._dynamo, torch.distributed.checkpoint, torch.distributed.tensor, torch.export
assert not {{"transformers", "huggingface_hub", "peft", "accelerate"}} & sys.modules.keys()
def attempt(value, first):
    os.environ["GLM4V_PATCHED"] = value
    try:
        exec(first)
        import transformers
    except RuntimeError as error:
        return str(error)
    config = transformers.AutoConfig.from_pretrained(os.environ["LEGACY"], trust_remote_code=True)
    return type(config).__module__.partition(".")[0]
cases = [("1", first) for first in {FIRST_IMPORTS!r}]
cases.append(('{{"rmsnorm": true}}', "from transformers import AutoModel"))
with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
    results = pool.starmap(attempt, cases, chunksize=1)
json.dump(results, open(os.path.join(os.environ["TOLD"], "results.json"), "w"))
"""
    path = os.pathsep.join([str(PACKAGE / "patch" / "startup"), cpu_environment()["PYTHONPATH"]])
    told = told_by([sys.executable], folder, "first", source, GLM4V_PATCHED=1, PYTHONPATH=path)
    *loaded, error = told["results"]
    assert dict(zip(FIRST_IMPORTS, loaded, strict=True)) == dict.fromkeys(
        FIRST_IMPORTS, "glm4v_patched"
    )
    assert "GLM4V_PATCHED='{\"rmsnorm\": true}': unknown option rmsnorm" in error


def test_a_name_is_that_of_a_command_first_as_for_a_shell(tmp_path, monkeypatch):
    """What lies in whatever folder one is in is run only by its path."""
    command = tmp_path / "bin" / "train-it"
    command.parent.mkdir()
    here = tmp_path / "train-it"
    for path in (command, here):
        path.write_text(f"#!{sys.executable}\n")
        path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(command.parent))
    assert find_script("train-it") == str(command)
    assert find_script("./train-it") == "./train-it"
    # Beside a python whose environment is not active.
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(command.parent / "python"))
    assert find_script("train-it") == str(command)
    command.unlink()
    assert find_script("train-it") == "train-it"
