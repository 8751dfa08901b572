"""Checks a built folder, or a repository of the Hub, as a careful person would before trusting it.

What can be told from the files is told of bytes that are read once, by checks that return a line or
raise; build and publish use those, too. What needs the published code to run is told by
:mod:`load_check` in a fresh process, from a copy of those bytes, offline and without a token; and
only if nothing else has failed. So no code is run that is not this clone's own, whatever its
manifest says.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import HfApi
from safetensors import SafetensorError, safe_open

from glm4v_patched import __version__
from glm4v_patched.models.check_weights import Shape, require_weights
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.terminal_text import listed, printable

from .errors import reason_of, without_secrets
from .files import Contents, read_folder, read_repository, sha256_of_file
from .layout import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    ARCHITECTURE,
    AUTO_MAPS,
    COMMIT,
    FILES,
    ID,
    INDEX,
    MANIFEST,
    SPECIAL_IDS,
    our_code,
)
from .load_check import STEPS
from .manifest import Manifest

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
# Files that the Hub itself adds.
OF_GIT = {".gitattributes", ".gitignore"}
TOKENIZER, IMAGES = "tokenizer_config.json", "preprocessor_config.json"
# Fields whose value may be the id of a repository: nothing is loaded from there.
MAY_NAME_A_REPOSITORY = {"_name_or_path", "name_or_path"}
LOAD_CHECK = Path(__file__).with_name("load_check.py")
SECONDS = 3600
# Larger weights are compared by names and shapes, with an empty model.
LARGEST_TO_LOAD = 1_000_000_000


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


def check_code(target: Target) -> str:
    """Whether every file of code is this clone's."""
    here, ours = target.named(".py"), our_code()
    foreign = [name for name in here | ours.keys() if target.content(name) != ours.get(name)]
    told = f"{len(foreign)} files are not this clone's ({listed(sorted(foreign))}): they are of "
    told += f"version {target.manifest.version}, this clone of {__version__}; use the clone that "
    require(not foreign, f"{told}built it, or build again. None of it was run")
    return f"{len(here)} files, those of this clone"


def check_auto_map(target: Target) -> str:
    """Whether no file sends the loader to other classes, or to another repository."""
    for name in sorted(target.named(".json") - {MANIFEST}):
        content = target.read_json(name)
        given, expected = content.pop("auto_map", {}), AUTO_MAPS.get(name, {})
        require(given == expected, f"{name}: auto_map is {given}; expected {expected or 'none'}")
        # What tokenizer.json and the index hold are words and names of tensors.
        text = "" if name in ("tokenizer.json", INDEX) else json.dumps(content)
        code = re.search('"(auto_map|custom_pipelines)":', text)
        require(not code, f"{name}: {code and code[1]} names code")
        for key, elsewhere in re.findall(rf'(?:"(\w*)": )?"({ID})(?:--|[@:"])', text):
            told = f"{name}: {key} names another repository, {elsewhere!r}"
            require(key in MAY_NAME_A_REPOSITORY, told)
    return f"ours in {len(AUTO_MAPS)} files"


def check_weights(target: Target) -> str:
    """Whether their files can be read, and hold what the index says."""
    weights, names = target.manifest.weights, target.weight_names()
    told = f"the manifest lists {listed([*weights])}, not {listed(names)}"
    require({*names} == {*weights}, told)
    if target.copied:
        return f"left for a server-side copy from {target.manifest.weights_from}"
    tensors = {name: _read_header(target, name) for name in names}
    if INDEX in target.files:
        where = target.read_json(INDEX)["weight_map"]
        held = {tensor: name for name in names for tensor in tensors[name]}
        wrong = {tensor for tensor, _ in where.items() ^ held.items()}
        told = f"{len(wrong)} tensors are not where the index says: {listed(sorted(wrong))}"
        require(not wrong, told)
    target.tensors = tensors
    compared = target.revision or target.check_weights
    told = "sha256 compared" if compared else "sha256 not compared without --weights"
    return f"{len(names)} files, {sum(weights[n].size for n in names):,} bytes, {told}"


def _read_header(target: Target, name: str) -> dict[str, Shape]:
    """The shapes of the tensors of a file; the length of the file is checked by the library."""
    path = target.files[name].path
    if path is None:
        read = HfApi().parse_safetensors_file_metadata
        tensors = read(target.name, name, revision=target.revision).tensors
        return {key: Shape(tuple(info.shape), info.dtype) for key, info in tensors.items()}
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            return {k: Shape(tuple(s.get_shape()), s.get_dtype()) for k, s in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{name}: {error}") from error


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
    "code": check_code,
    "auto_map": check_auto_map,
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


def run_check(name: str, check: Callable[[Target], str], target: Target) -> Check:
    """Whatever a check raises fails it."""
    try:
        return Check(name, PASSED, check(target))
    except Exception as error:
        return Check(name, FAILED, reason_of(error) or f"{type(error).__name__}: {error}")


def refuse_what_fails(target: Target) -> None:
    """Raise ``ValueError`` unless every check passes that runs nothing."""
    if failed := [f"{c.name}: {c.detail}" for c in check_files(target) if c.status == FAILED]:
        raise ValueError(f"{target.name} does not pass verify: {'; '.join(failed)}")


@dataclass
class Report:
    name: str
    revision: str | None
    checks: list[Check]

    @property
    def failures(self) -> list[str]:
        return [check.name for check in self.checks if check.status == FAILED]

    def as_json(self) -> str:
        told = {"target": self.name, "revision": self.revision, "passed": not self.failures}
        checks = {"checks": [check._asdict() for check in self.checks]}
        return json.dumps(told | checks, indent=2, ensure_ascii=False)

    def as_table(self) -> str:
        rows = [printable(f"{c.name:<12}  {c.status:<7}  {c.detail}") for c in self.checks]
        counts = Counter(check.status for check in self.checks)
        summary = ", ".join(f"{number} {status}" for status, number in counts.items())
        at = f"@{self.revision}" if self.revision else ""
        return "\n".join([*rows, f"{self.name}{at}: {summary}"])


def verify(name: str, revision: str | None = None, check_weights: bool = False) -> Report:
    """Run every check on a folder, or on a commit, tag or branch of an id on the Hub.

    ``ValueError`` if it is neither, or no build of ours.
    """
    with tempfile.TemporaryDirectory() as home:
        commit = None
        if Path(name).is_dir():
            require(revision is None, f"{name} is a folder and has no revision {revision}")
            files = read_folder(Path(name))
        else:
            told = f"{name} is neither a folder nor an id on the Hub: give DIR or org/name"
            require(re.fullmatch(ID, name), told)
            commit, files = read_repository(name, revision, Path(home, "download"))
        manifest = Contents(name, files).read_manifest()
        target = Target(name, files, manifest, commit, check_weights)
        checks = check_files(target)
        if manifest.is_of_adapters:
            why = "of adapters: what their base computes is checked where that is published"
        else:
            # What needs the code comes one after the other: the first that fails is the last.
            if FAILED not in {check.status for check in checks}:
                checks.append(run_check("parameters", check_parameters, target))
            if checks[-1][:2] == ("parameters", PASSED):
                checks += _load(target, Path(home))
            failed = [check.name for check in checks if check.status == FAILED]
            why = f"nothing is run because of: {', '.join(failed)}"
    told_of = {check.name for check in checks}
    checks += [Check(n, SKIPPED, why) for n in ("parameters", *STEPS) if n not in told_of]
    # A server may repeat the token in what it says.
    return Report(
        name, commit, [Check(c.name, c.status, without_secrets(c.detail)) for c in checks]
    )


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


def _load(target: Target, home: Path) -> list[Check]:
    """Run :mod:`load_check` on the bytes that were checked; weights are linked, if small enough."""
    source = home / "snapshot"
    source.mkdir()
    small = sum(target.files[name].size for name in target.tensors) <= LARGEST_TO_LOAD
    for name, file in target.files.items():
        if file.content is not None:
            (source / name).write_bytes(file.content)
        elif file.path and small:
            (source / name).symlink_to(os.path.realpath(file.path))
    told, ended = _run(source, home)
    checks = [Check(*json.loads(line)) for line in told]
    return checks + [Check(step, FAILED, ended) for step in STEPS[len(checks) :][:1]]


def _run(source: Path, home: Path) -> tuple[list[str], str]:
    """Run the published code, with empty caches: what it says, and how the process ended."""
    given = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
    given |= {"HF_HOME": str(home / "cache"), "HF_MODULES_CACHE": str(home / "modules")}
    given |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    # -I: neither this repository nor what PYTHONPATH names can be imported.
    command = [sys.executable, "-I", str(LOAD_CHECK), str(source)]
    try:
        ended = subprocess.run(command, cwd=home, env=given, timeout=SECONDS, capture_output=True)
        last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
        how = f"ended with status {ended.returncode} here: {last[0] if last else 'it said nothing'}"
        said = ended.stdout
    except subprocess.TimeoutExpired as late:
        said, how = late.stdout or b"", f"was stopped here, not done after {SECONDS} s"
    return said.decode().splitlines(), f"the process {how}"
