"""The Python and the environment that the published code runs in. Imports no torch."""

import hashlib
import json
import os
import subprocess
from pathlib import Path

from packaging.version import Version

from ..terminal_text import printable

# Versions of transformers that the published code works with.
RECOMMENDED_TRANSFORMERS = "4.44.2"
MIN_TRANSFORMERS, FIRST_BROKEN_TRANSFORMERS = "4.42", "4.45"
PYTHON_CURE = (
    f"give --python PATH of an environment with transformers {RECOMMENDED_TRANSFORMERS}, "
    "accelerate, tiktoken, pillow and torch (docs/troubleshooting.md)"
)
# Only these environment variables are passed on. Secret tokens have too many names to filter them
# out.
PASSED_VARIABLES: tuple[str, ...] = ("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME")
PASSED_VARIABLES += ("LANG", "LC_ALL", "TMPDIR", "OMP_NUM_THREADS", "NVIDIA_VISIBLE_DEVICES")


def describe_code(folder: Path) -> str:
    """Describe the files of code that would run, and what they would have access to."""
    files = sorted(folder.glob("*.py"))
    lines = [
        f"  {printable(file.name)} ({file.stat().st_size:,} bytes, sha256 "
        f"{hashlib.sha256(file.read_bytes()).hexdigest()[:16]})"
        for file in files
    ]
    return (
        f"code in {printable(str(folder))}, which is not this package's:\n"
        + "\n".join(lines)
        + "\nIt runs under your user, in a separate process: without your tokens and your home "
        "folder in its environment, with the Hub switched off. It can still reach your files and "
        "your network."
    )


def find_python_versions(python: str) -> str:
    """Return which transformers and torch a Python has, as text.

    Raises:
        RuntimeError: this Python cannot run, or the published code does not work with its
            transformers.
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
    transformers, torch = json.loads(done.stdout.splitlines()[-1])
    if not Version(MIN_TRANSFORMERS) <= Version(transformers) < Version(FIRST_BROKEN_TRANSFORMERS):
        raise RuntimeError(
            f"{python} has transformers {transformers}; the published code works with "
            f">={MIN_TRANSFORMERS},<{FIRST_BROKEN_TRANSFORMERS}; {PYTHON_CURE}"
        )
    return f"transformers {transformers}, torch {torch}"


def isolated_environment(home: Path) -> dict[str, str]:
    """Return an environment without secret tokens, be they in variables or in the Hub's files.

    Args:
        home: An empty folder that becomes the home folder.
    """
    passed = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    return passed | {
        "HOME": str(home),
        "HF_HOME": str(home / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
