"""Checks of a build that run nothing of it, of bytes that were read once.

``build``, ``verify`` and ``publish`` all use them; what has to be run is in :mod:`loading`.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import NamedTuple

from huggingface_hub import HfApi

from glm4v_patched.models.check_weights import require_complete_weights, tensors_of_hub_file
from glm4v_patched.models.weight_files import (
    TensorInfo,
    check_index,
    read_header,
    require_agreement,
)
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.terminal_text import listed

from .files import Build, sha256_of_file
from .layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS, COMMIT, INDEX, MANIFEST

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
# Files that the Hub itself adds.
OF_GIT = {".gitattributes", ".gitignore"}


class Check(NamedTuple):
    name: str
    status: str
    detail: str


def require(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_files(target: Build, read_weights: bool = False) -> str:
    """Whether all files are those of the manifest; weights of a folder are compared by their size
    alone, unless they are to be read."""
    left_out = target.weights.keys() if target.copied else set()
    wanted = {n: file for n, file in target.manifest.files.items() if n not in left_out}
    foreign = target.files.keys() - wanted.keys() - {MANIFEST, *OF_GIT}
    require(not foreign, f"not in the manifest: {listed(sorted(foreign))}")
    missing = wanted.keys() - target.files.keys()
    require(not missing, f"missing: {listed(sorted(missing))}")
    for name, given in wanted.items():
        file, told = target.files[name], f"{name} is not what the manifest says"
        require(file.size == given.size, f"{told}: {file.size:,} bytes, not {given.size:,}")
        digest = file.sha256
        if digest is None and file.path:
            digest = sha256_of_file(file.path) if read_weights else given.sha256
        require(digest == given.sha256, f"{told}: sha256 {digest}, not {given.sha256}")
    but = "" if target.revision or read_weights else "; weights by size alone, without --weights"
    return f"{len(wanted)} files, by size and sha256{but}"


def check_weights(target: Build) -> str:
    """Whether their files can be read, hold what the index says, and have the names and shapes of
    the model; of weights that are not at hand, the names in the index are compared."""
    names = target.weight_names()
    told = f"the manifest lists {listed([*target.weights])}, not {listed(names)}"
    require({*names} == {*target.weights}, told)
    tensors = {} if target.copied else {name: _read_header(target, name) for name in names}
    there = {name: shape for of_file in tensors.values() for name, shape in of_file.items()}
    if target.manifest.is_of_adapters:
        foreign = [name for name in there if ".lora_" not in name]
        require(not foreign, f"weights that are no LoRA: {listed(foreign)}")
        return f"LoRA, {len(there)} tensors"
    by, wanted = "the files of weights", dict[str, TensorInfo | None](there)
    if INDEX in target.files:
        index = check_index(target.read_json(INDEX))
        if target.copied:
            by, wanted = "the index", dict.fromkeys(index)
        else:
            require_agreement(index, tensors)
    elif target.copied:
        return "neither weights nor an index are at hand to compare with config.json"
    config = ChatGLMConfig(**target.read_json("config.json"))
    told = f"{require_complete_weights(target.name, config, wanted)} weights, compared with {by}"
    left = f"; left for a server-side copy from {target.origin}" if target.copied else ""
    return f"{len(names)} files, {told}{left}"


def _read_header(target: Build, name: str) -> dict[str, TensorInfo]:
    """The shapes of the tensors of a file, here or on the Hub."""
    if path := target.files[name].path:
        return read_header(path)
    read = HfApi().parse_safetensors_file_metadata
    return tensors_of_hub_file(
        read(target.name, name, revision=target.revision), f"{target.name}: {name}"
    )


def check_adapters(target: Build) -> str:
    """Whether adapters come alone, without code, are LoRA on a commit of the Hub, and their
    settings name nothing else."""
    from peft import LoraConfig  # late: a model is built and verified without it

    more = sorted(target.manifest.names - {ADAPTER_CONFIG, ADAPTER_WEIGHTS, "README.md", MANIFEST})
    require(not more, f"beside adapters stands {listed(more)}, which no build writes there")
    config, fine_tune = target.read_json(ADAPTER_CONFIG), target.fine_tune
    unknown = [key for key in config if key not in {field.name for field in fields(LoraConfig)}]
    require(not unknown, f"{ADAPTER_CONFIG} has {listed(unknown)}, which peft does not know")
    require(config.get("peft_type") == "LORA", f"peft_type is {config.get('peft_type')}, not LORA")
    given, commit = config.pop("base_model_name_or_path", None), str(config.pop("revision", None))
    base = fine_tune and fine_tune.base
    require(base and given == base, f"they are of {given}, the manifest says {base}")
    require(re.fullmatch(COMMIT, commit), f"revision is {commit}, expected a commit")
    # peft imports the modules that these name.
    for name in ("auto_mapping", "megatron_config"):
        require(config.get(name) is None, f"{name} is {config.get(name)}, expected null")
    require("/" not in json.dumps(config), f"{ADAPTER_CONFIG} has a path, which is nobody else's")
    return f"LoRA on {given}@{commit}"


def run_checks(checks: Mapping[str, Callable[[], str]]) -> list[Check]:
    """Run checks in their order up to the first that fails, whatever it raises."""
    done: list[Check] = []
    for name, check in checks.items():
        try:
            done.append(Check(name, PASSED, check()))
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            return [*done, Check(name, FAILED, f"{kind}{error}")]
    return done


def refuse_failed(name: str, checks: list[Check]) -> None:
    """Raise ``ValueError`` if one of the checks has failed."""
    if failed := [f"{c.name}: {c.detail}" for c in checks if c.status == FAILED]:
        raise ValueError(f"{name} does not pass verify: {'; '.join(failed)}")
