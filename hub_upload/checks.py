"""The checks that run nothing of what they look at: each returns a line, or raises."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from huggingface_hub import HfApi, ModelCard
from safetensors import SafetensorError, safe_open

from glm4v_patched import __version__

from .errors import Failure, during
from .files import Contents, sha256_of_file
from .layout import (
    ARCHITECTURE,
    AUTO_MAPS,
    FILES,
    ID,
    INDEX,
    MANIFEST,
    SPECIAL_IDS,
    UPSTREAM,
    our_code,
)
from .load_check import FAILED, Check, Skip, require, run_check, shorten
from .manifest import Manifest, read_manifest

# Larger weights are compared by names and shapes, with an empty model.
LARGEST_TO_LOAD = 1_000_000_000
# Fields whose value may be the id of a repository: nothing is loaded from there.
MAY_NAME_A_REPOSITORY = {"_name_or_path", "name_or_path"}


@dataclass
class Target(Contents):
    """What is checked."""

    revision: str | None = None  # commit on the Hub; None for a folder
    code_only: bool = False  # weights should be absent
    check_weights: bool = False  # read all weights for their sha256
    run_code: bool = False  # somebody has said that code which is not this clone's may run
    # Filled by checks: shapes of the tensors at hand, by file; code that is not this clone's.
    tensors: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    foreign_code: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name

    @property
    def manifest(self) -> Manifest:
        try:
            return read_manifest(self.read(MANIFEST))
        except ValueError as error:
            raise Skip("cannot be checked without: manifest") from error

    @property
    def may_be_loaded(self) -> bool:
        return 0 < sum(self.files[name].size for name in self.tensors) <= LARGEST_TO_LOAD

    def compare(self, listed: dict[str, str]) -> None:
        """Raise unless these files are there, with these sha256."""
        missing = listed.keys() - self.files.keys()
        require(not missing, f"missing: {shorten(missing)}")
        changed = [name for name in listed if self.files[name].sha256 != listed[name]]
        require(not changed, f"not what the manifest says: {shorten(changed)}")


def check_manifest(target: Target) -> str:
    manifest = read_manifest(target.read(MANIFEST))
    return f"version {manifest.version}, {len(manifest.names) - 1} hashes"


def check_code(target: Target) -> str:
    """Whether every file of code is there, the manifest's, and this clone's."""
    manifest = target.manifest
    here = {name: file.content for name, file in target.files.items() if name.endswith(".py")}
    unlisted = here.keys() - manifest.code.keys()
    require(not unlisted, f"code that the manifest does not list: {shorten(unlisted)}")
    target.compare(manifest.code)
    ours = our_code()
    names = here.keys() | ours.keys()
    target.foreign_code = sorted(n for n in names if here.get(n) != ours.get(n))
    if not target.foreign_code:
        return f"{len(here)} files, those of this clone"
    told = f"{len(target.foreign_code)} of {len(here)} files are not this clone's"
    if target.run_code:
        return f"{told}, and are run because --run-code says so"
    raise AssertionError(
        f"{told} ({shorten(target.foreign_code)}): it is of version {manifest.version}, this clone "
        f"of {__version__}; use the clone that built it, or build again. None of it was run; who "
        "has read it, and trusts it, can say --run-code"
    )


def check_auto_map(target: Target) -> str:
    """Whether no file sends the loader to other classes, or to another repository."""
    for name in sorted(target.files):
        if not name.endswith(".json") or name == MANIFEST:
            continue
        content = target.read_json(name)
        given, expected = content.pop("auto_map", {}), AUTO_MAPS.get(name, {})
        require(given == expected, f"{name}: auto_map is {given}; expected {expected or 'none'}")
        if name in ("tokenizer.json", INDEX):  # words and names of tensors; nothing is loaded by it
            continue
        for path, value in _strings(content):
            where = f"{name}: {'.'.join(path)}"
            require(not {"auto_map", "custom_pipelines"} & {*path}, f"{where} names code")
            elsewhere = re.match(ID + r"(--|[@:]|$)", value)
            allowed = not elsewhere or path[-1] in MAY_NAME_A_REPOSITORY
            require(allowed, f"{where} names another repository, {value!r}")
    return f"ours in {len(AUTO_MAPS)} files"


def _strings(values: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every string in JSON, with the keys that lead to it."""
    if isinstance(values, str):
        yield path, values
    elif isinstance(values, (dict, list)):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from _strings(value, (*path, str(key)))


def check_other_files(target: Target) -> str:
    """Whether files are the manifest's, but for code, weights and the card, which people edit.

    All of them are text of names that builds write: nothing that is loaded by unpickling it.
    """
    listed = dict(target.manifest.files)
    if target.code_only:
        listed.pop(INDEX, None)
    unknown = listed.keys() - FILES
    require(not unknown, f"no build writes what the manifest lists: {shorten(unknown)}")
    # Of these, the other checks tell; git's own files are added by the Hub.
    known = {MANIFEST, ".gitattributes", ".gitignore", *listed}
    known |= {name for name in target.files if name.endswith((".py", ".safetensors"))}
    foreign = target.files.keys() - known
    require(not foreign, f"not in the manifest: {shorten(foreign)}")
    target.compare({name: digest for name, digest in listed.items() if name != "README.md"})
    for name in listed:
        require("\0" not in target.read(name).decode("utf-8"), f"{name} is no text")
    return f"{len(listed)} files"


def check_weights(target: Target) -> str:
    """Whether they are there, whole, and as large and with the sha256 that the manifest lists."""
    listed = target.manifest.weights
    here = {name: file for name, file in target.files.items() if name.endswith(".safetensors")}
    if target.code_only:
        require(not here, f"a repository of code only holds {shorten(here)}")
        raise Skip("a repository of code only")
    names, wanted = target.weight_names(), listed.files.keys()
    require({*names} == wanted, f"the manifest lists {shorten(wanted)}, not {shorten(names)}")
    if not here and listed.repository and target.revision is None:
        raise Skip(f"left for a server-side copy from {listed.repository}@{listed.revision}")
    require(here.keys() <= wanted, f"not in the manifest: {shorten(here.keys() - wanted)}")
    missing = shorten(wanted - here.keys())
    require(not missing, f"missing: {missing}; for a repository of code only, --code-only")
    for name, weight in listed.files.items():
        file = here[name]
        require(file.size == weight.size, f"{name}: {file.size:,} bytes, not {weight.size:,}")
        given = sha256_of_file(file.path) if target.check_weights and file.path else file.sha256
        read = given or not file.path
        require(not read or given == weight.sha256, f"{name}: sha256 {given}, not {weight.sha256}")
    target.tensors = {name: _read_header(target, name) for name in names}
    compared = "sha256 compared" if read else "sha256 not compared without --weights"
    return f"{len(names)} files, {sum(f.size for f in here.values()):,} bytes, {compared}"


def _read_header(target: Target, name: str) -> dict[str, list[int]]:
    """The shapes of the tensors of a file; the length of the file is checked by the library."""
    path = target.files[name].path
    if path is None:
        with during(f"reading the header of {name}"):
            read = HfApi().parse_safetensors_file_metadata
            tensors = read(target.name, name, revision=target.revision).tensors
        return {key: list(info.shape) for key, info in tensors.items()}
    try:
        with safe_open(path, framework="numpy") as file:
            return {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise AssertionError(f"{name}: {error}") from error


def check_index(target: Target) -> str:
    if INDEX not in target.files or not target.tensors:
        raise Skip("no index, or no weights at hand")
    where = target.read_json(INDEX)["weight_map"]
    held = {tensor: name for name, tensors in target.tensors.items() for tensor in tensors}
    wrong = {t for t in {*where, *held} if where.get(t) != held.get(t)}
    require(not wrong, f"{len(wrong)} tensors are not where the index says: {shorten(wrong)}")
    return f"{len(where):,} tensors in {len(target.tensors)} files"


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
    sides = {
        "config.json": config["vision_config"]["image_size"],
        "tokenizer_config.json": target.read_json("tokenizer_config.json")["image_size"],
        "preprocessor_config.json": target.read_json("preprocessor_config.json")["size"]["height"],
    }
    told = ", ".join(f"{side} in {name}" for name, side in sides.items())
    require(len({*sides.values()}) == 1, f"image_size is {told}: they are not of the same model")
    return f"{ARCHITECTURE}, {', '.join(f'{name} {config[name]}' for name in SPECIAL_IDS)}"


def check_card(target: Target) -> str:
    """Whether it says nothing that the manifest does not; the Hub looks at its other fields."""
    text, manifest = target.read("README.md").decode("utf-8"), target.manifest
    require(text.startswith("---\n"), "README.md does not begin with its metadata")
    base, fine_tune = ModelCard(text).data.to_dict().get("base_model"), manifest.fine_tune
    require(base, "base_model is missing")
    wanted = fine_tune.base if fine_tune else base
    require(base == wanted, f"base_model is {base}, the manifest says that {wanted} was fine-tuned")
    pinned = set(re.findall(r'"v(\d+\.\d+\.\d+)"', text)) - {manifest.version}
    require(not pinned, f"it pins {shorten(pinned)}, the manifest has {manifest.version}")
    gaps = re.findall(r"\{\{.*?\}\}|\{%.*?%\}", text)
    require(not gaps, f"the template was not filled in: {shorten(gaps)}")
    text = " ".join(text.split())
    claim = re.search("weights of .{,200}?, unchanged|[Nn]othing was fine-?tuned", text)
    told = f"it says {claim and claim[0]!r} of weights that are not {UPSTREAM}'s at a commit"
    published = manifest.weights.repository == UPSTREAM and not fine_tune
    require(published or not claim, f"{told}: build again, with --fine-tune-of")
    return f"of {base}"


CHECKS: dict[str, Callable[[Target], str]] = {
    "manifest": check_manifest,
    "code": check_code,
    "auto_map": check_auto_map,
    "other files": check_other_files,
    "weight files": check_weights,
    "index": check_index,
    "config": check_config,
    "card": check_card,
}


def check_files(target: Target) -> list[Check]:
    return [run_check(name, partial(check, target)) for name, check in CHECKS.items()]


def refuse_what_fails(target: Target) -> None:
    """Raise ``Failure`` unless every check passes that runs nothing."""
    if failed := [f"{c.name}: {c.detail}" for c in check_files(target) if c.status == FAILED]:
        raise Failure(f"{target.name} does not pass verify: {'; '.join(failed)}")
