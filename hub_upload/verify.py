"""Checks a built folder, or a repository of the Hub, as a careful person would before trusting it.

What can be told from the files is told here, of bytes that are read once. What needs the published
code to run is told by :mod:`stranger` in a fresh process, from a copy of those bytes, offline and
without a token; and only if nothing else has failed. Code that is not this clone's own, whatever
its manifest says, is run for nobody but who asks for it.
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.hf_api import RepoSibling
from safetensors import safe_open

from .build import (
    ARCHITECTURE,
    AUTO_MAPS,
    FILES,
    READ_AGAIN,
    REMOTE,
    SPECIAL_IDS,
    UPSTREAM,
    download,
    fingerprint,
    list_files,
)
from .faults import Failure, during, printable, without_secrets
from .files import (
    ID,
    INDEX,
    LARGEST_TO_READ,
    MANIFEST,
    PICKLES,
    SINGLE_FILE,
    files_of,
    is_pickle,
    read_manifest,
    read_object,
    shards_of_index,
)
from .stranger import FAILED, NAMES, PASSED, SKIPPED, Check, Checks, Skip, require, shorten

STRANGER = Path(__file__).with_name("stranger.py")
SECONDS = 3600
# Larger weights are compared by names and shapes, with an empty model.
LARGEST_TO_LOAD = 1_000_000_000
# git's own, which the Hub adds.
NOT_OURS = {".gitattributes", ".gitignore"}
ITEM_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}
ITEM_SIZES |= {"I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
# Fields whose value may be the id of a repository: nothing is loaded from there.
MAY_NAME_A_REPOSITORY = {"_name_or_path", "name_or_path"}
# What the process that runs the code gets of this one's environment: no token, proxy or home.
ENVIRONMENT = {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "TEMP", "TMP", "SYSTEMROOT"}
ENVIRONMENT |= {"LD_LIBRARY_PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}

NEEDS = {
    "code": ["manifest"],
    "loader files": ["manifest"],
    "other files": ["manifest"],
    "weight files": ["manifest"],
    "card": ["manifest"],
    "index": ["weight files"],
    "sha256 of weights": ["manifest", "weight files"],
    "tokenizer loads": ["config loads"],
    "processor loads": ["tokenizer loads"],
    "parameter names": ["config loads"],
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
        rows = [printable(f"{c.name:<{width}}  {c.status:<7}  {c.detail}") for c in self.checks]
        counts = Counter(check.status for check in self.checks)
        summary = ", ".join(f"{number} {status}" for status, number in counts.items())
        where = f"{self.target}@{self.revision}" if self.revision else self.target
        return "\n".join([*rows, f"{where}: {summary}"])


@dataclass
class Target:
    """What is verified.

    Attributes:
        name: Folder, or id on the Hub.
        contents: The small files, by their path: all but weights, pickles and what is too large.
        sizes: Bytes of every file, by its path.
        folder: Holds the weights of a folder; None for a repository of the Hub.
        listed: What the Hub tells of every file.
        revision: Commit on the Hub; None for a folder.
        code_only: Weights should be absent.
        run_code: The person has said that code which is not this clone's may run.
        tensors: Shape and type of every tensor at hand, by file; filled by a check.
        foreign_code: Files of code that are not this clone's; filled by a check.
    """

    name: str
    contents: dict[str, bytes]
    sizes: dict[str, int]
    folder: Path | None = None
    listed: dict[str, RepoSibling] = field(default_factory=dict)
    revision: str | None = None
    code_only: bool = False
    run_code: bool = False
    tensors: dict[str, dict] = field(default_factory=dict)
    foreign_code: list[str] = field(default_factory=list)

    @property
    def is_local(self) -> bool:
        return self.folder is not None

    @property
    def hashes(self) -> dict[str, str]:
        """sha256 of the files that the Hub gives one for."""
        return {name: file.lfs.sha256 for name, file in self.listed.items() if file.lfs}

    @property
    def manifest(self) -> dict:
        require(MANIFEST in self.contents, f"{MANIFEST} is missing")
        return read_manifest(self.contents[MANIFEST])

    def read(self, name: str) -> str:
        require(name in self.contents, f"{name} is missing")
        return self.contents[name].decode("utf-8")

    def read_json(self, name: str) -> dict:
        require(name in self.contents, f"{name} is missing")
        return read_object(self.contents[name], name)

    def weight_names(self) -> list[str]:
        """The files that the loader will look for."""
        if INDEX in self.sizes:
            return shards_of_index(self.read_json(INDEX), INDEX)
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
    run_code: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Run every check.

    Args:
        target: A folder, or an id on the Hub.
        revision: Commit, tag or branch of an id.
        check_weights: Also read all weights for their sha256.
        code_only: There should be no weights: it was published for others' auto_maps.
        run_code: Run code that is not this clone's, too.
        say: Is told which code that is, before it runs.

    Raises:
        ValueError: ``target`` is neither, or has links that lead out of it.
        Failure: the Hub does not give its files.
    """
    with tempfile.TemporaryDirectory() as home:
        found = _find(target, revision, Path(home))
        found.code_only, found.run_code = code_only, run_code
        checks = check_files(found, check_weights)
        _ask_a_stranger(found, checks, Path(home), say)
    # A server may repeat the token in what it says.
    told = [replace(check, detail=without_secrets(check.detail)) for check in checks.done.values()]
    return Report(target, found.revision, told)


def check_files(target: Target, check_weights: bool = False) -> Checks:
    """The checks that run nothing of what they look at."""
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
        ("sha256 of weights", lambda target: check_sha256(target, check_weights)),
    ):
        checks.run(name, lambda function=function: function(target))
    return checks


def read_folder(folder: Path) -> Target:
    """A folder as it is now.

    Raises:
        ValueError: it has links that lead out of it.
    """
    paths = files_of(folder)
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    small = [name for name, size in sizes.items() if _is_read(name, size)]
    contents = {name: paths[name].read_bytes() for name in small}
    # What was read counts, whatever has become of the file since it was listed.
    sizes |= {name: len(content) for name, content in contents.items()}
    return Target(str(folder), contents, sizes, folder)


def _is_read(name: str, size: int) -> bool:
    return size <= LARGEST_TO_READ and not name.lower().endswith((*PICKLES, ".safetensors"))


def _find(target: str, revision: str | None, home: Path) -> Target:
    if Path(target).is_dir():
        if revision is not None:
            raise ValueError(f"{target} is a folder and has no revision {revision}: leave that out")
        return read_folder(Path(target))
    if not re.fullmatch(ID, target):
        raise ValueError(f"{target} is neither a folder nor an id on the Hub: give DIR or org/name")
    commit, files = list_files(target, revision)
    read = {name: file for name, file in files.items() if _is_read(name, file.size)}
    contents = download(target, commit, read, home / "hub")
    sizes = {name: file.size for name, file in files.items()}
    return Target(target, contents, sizes, None, files, commit)


def check_manifest(target: Target) -> str:
    manifest = target.manifest
    number = len(manifest["code"]) + len(manifest["files"]) + len(manifest["weights"]["files"])
    return f"version {manifest['version']}, {number} hashes"


def check_code(target: Target) -> str:
    """Whether every file of code is the manifest's, and this clone's."""
    from glm4v_patched import __version__

    manifest = target.manifest
    here = {name for name in target.sizes if name.endswith(".py")}
    foreign = here - set(manifest["code"])
    require(not foreign, f"code that the manifest does not list: {shorten(foreign)}")
    changed = [name for name in here if _digest(target, name) != manifest["code"][name]]
    require(not changed, f"not what the manifest says: {shorten(changed)}")
    target.foreign_code = sorted(n for n in here if not _equals(REMOTE / n, target.contents[n]))
    if not target.foreign_code:
        return f"{len(here)} files, those of this clone"
    told = f"{len(target.foreign_code)} of {len(here)} files are not this clone's"
    if target.run_code:
        return f"{told}, and are run because --run-code says so"
    version = manifest["version"]
    cure = f"the manifest agrees, but is of version {version} and this clone of {__version__}: "
    cure += "use the clone that built it"
    if version == __version__:
        cure = f"the manifest agrees, but version {version} of this clone has another: build "
        cure += "again, or raise the version"
    require(
        False,
        f"{told} ({shorten(target.foreign_code)}); {cure}. None of it was run; who has read it, "
        "and trusts it, can say --run-code",
    )


def _digest(target: Target, name: str) -> str | None:
    content = target.contents.get(name)
    return None if content is None else hashlib.sha256(content).hexdigest()


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
    entries |= set(target.manifest["code"])
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
    for name in sorted(target.contents):
        if not name.endswith(".json") or name == MANIFEST:
            continue
        content = target.read_json(name)
        given = content.get("auto_map", {})
        expected = AUTO_MAPS.get(name, {})
        require(given == expected, f"{name}: auto_map is {given}; expected {expected or 'none'}")
        if name in ("tokenizer.json", INDEX):  # words and names of tensors; nothing is loaded by it
            continue
        for path, value in _strings({k: v for k, v in content.items() if k != "auto_map"}):
            hidden = {"auto_map", "custom_pipelines"} & set(path)
            require(not hidden, f"{name}: {'.'.join(path)} names code")
            elsewhere = re.match(ID + r"(--|[@:]|$)", value)
            require(
                not elsewhere or path[-1] in MAY_NAME_A_REPOSITORY,
                f"{name}: {'.'.join(path)} names another repository, {value!r}",
            )
    return f"ours in {len(AUTO_MAPS)} files"


def _strings(values: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every string in JSON, with the keys that lead to it."""
    if isinstance(values, str):
        yield path, values
    elif isinstance(values, (dict, list)):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        for key, value in items:
            yield from _strings(value, (*path, str(key)))


def check_other_files(target: Target) -> str:
    """Whether files are the manifest's, but for code, weights and the card, which people edit."""
    listed = set(target.manifest["files"])
    unknown = listed - FILES
    require(not unknown, f"no build writes what the manifest lists: {shorten(unknown)}")
    left_out = {INDEX} if target.code_only else set()
    missing = listed - set(target.sizes) - left_out
    require(not missing, f"missing: {shorten(missing)}")
    elsewhere = {name for name in target.sizes if name.endswith((".py", ".safetensors"))}
    elsewhere |= {name for name in target.sizes if _is_pickle(target, name)}
    foreign = set(target.sizes) - listed - elsewhere - NOT_OURS - {MANIFEST}
    require(not foreign, f"not in the manifest: {shorten(foreign)}")
    hashes = target.manifest["files"]
    compared = sorted(listed - left_out - {"README.md"})
    changed = [name for name in compared if _digest(target, name) != hashes[name]]
    require(not changed, f"not what the manifest says: {shorten(changed)}")
    for name in sorted(listed - left_out):
        require("\0" not in target.read(name), f"{name} is no text")
    return f"{len(listed)} files"


def check_pickles(target: Target) -> str:
    found = [name for name in target.sizes if _is_pickle(target, name)]
    require(not found, f"loading these can run code hidden in them: {shorten(found)}")
    return f"none of {len(target.sizes)} files, by name and content"


def _is_pickle(target: Target, name: str) -> bool:
    return name.lower().endswith(PICKLES) or is_pickle(target.contents.get(name, b""))


def check_weight_files(target: Target) -> str:
    """Whether they are there, of the manifest's size, and whole safetensors."""
    manifest = target.manifest["weights"]
    if target.code_only:
        here = {*target.here(sorted(manifest["files"]))}
        here |= {name for name in target.sizes if name.endswith(".safetensors")}
        require(not here, f"a repository of code only holds {shorten(sorted(here))}")
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
                    target.name, name, revision=target.revision
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
    version = target.manifest["version"]
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
    _check_origin(target, base, " ".join(text.split()))
    gaps = re.findall(r"\{\{.*?\}\}|\{%.*?%\}", text)
    require(not gaps, f"the template was not filled in: {shorten(gaps)}")
    return f"{data['license']} ({data['license_name']}), of {base}"


def _check_origin(target: Target, base: str, text: str) -> None:
    """Whether the card says of the weights what the manifest does."""
    manifest = target.manifest
    fine_tune, source = manifest.get("fine_tune"), manifest["weights"]["repository"]
    if fine_tune:
        require(
            base == fine_tune["base"],
            f"base_model is {base}, the manifest says that {fine_tune['base']} was fine-tuned",
        )
    unchanged = re.search("weights of .{,200}?, unchanged|[Nn]othing was fine-?tuned", text)
    require(
        not unchanged or (source == UPSTREAM and not fine_tune),
        f"it says {unchanged and unchanged[0]!r}, but the manifest has weights "
        + (f"fine-tuned from {base}" if fine_tune else f"of {source or 'a folder'}")
        + f", not those of {UPSTREAM} at a commit: build again, with --fine-tune-of",
    )


def check_sha256(target: Target, asked: bool) -> str:
    weights = target.manifest["weights"]["files"]
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


def _ask_a_stranger(target: Target, checks: Checks, home: Path, say: Callable[[str], None]) -> None:
    """Run the checks of :mod:`stranger` in a process of its own, with empty caches.

    What runs is a copy of the files that were checked and of no others.
    """
    if failures := [name for name in checks.done if checks.failed(name)]:
        for name in NAMES:
            checks.add(Check(name, SKIPPED, f"nothing is run because of: {', '.join(failures)}"))
        return
    try:
        snapshot = _snapshot(target, home)
    except Failure as failure:  # weights that the Hub does not give
        checks.add(Check(NAMES[0], FAILED, str(failure)))
        for name in NAMES[1:]:
            checks.add(Check(name, SKIPPED, f"cannot be checked without: {NAMES[0]}"))
        return
    request, results = home / "request.json", home / "results.jsonl"
    tensors = {k: shape for part in target.tensors.values() for k, (_, shape) in part.items()}
    names, total_size = sorted(tensors) or None, None
    if INDEX in target.contents:
        index = target.read_json(INDEX)
        names, total_size = sorted(index["weight_map"]), index.get("metadata", {}).get("total_size")
    values = {
        "source": str(snapshot),
        "given": target.read_json("config.json"),
        "tensors": tensors or None,
        "names": names,
        "total_size": total_size,
        "whole": bool(tensors) and target.may_be_loaded(),
        "needs": {name: list(needs) for name, needs in NEEDS.items()},
        "results": str(results),
    }
    request.write_text(json.dumps(values), encoding="utf-8")
    if target.foreign_code:
        say(_announcement(target))
    ended, told = _run(request, home)
    lines = results.read_text("utf-8", errors="replace").splitlines() if results.exists() else []
    for line, name in zip(lines, NAMES, strict=False):
        try:
            check = Check(**json.loads(line))
        except (ValueError, TypeError, RecursionError):
            break  # it was not written by ours
        if check.name != name or check.status not in (PASSED, FAILED, SKIPPED):
            break
        checks.add(replace(check, detail=str(check.detail)))
    unheard = [name for name in NAMES if name not in checks.done]
    for name in unheard:
        if name == unheard[0]:
            last = told.strip().splitlines()[-1:] or ["it said nothing"]
            detail = f"the process ended with status {ended} here: {last[0]}"
            checks.add(Check(name, FAILED, detail))
        else:
            checks.add(Check(name, SKIPPED, f"the process ended at: {unheard[0]}"))


def _snapshot(target: Target, home: Path) -> Path:
    """A folder with the bytes that were checked, and with the weights where they are loaded."""
    folder = home / "snapshot"
    folder.mkdir()
    manifest = target.manifest
    for name in {*manifest["code"], *manifest["files"]} & target.contents.keys():
        (folder / name).write_bytes(target.contents[name])
    if target.may_be_loaded():
        for name in target.weight_names():
            if target.is_local:
                (folder / name).symlink_to(os.path.realpath(target.folder / name))
            else:
                files = {name: target.listed[name]}
                content = download(target.name, target.revision, files, home / "hub")[name]
                (folder / name).write_bytes(content)
    return folder


def _announcement(target: Target) -> str:
    where = f"{target.name}@{target.revision}" if target.revision else target.name
    return printable(
        f"--run-code: running {len(target.foreign_code)} files of code of {where} that are not "
        f"this clone's: {', '.join(target.foreign_code)}. They get no token, an empty home and "
        "HF_HUB_OFFLINE=1; what your account may read and write here, they may."
    )


def _run(request: Path, home: Path) -> tuple[int | None, str]:
    """The status of the process that runs the published code, and what it wrote to its errors."""
    (home / "empty").mkdir()
    environment = {name: value for name, value in os.environ.items() if name in ENVIRONMENT}
    environment |= {
        "HOME": str(home / "empty"),
        "USERPROFILE": str(home / "empty"),
        "HF_HOME": str(home / "empty"),
        "HF_MODULES_CACHE": str(home / "modules"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    try:
        # -I: neither this repository nor what PYTHONPATH names can be imported.
        process = subprocess.run(
            [sys.executable, "-I", str(STRANGER), str(request)],
            cwd=home / "empty",
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return None, f"not done after {SECONDS} s"
    return process.returncode, process.stderr
