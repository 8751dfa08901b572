"""Start python with a script, module or command, with glm-4v patched in it and in all it starts.

    python -m glm4v_patched.run train.py --lr 1e-5
    python -m glm4v_patched.run -m package.train --lr 1e-5
    python -m glm4v_patched.run llamafactory-cli train recipe.yaml
    torchrun --nproc_per_node 2 -m glm4v_patched.run train.py --lr 1e-5
    deepspeed --module glm4v_patched.run train.py --lr 1e-5

This process becomes that python, which has ``GLM4V_PATCHED``, the options, and a ``PYTHONPATH``
with the folder ``startup``, whose ``sitecustomize.py`` reads it; so have all processes that the
script starts. Where this command has no place, the two do without it:

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
# DeepSpeed's launcher and torch's older one put these before the script, for the script.
LAUNCHER_OPTIONS = ("--local_rank", "--local-rank")


def main() -> None:
    parser = _run_parser()
    given = vars(parser.parse_args())
    if given.pop("startup_folder"):
        print(STARTUP_FOLDER)
        return
    is_module, command = given.pop("m"), given.pop("command")
    handed_on = [f"{n}={v}" for n in LAUNCHER_OPTIONS if (v := given.pop(n)) is not None]
    if not command:
        parser.error("give a script, a command, or -m and a module")
    if sys.flags.ignore_environment or sys.flags.no_site:
        parser.error("python -E, -I and -S do not read what patches the script: leave them out")
    name, *rest = command
    try:
        target = ["-m", name] if is_module else [find_script(os.path.expanduser(name))]
        options = options_from_environment()
    except ValueError as error:
        parser.error(str(error))
    patch_child_processes(options | {n: v for n, v in given.items() if v is not None})
    os.execv(sys.executable, [sys.executable, *_flags(), *target, *handed_on, *rest])


def _flags() -> list[str]:
    """Return what python was given before this module or file, such as ``-u``."""
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    return before[:-2] if before[-2:-1] == ["-m"] else before[:-1]


def find_script(name: str) -> str:
    """A file as it is named, or the path of a command that is a Python script; else ``ValueError``.

    A name without a folder and without ``.py`` is that of a command first, as for a shell: what
    lies in the folder in which one happens to be does not take its place.
    """
    # An environment that is used without being activated has its commands beside its python.
    path = shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))
    if os.path.isfile(name) and (path is None or os.path.dirname(name) or name.endswith(".py")):
        if name.endswith((".yaml", ".yml", ".json")):
            raise ValueError(
                f"{name} is no script; give it behind the command that reads it. A recipe of ours "
                f"is trained by: glm4v-patched train {name}"
            )
        return name
    if path is None:
        raise ValueError(f"there is no file {name} and no command of this name on PATH")
    with open(path, "rb") as file:
        # pip writes the interpreter on the second line if it is too long for the first.
        head = file.readline() + file.readline()
    if not (head.startswith(b"#!") and b"python" in head):
        raise ValueError(
            f"{path} is not a Python script; to patch what it starts: "
            f"export {PATCHED_VARIABLE}=1 PYTHONPATH={shlex.quote(str(STARTUP_FOLDER))}"
        )
    return path


def options_from_environment() -> dict:
    """The options of ``apply`` that the environment holds; ``ValueError`` if it holds no such."""
    value = os.environ.get(PATCHED_VARIABLE, "")
    if value in ("", "0", "1"):
        return {}
    options = None
    with suppress(ValueError):
        options = json.loads(value)
    if not isinstance(options, dict):
        raise ValueError(
            f"{PATCHED_VARIABLE}={value!r} is neither 1 nor a JSON object with options of "
            'glm4v_patched.apply, such as {"fused_linear_cross_entropy": true}; 0 or nothing is off'
        )
    return options


def patch_child_processes(options: dict) -> None:
    """Have the processes that this one starts patched."""
    os.environ[PATCHED_VARIABLE] = json.dumps(options) if options else "1"
    others = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    paths = [str(STARTUP_FOLDER), *(path for path in others if path != str(STARTUP_FOLDER))]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def apply_from_environment() -> None:
    """Patch this process as the environment says."""
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
        "--startup-folder": f"print the folder for PYTHONPATH, for use with {PATCHED_VARIABLE}=1, and end",
        "-m": "what follows is the name of a module",
    }
    for name, told in flags.items():
        parser.add_argument(name, action="store_true", default=None, help=told)
    parser.add_argument(
        "--attn-implementation", metavar="NAME", help="for models loaded without saying which"
    )
    for name in LAUNCHER_OPTIONS:
        parser.add_argument(name, dest=name, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
