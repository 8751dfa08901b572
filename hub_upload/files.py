"""Files of a source, a build or a repository: what may be read, and what a manifest may say."""

import json
import os
import pickletools
import re
from pathlib import Path

MANIFEST = "CODE_MANIFEST.json"
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# A tokenizer.json takes 20 MB; what is larger is no small file of a model.
LARGEST_TO_READ = 100_000_000
# Loading these can run code that lies in them.
PICKLES = (".bin", ".ckpt", ".dill", ".h5", ".joblib", ".keras", ".msgpack", ".npy", ".npz")
PICKLES += (".pickle", ".pkl", ".pt", ".pth", ".tar", ".zip")
PICKLE_STARTS = (b"PK\x03\x04", *(bytes([0x80, protocol]) for protocol in range(2, 6)))
# A stream without such a start, which protocols 0 and 1 lack, reaches code by a name and a call.
NAMES_CODE = {"GLOBAL", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"}
CALLS_CODE = {"REDUCE", "BUILD", "OBJ", "NEWOBJ", "NEWOBJ_EX"}

ID = r"[\w.-]+/[\w.-]+"
_COMMIT = "[0-9a-f]{40}"
_FLAT_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"


def files_of(folder: Path) -> dict[str, Path]:
    """Every file by its path in the folder, but for folders whose names begin with a dot.

    Raises:
        ValueError: a link leads out of the folder, or to a folder; names it and where to. Links of
            the Hub's cache, from a snapshot to the blobs beside it, are followed.
    """
    root = Path(os.path.realpath(folder))
    of_cache = root.parent.name == "snapshots" and root.parents[1].name.startswith("models--")
    blobs = root.parents[1] / "blobs" if of_cache else None
    found = {}
    for where, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in [*folders, *names]:
            path = Path(where, name)
            if path.is_symlink():
                end = Path(os.path.realpath(path))
                inside = end.is_relative_to(root) or end.parent == blobs
                if not inside or end.is_dir():
                    what = "a link to a folder" if inside else "a link that leads out of the folder"
                    raise ValueError(
                        f"{folder / path.relative_to(root)} is {what}, to {end}, and is not "
                        "followed: put a copy in its place, or take it away"
                    )
            if path.is_file():
                found[path.relative_to(root).as_posix()] = path
    return found


def is_pickle(content: bytes) -> bool:
    """Whether Python's or torch's loader would find objects to make in it."""
    if content.startswith(PICKLE_STARTS):
        return True
    named = False
    try:
        for code, _, _ in pickletools.genops(content):
            named = named or code.name in NAMES_CODE
            if code.name == "INST" or (named and code.name in CALLS_CODE):
                return True
    except Exception:  # of many kinds; the loader ends there, too, and has called nothing before
        pass
    return False


def read_object(content: bytes, name: str) -> dict:
    """The JSON object in a file.

    Raises:
        ValueError: it holds none.
    """
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON ({error}): download it again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{name} holds a {type(values).__name__}, expected a JSON object")
    return values


def shards_of_index(index: dict, name: str) -> list[str]:
    """The files that an index names.

    Raises:
        ValueError: it is none, or names something else than safetensors in its own folder.
    """
    where = index.get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(f"{name} has no weight_map: it is no index of weights")
    odd = [file for file in where.values() if not _is_shard(file)]
    if odd:
        raise ValueError(
            f"{name} names {odd[:3]} ({len(odd)} of {len(where)} tensors), expected *.safetensors "
            "in one folder"
        )
    return sorted(set(where.values()))


def _is_shard(name: object) -> bool:
    return isinstance(name, str) and bool(re.fullmatch(_FLAT_NAME + r"\.safetensors", name))


def read_manifest(content: bytes, name: str = MANIFEST) -> dict:
    """A manifest as a build writes it: every field there, of its type, and every name a plain one.

    Raises:
        ValueError: it is another thing; names the field.
    """
    manifest = read_object(content, name)

    def require(condition: object, message: str) -> None:
        if not condition:
            raise ValueError(f"{name} {message}: it is none that `hub_upload build` wrote")

    def require_object(values: object, where: str) -> None:
        require(isinstance(values, dict), f"has a {type(values).__name__} as {where}")

    def require_fields(values: object, fields: set[str], where: str) -> None:
        require_object(values, where)
        missing, unknown = sorted(fields - values.keys()), sorted(values.keys() - fields)
        require(not missing, f"has no {', '.join(missing)} in {where}")
        require(not unknown, f"has {unknown[:3]} in {where}, which are unknown")

    fields = {"version", "upstream_revision", "code", "weights", "files"}
    # Builds of before fine-tunes had cards of their own lack this one.
    require_fields(manifest, fields | {"fine_tune"} & manifest.keys(), "it")
    weights = manifest["weights"]
    require_fields(weights, {"repository", "revision", "files"}, "weights")
    upstream = manifest["upstream_revision"]
    require(upstream == weights["revision"], f"has the upstream_revision {upstream!r}")
    version = manifest["version"]
    numbered = isinstance(version, str) and re.fullmatch(r"\d+(\.\d+){2}[\w.+-]*", version, re.A)
    require(numbered, f"has the version {version!r}, expected one such as 0.1.0")
    listed = {"code": r"[A-Za-z_]\w*\.py", "files": _FLAT_NAME}
    for field, pattern in listed.items():
        require_object(manifest[field], field)
        for file, digest in manifest[field].items():
            require(re.fullmatch(pattern, file, re.A), f"lists {file!r} under {field}")
            _require_sha256(require, file, digest)
    require(manifest["code"], "lists no code")
    require_object(weights["files"], "files of weights")
    for file, values in weights["files"].items():
        require(_is_shard(file), f"lists {file!r} as weights")
        require_fields(values, {"size", "sha256"}, file)
        sized = type(values["size"]) is int and values["size"] >= 0
        require(sized, f"has the size {values['size']!r} for {file}")
        _require_sha256(require, file, values["sha256"])
    every = [MANIFEST, *manifest["code"], *manifest["files"], *weights["files"]]
    require(len(every) == len(set(every)), "lists a file twice")
    source = (weights["repository"], weights["revision"])
    pinned = all(isinstance(part, str) for part in source) and (
        re.fullmatch(ID, source[0], re.A) and re.fullmatch(_COMMIT, source[1])
    )
    require(
        source == (None, None) or pinned,
        f"names {source[1]!r} as revision of the weights of {source[0]!r}, expected an id and a "
        "commit (40 hex digits), or neither",
    )
    given = manifest.get("fine_tune")
    if given is not None:
        require_fields(given, {"base", "trained"}, "fine_tune")
        told = all(isinstance(given[part], str) for part in ("base", "trained"))
        require(told and re.fullmatch(ID, given["base"], re.A), f"has the fine_tune {given!r}")
    return manifest


def _require_sha256(require, file: str, digest: object) -> None:
    known = isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)
    require(known, f"has {digest!r} as sha256 of {file}")


def files_in(manifest: dict) -> set[str]:
    """Names of all that a build with this manifest consists of."""
    weights = manifest["weights"]["files"]
    return {MANIFEST, *manifest["code"], *manifest["files"], *weights}
