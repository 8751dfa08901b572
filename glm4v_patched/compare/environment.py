"""A Python on which the published code works, and the process that it runs in; needs no torch."""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from ..terminal_text import printable

# What the published code was made for, and works with.
TRANSFORMERS = "4.44.2"
OLDEST_TRANSFORMERS, FIRST_BROKEN_TRANSFORMERS = "4.42", "4.45"
# Of which transformers 4.44's tokenizers has no wheel.
FIRST_PYTHON_WITHOUT_WHEELS = (3, 13)
# What the process is given of this one's environment. Tokens have many names: all else is left out.
KEPT_VARIABLES: tuple[str, ...] = ("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME")
KEPT_VARIABLES += ("LANG", "LC_ALL", "TMPDIR", "OMP_NUM_THREADS", "NVIDIA_VISIBLE_DEVICES")


def describe_code(folder: Path) -> str:
    """Which files of code would run, and how."""
    files = sorted(folder.glob("*.py"))
    told = [
        f"  {printable(file.name)} ({file.stat().st_size:,} bytes, sha256 "
        f"{hashlib.sha256(file.read_bytes()).hexdigest()[:16]})"
        for file in files
    ]
    return (
        f"code in {printable(str(folder))}, which is not this package's:\n" + "\n".join(told) + "\n"
        "It runs as you, in a process of its own: without your tokens and your home folder in its "
        "environment, with the Hub switched off. Nothing keeps it from your files or your network."
    )


def packages() -> list[str]:
    torch = version("torch").partition("+")[0]
    return [f"torch=={torch}", f"transformers=={TRANSFORMERS}", "accelerate", "tiktoken", "pillow"]


def commands(folder: Path) -> list[list[str]]:
    """That make an environment for the published code."""
    python = str(folder / "bin" / "python")
    if uv := shutil.which("uv"):
        make = [uv, "venv", "--python", "3.11", str(folder)]
        return [make, [uv, "pip", "install", "--python", python, *packages()]]
    make = [sys.executable, "-I", "-m", "venv", str(folder)]
    return [make, [python, "-I", "-m", "pip", "install", *packages()]]


def make_environment(folder: Path) -> Path:
    """Its Python.

    Raises:
        ValueError: the folder is there and holds something else.
        RuntimeError: it cannot be made.
    """
    python = folder / "bin" / "python"
    if python.exists():
        return python
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty, and no environment; expected a new folder")
    if shutil.which("uv") is None and sys.version_info >= FIRST_PYTHON_WITHOUT_WHEELS:
        raise RuntimeError(
            f"transformers {TRANSFORMERS} has no wheels for Python {sys.version_info[0]}."
            f"{sys.version_info[1]}, and there is no uv, which would take Python 3.11: install uv "
            "(https://docs.astral.sh/uv), or make an environment and give it with --python"
        )
    for command in commands(folder):
        print(shlex.join(command), flush=True)
        if status := subprocess.run(command, check=False).returncode:
            raise RuntimeError(f"{shlex.join(command)} failed with status {status}")
    return python


def check_python(python: str) -> str:
    """The transformers that a Python has.

    Raises:
        RuntimeError: it is none, or none with which the published code works.
    """
    code = "import json, transformers, torch, safetensors; print(json.dumps("
    code += "[transformers.__version__, torch.__version__]))"
    try:
        done = subprocess.run(
            [python, "-I", "-c", code], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise RuntimeError(f"{python} cannot be run: {error}") from None
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2] or f"it ended with status {done.returncode}"
        raise RuntimeError(f"{python} cannot be used: {last}\n{_how()}")
    found, torch = json.loads(done.stdout.splitlines()[-1])
    if not Version(OLDEST_TRANSFORMERS) <= Version(found) < Version(FIRST_BROKEN_TRANSFORMERS):
        raise RuntimeError(
            f"{python} has transformers {found}; the published code works with "
            f">={OLDEST_TRANSFORMERS},<{FIRST_BROKEN_TRANSFORMERS}\n{_how()}"
        )
    return f"transformers {found}, torch {torch}"


def require_python(python: str | None, make: Path | None) -> str:
    """The Python that is asked for, made where it is to be made.

    Raises:
        RuntimeError: none is asked for; says how to get one.
    """
    if make is not None:
        return str(make_environment(make))
    if python is None:
        raise RuntimeError(
            f"the published code does not work with transformers {version('transformers')}, and "
            f"needs an environment of its own\n{_how()}"
        )
    return python


def _how() -> str:
    folder = Path("environment-of-the-original")
    lines = [shlex.join(command) for command in commands(folder)]
    return (
        f"have one made: --make-environment {folder}, which runs these; or run them yourself, and "
        f"give it with --python {folder / 'bin' / 'python'}\n  " + "\n  ".join(lines)
    )


def environment_of_the_original(home: Path) -> dict[str, str]:
    """Without tokens: neither in variables, nor where the Hub's client would look for them."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return kept | {
        "HOME": str(home),
        "HF_HOME": str(home / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
