"""Checks of a built folder, or a repository of the Hub, that run nothing of it.

Each takes bytes that were read once, and returns a line or raises. ``build``, ``verify`` and
``publish`` all use them; what has to be run is in :mod:`loading`.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from huggingface_hub import HfApi

from glm4v_patched.models.check_weights import require_weights, shapes_of
from glm4v_patched.models.weight_files import Shape, check_index, read_header, require_agreement
from glm4v_patched.remote.configuration_chatglm import (
    ChatGLMConfig,
    refuse_fetched_code,
    refuse_nonfinite_generation,
)
from glm4v_patched.terminal_text import listed

from .errors import reason_of
from .files import Contents, sha256_of_file
from .layout import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    ARCHITECTURE,
    AUTO_MAPS,
    COMMIT,
    FILES,
    INDEX,
    KEYS,
    MANIFEST,
    SPECIAL_IDS,
    TOKENIZER_CLASS,
)
from .manifest import FineTune, Listed, Manifest, Origin

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
# Files that the Hub itself adds.
OF_GIT = {".gitattributes", ".gitignore"}
TOKENIZER, IMAGES = "tokenizer_config.json", "preprocessor_config.json"


class Check(NamedTuple):
    name: str
    status: str
    detail: str


def require(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass
class Target(Contents):
    """What is checked."""

    manifest: Manifest
    revision: str | None = None  # commit on the Hub; None for a folder
    check_weights: bool = False  # read all weights for their sha256
    # Filled by a check: shapes of the tensors at hand, by file.
    tensors: dict[str, dict[str, Shape]] = field(default_factory=dict)

    def weight_names(self) -> list[str]:
        return [ADAPTER_WEIGHTS] if self.manifest.is_of_adapters else super().weight_names()

    def named(self, suffix: str) -> set[str]:
        return {name for name in self.files if name.endswith(suffix)}

    # What a build starts from, of something that was built.
    @property
    def origin(self) -> Origin | None:
        return self.manifest.weights_from

    @property
    def fine_tune(self) -> FineTune | None:
        return self.manifest.fine_tune

    @property
    def weights(self) -> dict[str, Listed]:
        return self.manifest.weights

    @property
    def copied(self) -> bool:
        """Whether weights are left for the Hub to copy them."""
        here = self.revision or self.named(".safetensors")
        return self.manifest.weights_from is not None and not here


def check_listed(target: Target) -> str:
    """Whether all files are those of the manifest, of names that builds write, and no pickles.

    Weights of a folder are compared by their size, if their sha256 is not asked for.
    """
    left_out = target.manifest.weights.keys() if target.copied else set()
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
            digest = sha256_of_file(file.path) if target.check_weights else given.sha256
        require(digest == given.sha256, f"{told}: sha256 {digest}, not {given.sha256}")
        if not name.endswith((".py", ".safetensors")):
            known = name in FILES or (target.manifest.is_of_adapters and name == ADAPTER_CONFIG)
            require(known, f"no build writes what the manifest lists: {name}")
            require("\0" not in target.read(name).decode("utf-8"), f"{name} is no text")
    return f"{len(wanted)} files"


def check_keys(target: Target) -> str:
    """Check that every JSON file has keys that the published code reads, and names no other code.

    A key that nothing here knows may be one by which some transformers loads, compiles or
    quantizes, so it is refused.
    """
    for name in sorted(KEYS.keys() & target.files.keys()):
        require_known(target.read_json(name), KEYS[name], f"{target.name}: {name}")
    for name, expected in AUTO_MAPS.items():
        given = target.read_json(name).get("auto_map")
        require(given == expected, f"{name}: auto_map is {given}; expected {expected}")
    refuse_fetched_code(target.read_json("config.json"))
    refuse_nonfinite_generation(
        target.read_json("generation_config.json"), "generation_config.json"
    )
    given = target.read_json(TOKENIZER).get("tokenizer_class")
    require(
        given == TOKENIZER_CLASS,
        f"{TOKENIZER}: tokenizer_class is {given!r}; expected {TOKENIZER_CLASS!r}",
    )
    return f"of {len(KEYS)} files known, auto_map ours in {len(AUTO_MAPS)}"


def require_known(values: Mapping[str, Any], known: Mapping[str, Any], place: str) -> None:
    """Raise ``ValueError`` for keys that ``known`` lacks; it nests as the file does, and a key
    whose value is not looked into has ``None``."""
    if unknown := [key for key in values if key not in known]:
        found = listed([f"{key}: {json.dumps(values[key]):.80}" for key in unknown], 5)
        raise ValueError(
            f"{place} has {found}; expected no such key, for the published code does not read it: "
            "take it out of the source, and build again"
        )
    for key, inner in known.items():
        if inner and isinstance(values.get(key), dict):
            require_known(values[key], inner, f"{place}: {key}")


def check_weights(target: Target) -> str:
    """Whether their files can be read, and hold what the index says."""
    weights, names = target.manifest.weights, target.weight_names()
    told = f"the manifest lists {listed([*weights])}, not {listed(names)}"
    require({*names} == {*weights}, told)
    if target.copied:
        return f"left for a server-side copy from {target.manifest.weights_from}"
    tensors = {name: _read_header(target, name) for name in names}
    if INDEX in target.files:
        require_agreement(check_index(target.read_json(INDEX)), tensors)
    target.tensors = tensors
    compared = target.revision or target.check_weights
    told = "sha256 compared" if compared else "sha256 not compared without --weights"
    return f"{len(names)} files, {sum(weights[n].size for n in names):,} bytes, {told}"


def _read_header(target: Target, name: str) -> dict[str, Shape]:
    """The shapes of the tensors of a file, here or on the Hub."""
    if path := target.files[name].path:
        return read_header(path)
    read = HfApi().parse_safetensors_file_metadata
    return shapes_of(read(target.name, name, revision=target.revision), f"{target.name}: {name}")


def check_config(target: Target) -> str:
    """Whether vLLM serves it by this name, and ids and image size are those of the processor."""
    config = target.read_json("config.json")
    given = config.get("architectures")
    require(given == [ARCHITECTURE], f"architectures is {given}, vLLM serves {[ARCHITECTURE]}")
    added = target.read_json("tokenizer.json")["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    for name, token in SPECIAL_IDS.items():
        given, wanted = config.get(name), ids.get(token)
        require(given == wanted, f"{name} is {given}, but {token} is {wanted} to the tokenizer")
    size = config["padded_vocab_size"]
    for name in ("config.json", "generation_config.json"):
        eos = target.read_json(name).get("eos_token_id")
        for number in eos if isinstance(eos, list) else [eos]:
            inside = isinstance(number, int) and 0 <= number < size
            require(inside, f"{name}: eos_token_id has {number}, outside of {size} ids")
    sides = [config["vision_config"]["image_size"], target.read_json(TOKENIZER)["image_size"]]
    sides.append(target.read_json(IMAGES)["size"]["height"])
    told = f"image_size is {sides} in config.json, {TOKENIZER} and {IMAGES}"
    require(len({*sides}) == 1, f"{told}: they are not of the same model")
    return f"{ARCHITECTURE}, {', '.join(f'{name} {config[name]}' for name in SPECIAL_IDS)}"


CHECKS: dict[str, Callable[[Target], str]] = {
    "files": check_listed,
    "keys": check_keys,
    "weights": check_weights,
    "config": check_config,
}


def check_no_code(target: Target) -> str:
    """Whether adapters come alone, without code or what names it: that of their base runs."""
    alone = {ADAPTER_CONFIG, ADAPTER_WEIGHTS, "README.md", MANIFEST, *OF_GIT}
    more = sorted(target.files.keys() - alone)
    require(not more, f"beside adapters stands {listed(more)}, which no build writes there")
    return "none"


def check_adapters(target: Target) -> str:
    """Whether they are LoRA on a commit of the Hub, and their settings name nothing else."""
    from peft import LoraConfig  # late: a model is built and verified without it

    config, fine_tune = target.read_json(ADAPTER_CONFIG), target.manifest.fine_tune
    require(config.get("peft_type") == "LORA", f"peft_type is {config.get('peft_type')}, not LORA")
    given, commit = config.pop("base_model_name_or_path", None), str(config.pop("revision", None))
    require(fine_tune is not None, "the manifest has no fine_tune, which names the base")
    base = fine_tune and fine_tune.base
    require(given == base, f"they are of {given}, the manifest says {base}")
    require(re.fullmatch(COMMIT, commit), f"revision is {commit}, expected a commit")
    # peft imports the modules that these name.
    for name in ("auto_mapping", "megatron_config"):
        require(config.get(name) is None, f"{name} is {config.get(name)}, expected null")
    require("/" not in json.dumps(config), f"{ADAPTER_CONFIG} has a path, which is nobody else's")
    known = dict.fromkeys(field.name for field in fields(LoraConfig))
    require_known(config, known, f"{target.name}: {ADAPTER_CONFIG}")
    tensors = {*target.tensors.get(ADAPTER_WEIGHTS, ())}
    foreign = [name for name in tensors if ".lora_" not in name]
    require(not foreign, f"weights that are no LoRA: {listed(foreign)}")
    return f"LoRA on {given}@{commit}, {len(tensors)} tensors"


OF_ADAPTERS = {
    "files": check_listed,
    "code": check_no_code,
    "weights": check_weights,
    "adapters": check_adapters,
}


def check_files(target: Target) -> list[Check]:
    checks = OF_ADAPTERS if target.manifest.is_of_adapters else CHECKS
    return [run_check(name, check, target) for name, check in checks.items()]


def check_parameters(target: Target) -> str:
    """Names and shapes, on an empty model; of weights that are not at hand, names in the index."""
    config = ChatGLMConfig(**target.read_json("config.json"))
    there: dict[str, Shape | None] = {}
    for tensors in target.tensors.values():
        there |= tensors
    by = "the files of weights" if there else "the index"
    if not there and INDEX not in target.files:
        return "those of config.json; neither weights nor an index are at hand to compare with"
    there = there or dict.fromkeys(target.read_json(INDEX)["weight_map"])
    return f"{require_weights(target.name, config, there)} weights, compared with {by}"


def run_check(name: str, check: Callable[[Target], str], target: Target) -> Check:
    """Whatever a check raises fails it."""
    try:
        return Check(name, PASSED, check(target))
    except Exception as error:
        return Check(name, FAILED, reason_of(error))


def run_in_order(checks: list[Check], more: Mapping[str, Callable[[Target], str]], target: Target):
    """Append checks one by one, as long as none has failed."""
    for name, check in more.items():
        if all(one.status != FAILED for one in checks):
            checks.append(run_check(name, check, target))


def refuse_failed(target: Target, checks: list[Check]) -> None:
    """Raise ``ValueError`` if one of the checks has failed."""
    if failed := [f"{c.name}: {c.detail}" for c in checks if c.status == FAILED]:
        raise ValueError(f"{target.name} does not pass verify: {'; '.join(failed)}")
