"""Checks a built folder, or a repository of the Hub, as a careful person would before trusting it.

What can be told from the files is told here. What needs the published code to run is told by
:mod:`stranger` in a fresh process, and only if that code is what the manifest says: code that is
not is never run.
"""

import ast
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, constants
from safetensors import safe_open

from .build import (
    ARCHITECTURE,
    AUTO_MAPS,
    INDEX,
    MANIFEST,
    READ_AGAIN,
    REMOTE,
    SINGLE_FILE,
    SPECIAL_IDS,
    download,
    fingerprint,
    list_files,
)
from .faults import Failure, during, without_secrets
from .stranger import FAILED, NAMES, SKIPPED, Check, Checks, Skip, require, shorten

STRANGER = Path(__file__).with_name("stranger.py")
SECONDS = 3600
# Larger weights are compared by names and shapes, with an empty model.
LARGEST_TO_LOAD = 1_000_000_000
# Loading these can run code that lies in them.
PICKLES = (".bin", ".ckpt", ".dill", ".h5", ".joblib", ".keras", ".msgpack", ".npy", ".npz")
PICKLES += (".pickle", ".pkl", ".pt", ".pth", ".tar", ".zip")
PICKLE_STARTS = (b"PK\x03\x04", *(bytes([0x80, protocol]) for protocol in range(2, 6)))
# git's own, which the Hub adds.
NOT_OURS = {".gitattributes", ".gitignore"}
ITEM_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}
ITEM_SIZES |= {"I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}

RUNS_CODE = ("manifest", "code", "loader files", "auto_map", "nothing pickled")
NEEDS = {
    "code": ["manifest"],
    "other files": ["manifest"],
    "weight files": ["manifest"],
    "card": ["manifest"],
    "index": ["weight files"],
    "sha256 of weights": ["manifest", "weight files"],
    "config loads": [*RUNS_CODE, "config"],
    "tokenizer loads": ["config loads"],
    "processor loads": ["tokenizer loads", "image size", "token ids"],
    "parameter names": ["config loads", "weight files", "index"],
    "parameter shapes": ["parameter names"],
    "weights load": ["parameter names", "parameter shapes"],
    "generation": ["processor loads", "weights load"],
    "training step": ["processor loads", "weights load"],
}


@dataclass
class Report:
    target: str
    revision: str | None
    checks: list[Check]

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> list[str]:
        return [check.name for check in self.checks if check.status == FAILED]

    def as_json(self) -> str:
        values = asdict(self) | {"passed": self.passed}
        return json.dumps(values, indent=2, ensure_ascii=False)

    def as_table(self) -> str:
        width = max(len(check.name) for check in self.checks)
        rows = [f"{c.name:<{width}}  {c.status:<7}  {c.detail}" for c in self.checks]
        counts = Counter(check.status for check in self.checks)
        summary = ", ".join(f"{number} {status}" for status, number in counts.items())
        where = f"{self.target}@{self.revision}" if self.revision else self.target
        return "\n".join([*rows, f"{where}: {summary}"])


@dataclass
class Target:
    """What is verified.

    Attributes:
        source: What ``from_pretrained`` is given.
        folder: Has every file but, for a repository of the Hub, weights and pickles.
        sizes: Bytes of every file, by its path.
        hashes: sha256 of files that the Hub gives one for.
        revision: Commit on the Hub; None for a folder.
        code_only: Weights should be absent.
        tensors: Shape and type of every tensor at hand, by file; filled by a check.
    """

    source: str
    folder: Path
    sizes: dict[str, int]
    hashes: dict[str, str] = field(default_factory=dict)
    revision: str | None = None
    code_only: bool = False
    tensors: dict[str, dict] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        return self.revision is None

    def read(self, name: str) -> str:
        require(name in self.sizes, f"{name} is missing")
        return (self.folder / name).read_text(encoding="utf-8")

    def read_json(self, name: str) -> dict:
        values = json.loads(self.read(name))
        require(isinstance(values, dict), f"{name} holds no JSON object")
        return values

    def weight_names(self) -> list[str]:
        """The files that the loader will look for."""
        if INDEX in self.sizes:
            return sorted(set(self.read_json(INDEX)["weight_map"].values()))
        return [SINGLE_FILE]

    def here(self, names: list[str]) -> list[str]:
        return [name for name in names if name in self.sizes]

    def may_be_loaded(self) -> bool:
        names = self.weight_names()
        present = self.here(names)
        return present == names and sum(self.sizes[n] for n in names) <= LARGEST_TO_LOAD


def verify(
    target: str,
    revision: str | None = None,
    check_weights: bool = False,
    code_only: bool = False,
) -> Report:
    """Run every check.

    Args:
        target: A folder, or an id on the Hub.
        revision: Commit, tag or branch of an id.
        check_weights: Also read all weights for their sha256.
        code_only: There should be no weights: it was published for others' auto_maps.

    Raises:
        ValueError: ``target`` is neither.
        Failure: the Hub does not give its files.
    """
    with tempfile.TemporaryDirectory() as home:
        found = _find(target, revision, Path(home))
        found.code_only = code_only
        checks = Checks(NEEDS)
        for name, function in (
            ("manifest", check_manifest),
            ("code", check_code),
            ("loader files", check_loader_files),
            ("auto_map", check_auto_map),
            ("other files", check_other_files),
            ("nothing pickled", check_pickles),
            ("weight files", check_weight_files),
            ("index", check_index),
            ("config", check_config),
            ("architecture", check_architecture),
            ("token ids", check_token_ids),
            ("image size", check_image_size),
            ("card", check_card),
        ):
            checks.run(name, lambda function=function: function(found))
        checks.run("sha256 of weights", lambda: check_sha256(found, check_weights))
        _ask_a_stranger(found, checks, Path(home))
    # A server may repeat the token in what it says.
    told = [replace(check, detail=without_secrets(check.detail)) for check in checks.done.values()]
    return Report(target, found.revision, told)


def _find(target: str, revision: str | None, home: Path) -> Target:
    folder = Path(target)
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"{target} is a folder and has no revision {revision}: leave that out")
        paths = [path for path in folder.rglob("*") if path.is_file()]
        names = {path.relative_to(folder): path for path in paths}
        # Caches of git and of the Hub's client.
        kept = {str(n): p for n, p in names.items() if not any(d[0] == "." for d in n.parts[:-1])}
        sizes = {name: path.stat().st_size for name, path in kept.items()}
        return Target(str(folder.resolve()), folder, sizes)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", target):
        raise ValueError(f"{target} is neither a folder nor an id on the Hub: give DIR or org/name")
    commit, files = list_files(target, revision)
    left = (*PICKLES, ".safetensors")
    read = {name: file for name, file in files.items() if not name.lower().endswith(left)}
    folder = download(target, commit, read, home / "hub") if read else home
    sizes = {name: file.size for name, file in files.items()}
    hashes = {name: file.lfs.sha256 for name, file in files.items() if file.lfs}
    return Target(target, folder, sizes, hashes, commit)


def check_manifest(target: Target) -> str:
    manifest = target.read_json(MANIFEST)
    for name in ("version", "upstream_revision", "code", "weights", "files"):
        require(name in manifest, f"{MANIFEST} has no {name}")
    for name in ("repository", "revision", "files"):
        require(name in manifest["weights"], f"{MANIFEST} has no {name} under weights")
    hashes = [*manifest["code"].values(), *manifest["files"].values()]
    hashes += [file["sha256"] for file in manifest["weights"]["files"].values()]
    wrong = [value for value in hashes if not re.fullmatch("[0-9a-f]{64}", str(value))]
    require(not wrong, f"{len(wrong)} values are no sha256: {shorten(map(str, wrong))}")
    require(manifest["code"], f"{MANIFEST} lists no code")
    return f"version {manifest['version']}, {len(hashes)} hashes"


def check_code(target: Target) -> str:
    """Whether every file of code is the manifest's, and of the same version, this clone's."""
    from glm4v_patched import __version__

    manifest = target.read_json(MANIFEST)
    here = {name for name in target.sizes if name.endswith(".py")}
    foreign = here - set(manifest["code"])
    require(not foreign, f"code that the manifest does not list: {shorten(foreign)}")
    texts = {name: (target.folder / name).read_bytes() for name in here}
    changed = [n for n, t in texts.items() if hashlib.sha256(t).hexdigest() != manifest["code"][n]]
    require(not changed, f"not what the manifest says: {shorten(changed)}")
    if manifest["version"] != __version__:
        return f"{len(here)} files; not compared with this clone, which is version {__version__}"
    other = [n for n, t in texts.items() if not _equals(REMOTE / n, t)]
    require(
        not other,
        f"the manifest agrees, but version {__version__} of this clone has another "
        f"{shorten(other)}: build again, or raise the version",
    )
    return f"{len(here)} files, those of this clone"


def _equals(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def check_loader_files(target: Target) -> str:
    """Whether all that the loader will look for is there, found as the loader finds it."""
    references = {
        reference
        for auto_map in AUTO_MAPS.values()
        for value in auto_map.values()
        for reference in (value if isinstance(value, list) else [value])
        if reference is not None
    }
    entries = {f"{reference.split('.')[0]}.py" for reference in references}
    if MANIFEST in target.sizes:
        entries |= set(target.read_json(MANIFEST).get("code", ()))
    wanted, todo = set(entries), sorted(entries)
    while todo:
        name = todo.pop()
        if name in target.sizes:
            new = _relative_imports(target.read(name)) - wanted
            wanted |= new
            todo += sorted(new)
    missing = wanted - set(target.sizes)
    require(not missing, f"missing: {shorten(missing)}")
    for reference in references:
        module, _, name = reference.partition(".")
        body = ast.parse(target.read(f"{module}.py")).body
        defined = {getattr(node, "name", None) for node in body}
        require(name in defined, f"{module}.py defines no {name}")
    return f"{len(wanted)} files"


def _relative_imports(text: str) -> set[str]:
    """By the two regular expressions of transformers' loader, which read docstrings too."""
    found = re.findall(r"^\s*import\s+\.(\S+)\s*$", text, re.MULTILINE)
    found += re.findall(r"^\s*from\s+\.(\S+)\s+import", text, re.MULTILINE)
    return {f"{name}.py" for name in found}


def check_auto_map(target: Target) -> str:
    """Whether no file sends the loader to other classes, or to another repository."""
    read = [name for name in target.sizes if name.endswith(".json") and name != MANIFEST]
    for name in sorted(read):
        content = json.loads(target.read(name))
        given = content.get("auto_map") if isinstance(content, dict) else None
        expected = AUTO_MAPS.get(name)
        differing = {
            key: (given or {}).get(key, "nothing")
            for key in {**(given or {}), **(expected or {})}
            if (given or {}).get(key) != (expected or {}).get(key)
        }
        require(
            not differing,
            f"{name}: "
            + ", ".join(f"{k} is {v}" for k, v in sorted(differing.items()))
            + f"; expected {expected or 'no auto_map'}",
        )
    return f"ours in {len(AUTO_MAPS)} files"


def check_other_files(target: Target) -> str:
    """Whether files are the manifest's, but for code, weights and the card, which people edit."""
    manifest = target.read_json(MANIFEST)
    listed = set(manifest["files"])
    left_out = {INDEX} if target.code_only else set()
    missing = listed - set(target.sizes) - left_out
    require(not missing, f"missing: {shorten(missing)}")
    elsewhere = {name for name in target.sizes if name.endswith((".py", ".safetensors"))}
    elsewhere |= {name for name in target.sizes if _is_pickle(target, name)}
    foreign = set(target.sizes) - listed - elsewhere - NOT_OURS - {MANIFEST}
    require(not foreign, f"not in the manifest: {shorten(foreign)}")
    changed = [
        name
        for name in sorted(listed - left_out - {"README.md"})
        if fingerprint(target.folder / name)["sha256"] != manifest["files"][name]
    ]
    require(not changed, f"not what the manifest says: {shorten(changed)}")
    return f"{len(listed)} files"


def check_pickles(target: Target) -> str:
    found = [name for name in target.sizes if _is_pickle(target, name)]
    require(not found, f"loading these can run code hidden in them: {shorten(found)}")
    return f"none of {len(target.sizes)} files, by name and first bytes"


def _is_pickle(target: Target, name: str) -> bool:
    path = target.folder / name
    if name.lower().endswith(PICKLES):
        return True
    if name.endswith(".safetensors") or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4).startswith(PICKLE_STARTS)


def check_weight_files(target: Target) -> str:
    """Whether they are there, of the manifest's size, and whole safetensors."""
    manifest = target.read_json(MANIFEST)["weights"]
    if target.code_only:
        here = target.here(sorted(manifest["files"]))
        require(not here, f"a repository of code only holds {shorten(here)}")
        raise Skip("a repository of code only")
    names = target.weight_names()
    listed = set(manifest["files"])
    require(set(names) == listed, f"the manifest lists {shorten(listed)}, not {shorten(names)}")
    here = target.here(names)
    extra = {n for n in target.sizes if n.endswith(".safetensors")} - listed
    require(not extra, f"not in the manifest: {shorten(extra)}")
    if not here and manifest["repository"] and target.is_local:
        raise Skip(
            f"left for a server-side copy from {manifest['repository']}@{manifest['revision']}"
        )
    require(
        here == names,
        f"missing: {shorten(set(names) - set(here))}; for a repository of code only, --code-only",
    )
    for name in names:
        size = manifest["files"][name]["size"]
        require(target.sizes[name] == size, f"{name}: {target.sizes[name]:,} bytes, not {size:,}")
        given = target.hashes.get(name, manifest["files"][name]["sha256"])
        require(given == manifest["files"][name]["sha256"], f"{name}: the Hub has sha256 {given}")
        target.tensors[name] = _read_header(target, name)
    total = sum(target.sizes[name] for name in names)
    return f"{len(names)} files, {total:,} bytes, headers valid"


def _read_header(target: Target, name: str) -> dict[str, tuple[str, list[int]]]:
    """Type and shape of the tensors of a file; the length of the file is checked by the library."""
    if not target.is_local:
        try:
            with during(f"reading the header of {name}", READ_AGAIN):
                header = HfApi().parse_safetensors_file_metadata(
                    target.source, name, revision=target.revision
                )
        except Failure as failure:
            raise AssertionError(failure) from failure
        return {key: (info.dtype, list(info.shape)) for key, info in header.tensors.items()}
    try:
        with safe_open(target.folder / name, framework="numpy") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (no dict)
            return {key: (part.get_dtype(), part.get_shape()) for key, part in slices.items()}
    except Exception as error:  # the library's own class, which says too little by itself
        raise AssertionError(f"{name}: {error}") from error


def check_index(target: Target) -> str:
    if INDEX not in target.sizes:
        raise Skip("no index: one file of weights, or none, needs none")
    index = target.read_json(INDEX)
    where = index["weight_map"]
    if not target.tensors:
        return f"{len(where):,} tensors; the files that hold them are not at hand"
    held = {tensor: name for name, tensors in target.tensors.items() for tensor in tensors}
    wrong = {t for t in {*where, *held} if where.get(t) != held.get(t)}
    require(
        not wrong,
        f"{len(wrong)} tensors are not where the index says: {shorten(wrong)}",
    )
    size = sum(
        ITEM_SIZES[dtype] * math.prod(shape)
        for tensors in target.tensors.values()
        for dtype, shape in tensors.values()
    )
    told = index.get("metadata", {}).get("total_size", size)
    require(told == size, f"total_size is {told:,}, the tensors take {size:,} bytes")
    return f"{len(where):,} tensors in {len(target.tensors)} files"


def check_config(target: Target) -> str:
    return f"config.json has {len(target.read_json('config.json'))} fields"


def check_architecture(target: Target) -> str:
    """Whether vLLM serves it without ``--hf-overrides``: by this name and these fields."""
    config = target.read_json("config.json")
    given = config.get("architectures")
    require(given == [ARCHITECTURE], f"architectures is {given}, vLLM serves {[ARCHITECTURE]}")
    return f"{ARCHITECTURE}, which vLLM serves"


def check_token_ids(target: Target) -> str:
    config = target.read_json("config.json")
    added = target.read_json("tokenizer.json")["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    for name, token in SPECIAL_IDS.items():
        given = config.get(name)
        require(
            given == ids.get(token),
            f"{name} is {given}, but {token} is {ids.get(token)} to the tokenizer",
        )
    size = config["padded_vocab_size"]
    for name in ("config.json", "generation_config.json"):
        eos = target.read_json(name).get("eos_token_id")
        for number in eos if isinstance(eos, list) else [eos]:
            inside = isinstance(number, int) and 0 <= number < size
            require(inside, f"{name}: eos_token_id has {number}, outside of {size} ids")
    return ", ".join(f"{name} {config[name]}" for name in SPECIAL_IDS)


def check_image_size(target: Target) -> str:
    sizes = {
        "config.json": target.read_json("config.json")["vision_config"].get("image_size"),
        "tokenizer_config.json": target.read_json("tokenizer_config.json").get("image_size"),
        "preprocessor_config.json": target.read_json("preprocessor_config.json")["size"]["height"],
    }
    told = ", ".join(f"{size} in {name}" for name, size in sizes.items())
    require(len(set(sizes.values())) == 1 and None not in sizes.values(), f"image_size is {told}")
    return f"{sizes['config.json']} in {len(sizes)} files"


def check_card(target: Target) -> str:
    """The fields by which the Hub files a model, and a text without gaps."""
    text = target.read("README.md")
    require(text.startswith("---\n"), "README.md does not begin with its metadata")
    data = ModelCard(text).data.to_dict()
    expected = {"license": "other", "library_name": "transformers"}
    expected |= {"pipeline_tag": "image-text-to-text"}
    for name, value in expected.items():
        require(data.get(name) == value, f"{name} is {data.get(name)!r}, expected {value!r}")
    for name in ("license_name", "license_link", "base_model", "language", "tags"):
        require(data.get(name), f"{name} is missing")
    for name in ("language", "tags"):
        values = data[name] if isinstance(data[name], list) else [data[name]]
        odd = [value for value in values if not isinstance(value, str)]
        require(not odd, f"{name} holds {shorten(map(str, odd))}, expected words")
    version = target.read_json(MANIFEST)["version"]
    pinned = set(re.findall(r'"v(\d+\.\d+\.\d+)"', text))
    require(pinned <= {version}, f"it pins {shorten(pinned)}, the manifest has {version}")
    link = data["license_link"]
    if link not in ("LICENSE", "LICENSE.md"):
        require(
            re.match(r"https?://[^/\s]+/\S", link),
            f"license_link is {link!r}: the Hub takes an address, LICENSE or LICENSE.md",
        )
    else:
        require(link in target.sizes, f"license_link is {link}, which is missing")
    base = data["base_model"]
    require(
        isinstance(base, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", base),
        f"base_model is {base!r}, expected one id such as org/name",
    )
    relation = data.get("base_model_relation", "finetune")
    kinds = ("adapter", "finetune", "merge", "quantized")
    require(relation in kinds, f"base_model_relation is {relation!r}, expected one of {kinds}")
    gaps = re.findall(r"\{\{.*?\}\}|\{%.*?%\}", text)
    require(not gaps, f"the template was not filled in: {shorten(gaps)}")
    return f"{data['license']} ({data['license_name']}), of {base}"


def check_sha256(target: Target, asked: bool) -> str:
    weights = target.read_json(MANIFEST)["weights"]["files"]
    here = target.here(sorted(weights))
    if not here:
        raise Skip("no weights are at hand")
    if not target.is_local and set(here) <= set(target.hashes):
        return f"{len(here)} files, by what the Hub says it stores"
    if not asked:
        raise Skip("reads all weights: ask for it with --weights")
    unknown = set(here) - set(target.hashes)
    require(target.is_local, f"the Hub gives no sha256 of {shorten(unknown)}")
    wrong = [n for n in here if fingerprint(target.folder / n) != weights[n]]
    require(not wrong, f"not what the manifest says: {shorten(wrong)}")
    return f"{len(here)} files"


def _ask_a_stranger(target: Target, checks: Checks, home: Path) -> None:
    """Run the checks of :mod:`stranger` in a process of its own, with empty caches."""
    request, results = home / "request.json", home / "results.jsonl"
    tensors = {k: shape for part in target.tensors.values() for k, (_, shape) in part.items()}
    names, total_size, whole = sorted(tensors) or None, None, False
    if not any(checks.failed(name) or name in checks.blocked for name in ("weight files", "index")):
        whole = bool(tensors) and target.may_be_loaded()
        if INDEX in target.sizes:
            index = target.read_json(INDEX)
            names = sorted(index["weight_map"])
            total_size = index.get("metadata", {}).get("total_size")
    values = {
        "source": target.source,
        "revision": target.revision,
        "given": {} if checks.failed("config") else target.read_json("config.json"),
        "tensors": tensors or None,
        "names": names,
        "total_size": total_size,
        "whole": whole,
        "needs": {name: list(needs) for name, needs in NEEDS.items()},
        "so_far": [asdict(check) for check in checks.done.values()],
        "blocked": sorted(checks.blocked),
        "results": str(results),
    }
    request.write_text(json.dumps(values), encoding="utf-8")
    environment = os.environ | {
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_MODULES_CACHE": str(home / "modules"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if target.is_local:
        # Nothing is asked of the Hub, and nobody's token is within reach.
        environment["HF_HUB_OFFLINE"] = "1"
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
            environment.pop(name, None)
    else:  # for a private repository; the place would follow HF_HOME
        environment["HF_TOKEN_PATH"] = constants.HF_TOKEN_PATH
    ended, told = None, ""
    try:
        # -I: neither this repository nor what PYTHONPATH names can be imported.
        process = subprocess.run(
            [sys.executable, "-I", str(STRANGER), str(request)],
            cwd=home,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
        ended, told = process.returncode, process.stderr
    except subprocess.TimeoutExpired:
        told = f"not done after {SECONDS} s"
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    for line in lines:
        checks.add(Check(**json.loads(line)))
    unheard = [name for name in NAMES if name not in checks.done]
    for name in unheard:
        if name == unheard[0]:
            last = told.strip().splitlines()[-1:] or ["it said nothing"]
            detail = f"the process ended with status {ended} here: {last[0]}"
            checks.add(Check(name, FAILED, detail))
        else:
            checks.add(Check(name, SKIPPED, f"the process ended at: {unheard[0]}"))
