"""Read the headers of safetensors files and the index of a model's shards. Needs no torch."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from ..patch.config_json import parse_json_object, read_json_object
from ..terminal_text import shorten

SINGLE_FILE, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
# The first bytes of a git-lfs pointer: a small file that stands for one that was not downloaded.
LFS_POINTER = b"version https://git-lfs"
MAX_HEADER_BYTES = 10**8  # limit of the safetensors library


class TensorInfo(NamedTuple):
    """The shape of a tensor in a file, and its dtype as safetensors names it (``BF16``)."""

    shape: tuple[int, ...]
    dtype: str


def read_header(weights: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file, by name.

    Raises:
        ValueError: The file cannot be read, or contradicts its header.
    """
    name = shorten(str(weights), 250)  # an index may contain names of any length
    # Unlike Path.is_file, os.path.isfile raises no error for names that are too long.
    if not os.path.isfile(weights):
        raise ValueError(f"{name} is missing or not a file; expected safetensors")
    try:
        with safe_open(weights, framework="np") as file:
            tensors = {}
            for tensor in file.keys():  # noqa: SIM118
                info = file.get_slice(tensor)
                tensors[tensor] = TensorInfo(tuple(info.get_shape()), info.get_dtype())
            return tensors
    except (OSError, SafetensorError) as error:
        problem = f"cannot be read as safetensors: {shorten(str(error), 200)}"
    with suppress(Exception):  # an invalid header raises errors of any class
        problem = _size_problem(weights) or problem
    raise ValueError(f"{name} {problem}; download the file again")


def _size_problem(weights: Path) -> str | None:
    """Return the problem if a file is incomplete; None if that is not the problem."""
    size = weights.stat().st_size
    with weights.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            return "is a git-lfs pointer without weights: run git lfs pull in its folder"
        file.seek(0)
        header_bytes = int.from_bytes(file.read(8), "little")
        full_size = 8 + header_bytes
        if full_size <= size and header_bytes <= MAX_HEADER_BYTES:
            header = parse_json_object(file.read(header_bytes), weights.name)
            header.pop("__metadata__", None)
            full_size += max(int(tensor["data_offsets"][1]) for tensor in header.values())
    if size < full_size < 2**63 and header_bytes <= MAX_HEADER_BYTES:
        return f"has {size:,} of its {full_size:,} bytes: the download was cut short"
    return None


def shards_of(folder: Path) -> list[str]:
    """Return the names of a model's weight files; empty if there are none.

    Raises:
        ValueError: The index cannot be read, or names a path outside of the folder. Or the folder
            also contains a single weight file that the index does not name.
    """
    has_single_file = (folder / SINGLE_FILE).is_file()
    if not (folder / WEIGHTS_INDEX).exists():
        return [SINGLE_FILE] if has_single_file else []
    names = {*check_index(read_json_object(folder / WEIGHTS_INDEX)).values()}
    if has_single_file and SINGLE_FILE not in names:
        raise ValueError(
            f"it contains {SINGLE_FILE}, which transformers reads, and a {WEIGHTS_INDEX} of other "
            "files; expected one of the two"
        )
    return sorted(names)


def check_index(index: Mapping[str, Any]) -> dict[str, str]:
    """Check an index, and return the file name of each tensor.

    Raises:
        ValueError: The index is invalid, or transformers cannot load weights with it.
    """
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"its {WEIGHTS_INDEX} has weight_map {weight_map!r:.60}; expected the file of each "
            "tensor"
        )
    if invalid := [name for name in weight_map.values() if not _is_plain_file_name(name)]:
        raise ValueError(
            f"its {WEIGHTS_INDEX} names {invalid[0]!r:.80}; expected only names of files in that "
            "folder, without a path"
        )
    if not isinstance(metadata := index.get("metadata"), dict):
        raise ValueError(
            f"its {WEIGHTS_INDEX} has metadata {metadata!r:.60}, and transformers needs an object "
            'to load the weights: add "metadata": {}'
        )
    return weight_map


def keep_known_index_entries(index: Mapping[str, Any]) -> dict[str, Any]:
    """Return an index with only the entries that transformers writes."""
    sizes = ("total_size", "total_parameters")
    metadata = {key: value for key, value in index["metadata"].items() if key in sizes}
    metadata = {key: value for key, value in metadata.items() if isinstance(value, int)}
    return {"metadata": metadata, "weight_map": index["weight_map"]}


def _is_plain_file_name(name: Any) -> bool:
    if not isinstance(name, str) or name in ("", ".", "..") or not name.isprintable():
        return False
    return PurePosixPath(name).name == PureWindowsPath(name).name == name


def tensors_of(folder: Path) -> dict[str, TensorInfo]:
    """Return the tensors in a model's safetensors files, by name.

    Raises:
        ValueError: See :func:`shards_of`, :func:`read_header`, :func:`require_matching_index`.
    """
    shards = shards_of(folder)
    headers = {shard: read_header(folder / shard) for shard in shards}
    if SINGLE_FILE not in shards and shards:  # a single file is read without an index
        require_matching_index(check_index(read_json_object(folder / WEIGHTS_INDEX)), headers)
    return {name: info for tensors in headers.values() for name, info in tensors.items()}


def require_matching_index(
    weight_map: Mapping[str, str], headers: Mapping[str, Iterable[str]]
) -> None:
    """Raise ``ValueError`` unless an index names the right file for each tensor."""
    present = {(name, shard) for shard, names in headers.items() for name in names}
    if wrong := sorted(present ^ {*weight_map.items()}):
        name, shard = wrong[0]
        relation = "contains" if (name, shard) in present else "does not contain"
        raise ValueError(
            f"{len(wrong)} tensors are not where its {WEIGHTS_INDEX} says: {shorten(shard)} "
            f"{relation} {shorten(name)}; expected the index that was saved with these files"
        )
