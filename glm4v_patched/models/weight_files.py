"""Read and check headers of safetensors files and the index of a model's shards. Needs no torch.

A safetensors file has the length of the header in 8 bytes (little endian), then the header, a JSON
object with dtype, shape and data_offsets of each tensor, then the tensors, one after the other up
to the end of the file.
"""

import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from ..patch.config_json import parse_json_object, read_json_object
from ..terminal_text import shorten

MAX_HEADER_BYTES = 10**8  # limit of the safetensors library
SINGLE_FILE, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
# How a small file of git-lfs begins that stands for a file that was not downloaded.
LFS_POINTER = b"version https://git-lfs"
DTYPE_BITS = dict.fromkeys(("F64", "I64", "U64", "C64"), 64) | dict.fromkeys(
    ("F32", "I32", "U32"), 32
)
DTYPE_BITS |= dict.fromkeys(("F16", "BF16", "I16", "U16"), 16) | dict.fromkeys(
    ("BOOL", "I8", "U8"), 8
)
DTYPE_BITS |= dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
DTYPE_BITS |= {"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}
TENSOR_KEYS = {"dtype", "shape", "data_offsets"}
MAX_DIMENSIONS = 64  # limit of torch


class TensorInfo(NamedTuple):
    """The shape of a tensor in a file, and its dtype as safetensors names it (``BF16``)."""

    shape: tuple[int, ...]
    dtype: str


def read_header(weights: Path) -> dict[str, TensorInfo]:
    """Return the tensors in a safetensors file.

    Raises:
        ValueError: The file cannot be read, or contradicts its header.
    """
    if not os.path.isfile(weights):  # does not raise for names that are too long
        raise ValueError(f"{_short_path(weights)} is missing or not a file; expected safetensors")
    try:
        with weights.open("rb") as file:
            beginning, size = file.read(len(LFS_POINTER)), os.fstat(file.fileno()).st_size
            length = int.from_bytes(beginning[:8], "little")
            file.seek(8)
            content = file.read(length if length <= MAX_HEADER_BYTES else 0)
    except OSError as error:
        raise ValueError(f"{_short_path(weights)} cannot be read: {error.strerror}") from None
    if beginning == LFS_POINTER:
        raise ValueError(
            f"{_short_path(weights)} is a git-lfs pointer without weights; run git lfs pull in its "
            "folder"
        )
    if length > MAX_HEADER_BYTES:
        raise ValueError(
            f"{_short_path(weights)} begins with {length:,} as the length of its header; expected "
            f"at most {MAX_HEADER_BYTES:,}: it is not a safetensors file"
        )
    if size < 8 + length:
        raise ValueError(_cut_short(_short_path(weights), size, 8 + length))
    header = parse_json_object(content, f"{_short_path(weights)}: its header")
    return check_header(header, _short_path(weights), size - 8 - length, 8 + length)


def check_header(
    header: dict[str, Any], location: str, data_bytes: int | None = None, data_start: int = 0
) -> dict[str, TensorInfo]:
    """Return the tensors of a header.

    Args:
        location: The file, for messages.
        data_bytes: Number of bytes after the header in the file; None if unknown.
        data_start: The offset of the first tensor in the file.

    Raises:
        ValueError: The header is invalid or contradicts itself.
    """
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not _is_map_of_text(metadata):
        raise ValueError(
            f"{location}: __metadata__ is {metadata!r:.60}; expected an object of strings"
        )
    for name, entry in header.items():
        _require_fields(entry, f"{location}: tensor {name!r:.80}")
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        bits = DTYPE_BITS[entry["dtype"]] * prod(entry["shape"])
        if first != end or 8 * (last - first) != bits:
            raise ValueError(
                f"{location}: tensor {name!r:.80} has data_offsets {[first, last]!s:.80}; "
                f"expected {[end, end + -(-bits // 8)]!s:.80}, by its shape "
                f"{entry['shape']!s:.60}, its dtype {entry['dtype']} and the tensor before it; "
                "download the file again"
            )
        end = last
    if data_bytes is not None and data_bytes < end:
        raise ValueError(_cut_short(location, data_start + data_bytes, data_start + end))
    if data_bytes is not None and data_bytes > end:
        raise ValueError(
            f"{location} has {data_start + data_bytes:,} bytes, but its last tensor ends at "
            f"{data_start + end:,}; download the file again"
        )
    return {n: TensorInfo(tuple(entry["shape"]), entry["dtype"]) for n, entry in header.items()}


def _require_fields(entry: Any, location: str) -> None:
    if not isinstance(entry, dict) or entry.keys() != TENSOR_KEYS:
        keys = ", ".join(map(str, entry)) if isinstance(entry, dict) else repr(entry)
        raise ValueError(f"{location} has {keys:.80}; expected {', '.join(sorted(TENSOR_KEYS))}")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPE_BITS:
        raise ValueError(
            f"{location} has dtype {entry['dtype']!r:.60}; expected one of {', '.join(DTYPE_BITS)}"
        )
    for key, limit in (("shape", MAX_DIMENSIONS), ("data_offsets", 2)):
        numbers = entry[key]
        if not isinstance(numbers, list) or len(numbers) > limit or not all(map(_is_size, numbers)):
            raise ValueError(
                f"{location} has {key} {numbers!r:.60}; expected at most {limit} integers of 0 or "
                "more"
            )
    if len(entry["data_offsets"]) != 2:
        raise ValueError(f"{location} has data_offsets {entry['data_offsets']}; expected 2 numbers")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_map_of_text(values: Any) -> bool:
    return isinstance(values, dict) and all(isinstance(value, str) for value in values.values())


def _short_path(weights: Path) -> str:
    return shorten(str(weights), 250)  # an index may contain names of any length


def _cut_short(location: str, size: int, expected: int) -> str:
    return (
        f"{location} has {size:,} of its {expected:,} bytes: the download was cut short; download "
        "the file again"
    )


def shards_of(folder: Path) -> list[str]:
    """Return the names of a model's weight files; empty if there are none.

    Raises:
        ValueError: The index cannot be read; it names a path that is not a file's name, and so may
            lead out of the folder; or there is a single weight file beside it that it does not
            name.
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
    """Return the file of each tensor, as an index says.

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
            "folder, without another folder's path"
        )
    if not isinstance(metadata := index.get("metadata"), dict):
        raise ValueError(
            f"its {WEIGHTS_INDEX} has metadata {metadata!r:.60}, without which transformers cannot "
            "load "
            'the weights; expected an object: add "metadata": {}'
        )
    return weight_map


def standard_index(index: Mapping[str, Any]) -> dict[str, Any]:
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
        ValueError: :func:`shards_of` or :func:`read_header` raises it, or index and files disagree.
    """
    shards = shards_of(folder)
    headers = {shard: read_header(folder / shard) for shard in shards}
    if SINGLE_FILE not in shards and shards:  # a single file is read without an index
        require_agreement(check_index(read_json_object(folder / WEIGHTS_INDEX)), headers)
    return {name: info for tensors in headers.values() for name, info in tensors.items()}


def require_agreement(weight_map: Mapping[str, str], headers: Mapping[str, Iterable[str]]) -> None:
    """Raise ``ValueError`` unless an index names the right file for each tensor."""
    present = {(name, shard) for shard, names in headers.items() for name in names}
    if wrong := sorted(present ^ {*weight_map.items()}):
        name, shard = wrong[0]
        relation = "contains" if (name, shard) in present else "does not contain"
        raise ValueError(
            f"{len(wrong)} tensors are not where its {WEIGHTS_INDEX} says: {shorten(shard)} "
            f"{relation} {shorten(name)}; expected the index that was saved with these files"
        )
