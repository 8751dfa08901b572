"""Start a Python script, module or command with glm-4v patched, also in its child processes.

    python -m glm4v_patched.run train.py --lr 1e-5
    python -m glm4v_patched.run -m package.train --lr 1e-5
    python -m glm4v_patched.run llamafactory-cli train recipe.yaml
    torchrun --nproc_per_node 2 -m glm4v_patched.run train.py --lr 1e-5
    deepspeed --module glm4v_patched.run train.py --lr 1e-5

This process replaces itself (``exec``) by a Python process with two environment variables:
``GLM4V_PATCHED`` has the options, and ``PYTHONPATH`` begins with the folder ``startup``. Child
processes inherit both. At startup, Python runs ``sitecustomize.py`` in that folder, which patches
glm-4v. If you cannot change a launch command, set the two variables instead:

    export GLM4V_PATCHED=1 PYTHONPATH=$(python -m glm4v_patched.run --startup-folder)
"""

import argparse
import json
import os
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import glm4v_patched

PATCHED_VARIABLE = "GLM4V_PATCHED"
STARTUP_FOLDER = Path(__file__).resolve().with_name("startup")
# Options for the script that older launchers of DeepSpeed and torch put before the script's name.
LAUNCHER_OPTIONS = ("--local_rank", "--local-rank")


def main() -> None:
    """Parse the command line and replace this process by the patched Python."""
    parser = _run_parser()
    arguments = vars(parser.parse_args())
    if arguments.pop("startup_folder"):
        print(STARTUP_FOLDER)
        return
    is_module, command = arguments.pop("m"), arguments.pop("command")
    forwarded = [f"{n}={v}" for n in LAUNCHER_OPTIONS if (v := arguments.pop(n)) is not None]
    if not command:
        parser.error("give a script, a command, or -m and a module")
    if sys.flags.ignore_environment or sys.flags.no_site:
        parser.error(
            "python -E, -I and -S ignore PYTHONPATH or sitecustomize.py, by which the script is "
            "patched: leave them out"
        )
    name, *rest = command
    try:
        target = ["-m", name] if is_module else [find_script(os.path.expanduser(name))]
        options = options_from_environment()
    except ValueError as error:
        parser.error(str(error))
    patch_child_processes(options | {n: v for n, v in arguments.items() if v is not None})
    os.execv(sys.executable, [sys.executable, *_interpreter_flags(), *target, *forwarded, *rest])


def _interpreter_flags() -> list[str]:
    """Return the options of the Python interpreter itself, such as ``-u``."""
    # They come before the script, or before "-m" and the module.
    flags = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    return flags[:-2] if flags[-2:-1] == ["-m"] else flags[:-1]


def find_script(name: str) -> str:
    """Return the path of a script file, or of a command that is a Python script.

    A name without a folder and without ``.py`` means a command, as in a shell. If there is no such
    command, it means a file in the current folder.

    Raises:
        ValueError: there is no such file or command, or it is not a Python script.
    """
    # If a virtual environment is not activated, its commands are not on PATH but beside its python.
    path = shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))
    if os.path.isfile(name) and (path is None or os.path.dirname(name) or name.endswith(".py")):
        if name.endswith((".yaml", ".yml", ".json")):
            raise ValueError(
                f"{name} is not a script; write the command that reads this file before its name. "
                f"To train a recipe of this package, run: glm4v-patched train {name}"
            )
        return name
    if path is None:
        raise ValueError(f"there is no file {name}, and no command of this name on PATH")
    with open(path, "rb") as file:
        # pip writes the interpreter to the second line if its path is too long for the first.
        head = file.readline() + file.readline()
    if not (head.startswith(b"#!") and b"python" in head):
        raise ValueError(
            f"{path} is not a Python script. To patch the Python processes that it starts, run: "
            f"export {PATCHED_VARIABLE}=1 PYTHONPATH={shlex.quote(str(STARTUP_FOLDER))}"
        )
    return path


def options_from_environment() -> dict:
    """Return the keyword arguments of ``apply`` from ``GLM4V_PATCHED``.

    With the value 0, this command still patches the processes that it starts; all other Python
    processes stay unpatched.

    Raises:
        ValueError: the value is neither empty, 0, 1 nor a JSON object.
    """
    value = os.environ.get(PATCHED_VARIABLE, "")
    if value in ("", "0", "1"):
        return {}
    options = None
    with suppress(ValueError):
        options = json.loads(value)
    if not isinstance(options, dict):
        raise ValueError(
            f"{PATCHED_VARIABLE}={value!r} is neither 1 nor a JSON object with options of "
            'glm4v_patched.apply, such as {"fused_linear_cross_entropy": true}; expected one of '
            "these, or 0 to patch only what glm4v_patched.run starts"
        )
    return options


def patch_child_processes(options: dict) -> None:
    """Set the environment so that Python processes started from here on are patched."""
    os.environ[PATCHED_VARIABLE] = json.dumps(options) if options else "1"
    startup = str(STARTUP_FOLDER)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    other_paths = [path for path in paths if path not in ("", startup)]
    os.environ["PYTHONPATH"] = os.pathsep.join([startup, *other_paths])


def apply_from_environment() -> None:
    """Call ``apply`` with the options of the environment."""
    glm4v_patched.apply(**options_from_environment())


def _run_parser() -> argparse.ArgumentParser:
    introduction, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        "python -m glm4v_patched.run",
        usage="%(prog)s [options] (script.py | command | -m module) [arguments of the script]",
        description=introduction,
        allow_abbrev=False,
    )
    flags = {
        "--fused-linear-cross-entropy": "compute the training loss without the logits of all "
        "positions",
        "--startup-folder": "print the folder to put on PYTHONPATH, for use with "
        f"{PATCHED_VARIABLE}=1, and exit",
        "-m": "run a module, whose name follows",
    }
    for name, help_text in flags.items():
        parser.add_argument(name, action="store_true", default=None, help=help_text)
    help_text = "attention of models that are loaded without attn_implementation"
    parser.add_argument("--attn-implementation", metavar="NAME", help=help_text)
    for name in LAUNCHER_OPTIONS:
        parser.add_argument(name, dest=name, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
