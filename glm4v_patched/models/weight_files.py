"""Headers of safetensors files and the index of a model's shards, read strictly; needs no torch.

The format: the length of the header in 8 bytes, little endian; the header, a JSON object with
dtype, shape and data_offsets of each tensor; the tensors, one after the other until the file ends.
"""

import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from ..patch.config_json import parse_json_object, read_json_object
from ..terminal_text import shorten

LONGEST_HEADER = 10**8  # of the safetensors library, in bytes
WHOLE, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
POINTER = b"version https://git-lfs"
BITS = dict.fromkeys(("F64", "I64", "U64", "C64"), 64) | dict.fromkeys(("F32", "I32", "U32"), 32)
BITS |= dict.fromkeys(("F16", "BF16", "I16", "U16"), 16) | dict.fromkeys(("BOOL", "I8", "U8"), 8)
BITS |= dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
BITS |= {"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}
KEYS = {"dtype", "shape", "data_offsets"}
MOST_SIDES = 64  # of torch


class TensorInfo(NamedTuple):
    """Of a tensor in a file: its sides, and its dtype as safetensors names it (``BF16``)."""

    sides: tuple[int, ...]
    dtype: str


def read_header(weights: Path) -> dict[str, TensorInfo]:
    """Return the shape of each tensor in a file of safetensors.

    Raises:
        ValueError: The file cannot be read, or is not what its header says.
    """
    if not os.path.isfile(weights):  # no error for a name that is too long
        raise ValueError(f"{_shown(weights)} is missing, or is no file; expected safetensors")
    try:
        with weights.open("rb") as file:
            begin, size = file.read(len(POINTER)), os.fstat(file.fileno()).st_size
            length = int.from_bytes(begin[:8], "little")
            file.seek(8)
            content = file.read(length if length <= LONGEST_HEADER else 0)
    except OSError as error:
        raise ValueError(f"{_shown(weights)} cannot be read: {error.strerror}") from None
    if begin == POINTER:
        raise ValueError(
            f"{_shown(weights)} is a git-lfs pointer and has no weights; run git lfs pull there"
        )
    if length > LONGEST_HEADER:
        raise ValueError(
            f"{_shown(weights)} begins with {length:,} as the length of its header; expected at "
            f"most {LONGEST_HEADER:,}: it is not in the format of safetensors"
        )
    if size < 8 + length:
        raise ValueError(_cut_short(_shown(weights), size, 8 + length))
    header = parse_json_object(content, f"{_shown(weights)}: its header")
    return check_header(header, _shown(weights), size - 8 - length, 8 + length)


def check_header(
    header: dict[str, Any], place: str, held: int | None = None, begin: int = 0
) -> dict[str, TensorInfo]:
    """Return the shape of each tensor of a header; ``ValueError`` if it contradicts itself.

    Args:
        place: The file, for errors.
        held: How many bytes of tensors the file has; None where that is not known.
        begin: Where the first of them lies in the file.
    """
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not _is_map_of_text(metadata):
        raise ValueError(f"{place}: __metadata__ is {metadata!r:.60}; expected text by text")
    for name, of in header.items():
        _require_fields(of, f"{place}: tensor {name!r:.80}")
    end = 0
    for name, of in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = of["data_offsets"]
        bits = BITS[of["dtype"]] * prod(of["shape"])
        if first != end or 8 * (last - first) != bits:
            raise ValueError(
                f"{place}: tensor {name!r:.80} lies at bytes {[first, last]!s:.80} of the tensors; "
                f"expected {[end, end + -(-bits // 8)]!s:.80}, by its shape {of['shape']!s:.60} in "
                f"{of['dtype']} after what is before it; download the file again"
            )
        end = last
    if held is not None and held < end:
        raise ValueError(_cut_short(place, begin + held, begin + end))
    if held is not None and held > end:
        raise ValueError(
            f"{place} has {begin + held:,} bytes, and its last tensor ends at {begin + end:,}; "
            "expected no bytes behind it: download the file again"
        )
    return {name: TensorInfo(tuple(of["shape"]), of["dtype"]) for name, of in header.items()}


def _require_fields(of: Any, place: str) -> None:
    if not isinstance(of, dict) or of.keys() != KEYS:
        keys = ", ".join(map(str, of)) if isinstance(of, dict) else repr(of)
        raise ValueError(f"{place} has {keys:.80}; expected {', '.join(sorted(KEYS))}")
    if not isinstance(of["dtype"], str) or of["dtype"] not in BITS:
        raise ValueError(
            f"{place} has dtype {of['dtype']!r:.60}; expected one of {', '.join(BITS)}"
        )
    for key, most in (("shape", MOST_SIDES), ("data_offsets", 2)):
        numbers = of[key]
        if not isinstance(numbers, list) or len(numbers) > most or not all(map(_is_size, numbers)):
            raise ValueError(
                f"{place} has {key} {numbers!r:.60}; expected at most {most} whole numbers, which "
                "are 0 or more"
            )
    if len(of["data_offsets"]) != 2:
        raise ValueError(f"{place} has data_offsets {of['data_offsets']}; expected 2 numbers")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_map_of_text(values: Any) -> bool:
    return isinstance(values, dict) and all(isinstance(value, str) for value in values.values())


def _shown(weights: Path) -> str:
    return shorten(str(weights), 250)  # an index may name files without end


def _cut_short(place: str, size: int, expected: int) -> str:
    return (
        f"{place} has {size:,} of its {expected:,} bytes: a download that was cut short; "
        "expected the whole file, download it again"
    )


def shards_of(folder: Path) -> list[str]:
    """Return the names of the model's files of weights, none if there are none.

    Raises:
        ValueError: Its index cannot be read, or names what is no file of the folder itself: whoever
            reads or writes under these names must not leave the folder. Or it names others than a
            whole file beside it.
    """
    has_whole = (folder / WHOLE).is_file()
    if not (folder / WEIGHTS_INDEX).exists():
        return [WHOLE] if has_whole else []
    names = {*check_index(read_json_object(folder / WEIGHTS_INDEX)).values()}
    if has_whole and WHOLE not in names:
        raise ValueError(
            f"it holds {WHOLE}, which is what transformers reads, and an {WEIGHTS_INDEX} of other files; "
            "expected one of the two"
        )
    return sorted(names)


def check_index(index: Mapping[str, Any]) -> dict[str, str]:
    """Return the file of each tensor, by an index; ``ValueError`` if it cannot be loaded by it."""
    where = index.get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(
            f"its {WEIGHTS_INDEX} has weight_map {where!r:.60}; expected the file of each tensor"
        )
    if odd := [name for name in where.values() if not _is_bare(name)]:
        raise ValueError(
            f"its {WEIGHTS_INDEX} names {odd[0]!r:.80}; expected names of files in that folder alone, "
            "without another folder's"
        )
    if not isinstance(metadata := index.get("metadata"), dict):
        raise ValueError(
            f"its {WEIGHTS_INDEX} has metadata {metadata!r:.60}, and transformers cannot load the weights "
            'without it; expected an object: write "metadata": {} into it'
        )
    return where


def standard_index(index: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers writes into an index, and nothing that others wrote beside it."""
    sizes = ("total_size", "total_parameters")
    metadata = {key: value for key, value in index["metadata"].items() if key in sizes}
    metadata = {key: value for key, value in metadata.items() if isinstance(value, int)}
    return {"metadata": metadata, "weight_map": index["weight_map"]}


def _is_bare(name: Any) -> bool:
    if not isinstance(name, str) or name in ("", ".", "..") or not name.isprintable():
        return False
    return PurePosixPath(name).name == PureWindowsPath(name).name == name


def tensors_of(folder: Path) -> dict[str, TensorInfo]:
    """Return what a model's files of safetensors hold, by the names of the tensors.

    Raises:
        ValueError: As :func:`shards_of` and :func:`read_header`, or index and files disagree.
    """
    shards = shards_of(folder)
    headers = {shard: read_header(folder / shard) for shard in shards}
    if WHOLE not in shards and shards:  # a whole file is read without its index
        require_agreement(check_index(read_json_object(folder / WEIGHTS_INDEX)), headers)
    return {name: shape for tensors in headers.values() for name, shape in tensors.items()}


def require_agreement(where: Mapping[str, str], headers: Mapping[str, Iterable[str]]) -> None:
    """Raise ``ValueError`` unless an index says of each tensor in which file it is."""
    there = {(name, shard) for shard, names in headers.items() for name in names}
    if wrong := sorted(there ^ {*where.items()}):
        name, shard = wrong[0]
        has = "has, and the index does not say so" if (name, shard) in there else "lacks"
        raise ValueError(
            f"{len(wrong)} tensors are not where its {WEIGHTS_INDEX} says: {shorten(shard)} {has}: "
            f"{shorten(name)}; expected the index that was saved with these files"
        )
