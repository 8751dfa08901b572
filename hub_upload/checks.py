"""Static checks of a built repository, on bytes that were read once.

``build``, ``verify`` and ``publish`` use these checks. They run no published code;
:mod:`loading` does.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import NamedTuple

from huggingface_hub import HfApi

from glm4v_patched.models.base import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from glm4v_patched.models.check_weights import require_complete_weights, tensors_of_hub_file
from glm4v_patched.models.weight_files import (
    WEIGHTS_INDEX,
    TensorInfo,
    check_index,
    read_header,
    require_agreement,
)
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.terminal_text import listed, show_progress

from .files import BuiltFiles, sha256_of_file
from .manifest import COMMIT_PATTERN, MANIFEST

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
# Files that the Hub adds to a repository.
GIT_FILES = {".gitattributes", ".gitignore"}


class Check(NamedTuple):
    """The result of a check; ``status`` is PASSED, FAILED or SKIPPED."""

    name: str
    status: str
    detail: str


def require_that(condition: object, message: str) -> None:
    """Raise ``ValueError`` with the message unless the condition is true."""
    if not condition:
        raise ValueError(message)


def check_files(target: BuiltFiles, read_weights: bool = False) -> str:
    """Check that the files are exactly those of the manifest; return a summary.

    Args:
        read_weights: Compare the sha256 of a folder's weights, not only their size.

    Raises:
        ValueError: A file is missing, additional or different.
    """
    remote = target.weights.keys() if target.weights_stay_on_hub else set()
    expected = {n: file for n, file in target.manifest.files.items() if n not in remote}
    foreign = target.files.keys() - expected.keys() - {MANIFEST, *GIT_FILES}
    require_that(not foreign, f"not in the manifest: {listed(sorted(foreign))}")
    missing = expected.keys() - target.files.keys()
    require_that(not missing, f"missing: {listed(sorted(missing))}")
    with show_progress("comparing", total=len(expected), unit="file") as progress:
        for name, entry in expected.items():
            file, problem = target.files[name], f"{name} differs from the manifest"
            size_problem = f"{problem}: {file.size:,} bytes, expected {entry.size:,}"
            require_that(file.size == entry.size, size_problem)
            digest = file.sha256
            if digest is None and file.path:
                digest = sha256_of_file(file.path) if read_weights else entry.sha256
            digest_problem = f"{problem}: sha256 {digest}, expected {entry.sha256}"
            require_that(digest == entry.sha256, digest_problem)
            progress.update()
    is_exact = target.revision or read_weights
    note = "" if is_exact else "; weights by size only (--weights compares their sha256)"
    return f"{len(expected)} files, by size and sha256{note}"


def check_weight_files(target: BuiltFiles) -> str:
    """Check that the weight files are readable, match the index and fit the model.

    If the Hub is to copy the weights on publication, only the names in the index are checked.

    Raises:
        ValueError: Weights are missing, additional or of another shape than the model's.
    """
    names = target.weight_names()
    problem = (
        f"the manifest lists the weights {listed([*target.weights])}, expected {listed(names)}"
    )
    require_that({*names} == {*target.weights}, problem)
    are_remote = target.weights_stay_on_hub
    headers = {} if are_remote else {name: _read_header(target, name) for name in names}
    shapes = {name: shape for header in headers.values() for name, shape in header.items()}
    if target.manifest.is_adapter:
        foreign = [name for name in shapes if ".lora_" not in name]
        require_that(not foreign, f"weights that are not of LoRA: {listed(foreign)}")
        return f"LoRA, {len(shapes)} tensors"
    reference, expected = "the files of weights", dict[str, TensorInfo | None](shapes)
    if WEIGHTS_INDEX in target.files:
        index = check_index(target.read_json(WEIGHTS_INDEX))
        if are_remote:
            reference, expected = "the index", dict.fromkeys(index)
        else:
            require_agreement(index, headers)
    elif are_remote:
        return "not compared with config.json: neither weights nor an index are in the folder"
    config = ChatGLMConfig(**target.read_json("config.json"))
    number = require_complete_weights(target.name, config, expected)
    note = f"; the Hub will copy them from {target.origin}" if are_remote else ""
    return f"{len(names)} files, {number} weights, compared with {reference}{note}"


def _read_header(target: BuiltFiles, name: str) -> dict[str, TensorInfo]:
    """Return the tensor shapes in a file of weights, in the folder or on the Hub."""
    if path := target.files[name].path:
        return read_header(path)
    metadata = HfApi().parse_safetensors_file_metadata(target.name, name, revision=target.revision)
    return tensors_of_hub_file(metadata, f"{target.name}: {name}")


def check_adapter_settings(target: BuiltFiles) -> str:
    """Check the files and settings of adapters, and return a summary.

    Raises ``ValueError`` unless there is no code, the adapters are LoRA for a model at a commit on
    the Hub, and their settings name no module or path.
    """
    from peft import LoraConfig  # only adapters need peft

    known = {ADAPTER_CONFIG, ADAPTER_WEIGHTS, "README.md", MANIFEST}
    additional = sorted(target.manifest.names - known)
    require_that(not additional, f"{listed(additional)} beside the adapters, which no build writes")
    config, fine_tune = target.read_json(ADAPTER_CONFIG), target.fine_tune
    unknown = [key for key in config if key not in {field.name for field in fields(LoraConfig)}]
    require_that(not unknown, f"{ADAPTER_CONFIG} has {listed(unknown)}, which peft does not know")
    peft_type = config.get("peft_type")
    require_that(peft_type == "LORA", f"peft_type is {peft_type}, expected LORA")
    model, commit = config.pop("base_model_name_or_path", None), str(config.pop("revision", None))
    base = fine_tune and fine_tune.base
    problem = f"{ADAPTER_CONFIG} names the base model {model}, but the manifest {base}"
    require_that(base and model == base, problem)
    require_that(re.fullmatch(COMMIT_PATTERN, commit), f"revision is {commit}, expected a commit")
    # peft imports the modules that these settings name.
    for name in ("auto_mapping", "megatron_config"):
        require_that(config.get(name) is None, f"{name} is {config.get(name)}, expected null")
    require_that(
        "/" not in json.dumps(config), f"{ADAPTER_CONFIG} has a path, which others do not have"
    )
    return f"LoRA on {model}@{commit}"


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


def refuse_failed(name: str, checks: list[Check]) -> None:
    """Raise ``ValueError`` with the failed checks, if there are any."""
    if failed := [f"{c.name}: {c.detail}" for c in checks if c.status == FAILED]:
        raise ValueError(f"{name} does not pass verify: {'; '.join(failed)}")
