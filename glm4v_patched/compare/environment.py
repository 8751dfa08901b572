"""A Python on which the published code works, and the process that it runs in; needs no torch."""

import hashlib
import json
import os
import subprocess
from pathlib import Path

from packaging.version import Version

from ..terminal_text import printable

# What the published code was made for, and works with.
RECOMMENDED_TRANSFORMERS = "4.44.2"
OLDEST_TRANSFORMERS, FIRST_BROKEN_TRANSFORMERS = "4.42", "4.45"
PYTHON_CURE = (
    f"give --python PATH of an environment with transformers {RECOMMENDED_TRANSFORMERS}, accelerate, tiktoken, "
    "pillow and torch (docs/troubleshooting.md)"
)
# What the process is given of this one's environment. Tokens have many names: all else is left out.
PASSED_VARIABLES: tuple[str, ...] = ("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME")
PASSED_VARIABLES += ("LANG", "LC_ALL", "TMPDIR", "OMP_NUM_THREADS", "NVIDIA_VISIBLE_DEVICES")


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


def find_python_versions(python: str) -> str:
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
        raise RuntimeError(f"{python} cannot be used: {last}; {PYTHON_CURE}")
    found, torch = json.loads(done.stdout.splitlines()[-1])
    if not Version(OLDEST_TRANSFORMERS) <= Version(found) < Version(FIRST_BROKEN_TRANSFORMERS):
        raise RuntimeError(
            f"{python} has transformers {found}; the published code works with "
            f">={OLDEST_TRANSFORMERS},<{FIRST_BROKEN_TRANSFORMERS}; {PYTHON_CURE}"
        )
    return f"transformers {found}, torch {torch}"


def isolated_environment(home: Path) -> dict[str, str]:
    """Without tokens: neither in variables, nor where the Hub's client would look for them."""
    kept = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    return kept | {
        "HOME": str(home),
        "HF_HOME": str(home / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
