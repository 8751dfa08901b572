"""Checks of a built repository, on bytes that were read once."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from huggingface_hub import HfApi

from glm4v_patched.models.check_weights import require_complete_weights, tensors_of_hub_file
from glm4v_patched.models.weight_files import (
    WEIGHTS_INDEX,
    TensorInfo,
    check_index,
    read_header,
    require_matching_index,
)
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.terminal_text import listed, show_progress

from .files import BuiltFiles, sha256_of_file

LOAD_CHECK = Path(__file__).with_name("load_check.py")
LOAD_TIMEOUT_S = 1800
PASSED, FAILED = "passed", "failed"
# Files that the Hub adds to a repository.
GIT_FILES = {".gitattributes", ".gitignore"}


class Check(NamedTuple):
    """The result of a check; ``status`` is PASSED or FAILED."""

    name: str
    status: str
    detail: str


def require_that(condition: object, message: str) -> None:
    """Raise ``ValueError`` with the message unless the condition is true."""
    if not condition:
        raise ValueError(message)


def check_weight_files(target: BuiltFiles, read_weights: bool = False) -> str:
    """Check that the weight files are those of the manifest, match the index and fit the model.

    If the Hub is to copy the weights on publication, only the names in the index are checked.

    Args:
        read_weights: Compare the sha256 of a folder's weights, not only their size.

    Raises:
        ValueError: Weights are missing, additional, different, or of another shape than the
            model's.
    """
    names = target.weight_names()
    problem = (
        f"the manifest lists the weights {listed([*target.weights])}, expected {listed(names)}"
    )
    require_that({*names} == {*target.weights}, problem)
    index = None
    if WEIGHTS_INDEX in target.files:
        index = check_index(target.read_json(WEIGHTS_INDEX))
    tensors: dict[str, TensorInfo | None] = {}
    if target.weights_stay_on_hub:
        note = f"the Hub will copy them from {target.origin}"
        if index is None:
            return f"neither weights nor an index are in the folder; {note}"
        tensors |= dict.fromkeys(index)
        note = f"compared with the index; {note}"
    else:
        with show_progress("comparing weights", total=len(names), unit="file") as progress:
            for name in names:
                _require_listed(target, name, read_weights)
                progress.update()
        headers = {name: _read_header(target, name) for name in names}
        if index is not None:
            require_matching_index(index, headers)
        for header in headers.values():
            tensors |= header
        is_exact = target.revision or read_weights
        note = "by size and sha256" if is_exact else "by size only (--weights compares sha256)"
    config = ChatGLMConfig(**target.read_json("config.json"))
    number = require_complete_weights(target.name, config, tensors)
    return f"{len(names)} files, {number} weights, {note}"


def _require_listed(target: BuiltFiles, name: str, read_weights: bool) -> None:
    """Raise ``ValueError`` if a file of weights differs from the manifest."""
    require_that(name in target.files, f"missing: {name}")
    file, entry = target.files[name], target.weights[name]
    digest = sha256_of_file(file.path) if read_weights and file.path else file.sha256
    require_that(
        file.size == entry.size and digest in (None, entry.sha256),
        f"{name} differs from the manifest: {file.size:,} bytes, sha256 {digest}; expected "
        f"{entry.size:,} bytes, sha256 {entry.sha256}",
    )


def _read_header(target: BuiltFiles, name: str) -> dict[str, TensorInfo]:
    """Return the tensor shapes in a file of weights, in the folder or on the Hub."""
    if path := target.files[name].path:
        return read_header(path)
    metadata = HfApi().parse_safetensors_file_metadata(target.name, name, revision=target.revision)
    return tensors_of_hub_file(metadata)


def check_loading(target: BuiltFiles, pythons: Sequence[str] = (sys.executable,)) -> str:
    """Run :mod:`load_check` with each interpreter on a copy of the checked bytes.

    Returns the summaries. Raises ``ValueError`` if the folder's code fails.
    """
    summaries = []
    with TemporaryDirectory() as home:
        source = Path(home, "snapshot")
        source.mkdir()
        for name, file in target.files.items():
            if file.content is not None:
                (source / name).write_bytes(file.content)
        for number, python in enumerate(pythons):
            with show_progress(f"loading {target.name} with {python} and the published code"):
                summaries.append(run_published_code(python, source, Path(home, str(number))))
    return "; ".join(summaries)


def run_published_code(python: str, source: Path, home: Path) -> str:
    """Run :mod:`load_check` offline, without a token, with empty caches; return its summary.

    Raises ``ValueError`` if it fails, or takes longer than :data:`LOAD_TIMEOUT_S`.
    """
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
    environment |= {"HF_HOME": str(home / "cache"), "HF_MODULES_CACHE": str(home / "modules")}
    environment |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    # -I: neither this repository nor PYTHONPATH can be imported.
    command = [python, "-I", str(LOAD_CHECK), str(source)]
    try:
        done = subprocess.run(
            command,
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{python} was stopped after {LOAD_TIMEOUT_S} s") from None
    errors = done.stderr.decode(errors="replace").strip().splitlines() or ["it printed no error"]
    if done.returncode:
        raise ValueError(f"{python} ended with status {done.returncode}: {errors[-1]}")
    return done.stdout.decode(errors="replace").strip()


def run_checks(checks: Mapping[str, Callable[[], str]]) -> list[Check]:
    """Run checks in order, up to the first that raises; return their results."""
    done: list[Check] = []
    for name, check in checks.items():
        try:
            done.append(Check(name, PASSED, check()))
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            return [*done, Check(name, FAILED, f"{kind}{error}")]
    return done
