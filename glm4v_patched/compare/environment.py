"""The Python and the environment that the published code runs in. Imports no torch."""

import hashlib
import json
import os
import subprocess
from pathlib import Path

from packaging.specifiers import SpecifierSet

from ..terminal_text import printable

# By the config's original_rope (True for glm-4v-9b, False for cogagent-9b): the versions of
# transformers that the published code works with, and the recommended one. Those of cogagent-9b
# are not tested here: ms-swift requires 4.42 or newer, CogAgent's requirements.txt 4.47 or newer.
PUBLISHED_TRANSFORMERS = {True: (">=4.42,<4.45", "4.44.2"), False: (">=4.42", "4.47.1")}
# Only these environment variables are passed on: secret tokens have too many names to filter them.
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


def find_python_versions(python: str | None, original_rope: bool) -> str:
    """Return which transformers and torch a Python has, as text.

    Raises:
        RuntimeError: there is no such Python, it cannot run, or the published code does not work
            with its transformers.
    """
    supported, recommended = PUBLISHED_TRANSFORMERS[original_rope]
    cure = (
        f"give --python PATH of an environment with transformers {recommended}, accelerate, "
        "tiktoken, pillow and torch (docs/troubleshooting.md)"
    )
    if python is None:
        raise RuntimeError(f"the published code needs transformers {supported} of its own; {cure}")
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
        raise RuntimeError(f"{python} cannot be used: {last}; {cure}")
    transformers, torch = json.loads(done.stdout.splitlines()[-1])
    if not SpecifierSet(supported).contains(transformers, prereleases=True):
        message = f"{python} has transformers {transformers}, and the published code needs"
        raise RuntimeError(f"{message} {supported}; {cure}")
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
