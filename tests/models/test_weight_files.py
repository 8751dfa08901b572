"""A file of safetensors or an index is what it says, or a ``ValueError`` names the file."""

import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from glm4v_patched.models.find import find_model_problem
from glm4v_patched.models.weight_files import (
    MAX_HEADER_BYTES,
    SINGLE_FILE,
    WEIGHTS_INDEX,
    TensorInfo,
    read_header,
    shards_of,
    tensors_of,
)

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}
HEADER = {"a": A, "b": B}
DATA = bytes(32)


def as_file(header, data: bytes = DATA, length: int | None = None) -> bytes:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(content) if length is None else length).to_bytes(8, "little") + content + data


DEEP = b"[" * 100_000 + b"]" * 100_000
WRONG_NUMBERS = [None, True, -1, 1e999, "x", "", [], {}, 10**400, 2**64, 1.5]
FILES = {
    "empty": b"",
    "seven bytes": b"1234567",
    "no header": as_file(b""),
    "a header of spaces": as_file(b"        "),
    "a header that is no text": as_file(b"\xff\xfe{}"),
    "a header that is no JSON": as_file(b"{'a': 1}"),
    "a header that ends early": as_file(json.dumps(HEADER).encode()[:-1]),
    "a nested header": as_file(DEEP),
    "a nested tensor": as_file(b'{"a": ' + DEEP + b"}"),
    "a number without end": as_file(b'{"a": ' + b"9" * 10_000 + b"}"),
    "a list": as_file([HEADER]),
    "null": as_file(None),
    "a pickle": b"\x80\x02}q\x00(X\x01\x00\x00\x00a" + DATA,
    "a zip": b"PK\x03\x04" + DATA,
    "HTML": b"<!DOCTYPE html><html>404</html>",
    "a pointer": b"version https://git-lfs.github.com/spec/v1\noid",
    "the longest length": as_file(HEADER, length=2**64 - 1),
    "a length beyond the library's": as_file(HEADER, length=MAX_HEADER_BYTES + 1),
    "a length beyond the file": as_file(HEADER, length=1_000_000),
    "a length too short": as_file(HEADER, length=20),
    "a length too long": as_file(HEADER, length=len(json.dumps(HEADER)) + 1),
    "a byte less": as_file(HEADER, DATA[:-1]),
    "no data": as_file(HEADER, b""),
    "a byte behind the end": as_file(HEADER, DATA + b"x"),
    "data without tensors": as_file({}, DATA),
    "metadata of a list": as_file(HEADER | {"__metadata__": []}),
    "metadata of numbers": as_file(HEADER | {"__metadata__": {"format": 1}}),
    "another key": as_file({"a": A | {"more": 1}, "b": B}),
    "overlapping": as_file({"a": A, "b": B | {"data_offsets": [20, 28]}}),
    "a gap": as_file({"a": A, "b": B | {"data_offsets": [26, 34]}}, DATA + b"xx"),
    "the same bytes": as_file({"a": A, "b": A}),
    "offsets the other way": as_file({"a": A | {"data_offsets": [24, 0]}, "b": B}),
    "three offsets": as_file({"a": A | {"data_offsets": [0, 12, 24]}, "b": B}),
    "one offset": as_file({"a": A | {"data_offsets": [0]}, "b": B}),
    "offsets of an infinity": as_file({"a": A | {"data_offsets": [0, 1e999]}, "b": B}),
    "another shape": as_file({"a": A | {"shape": [2, 4]}, "b": B}),
    "a shape of huge sides": as_file({"a": A | {"shape": [2**62] * 64}, "b": B}),
    "a shape of many sides": as_file({"a": A | {"shape": [1] * 65}, "b": B}),
    "half a byte": as_file({"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 0]}}, b""),
    "another dtype": as_file({"a": A | {"dtype": "F64"}, "b": B}),
    "a long name": as_file({"n" * 300: A | {"dtype": "F99"}, "b": B}),
    "a name of a terminal": as_file({"\x1b[2J": A | {"dtype": "F99"}, "b": B}),
}
for value in WRONG_NUMBERS:
    value_text = repr(value)[:8]
    FILES[f"a tensor that is {value_text}"] = as_file({"a": value})
    FILES[f"dtype {value_text}"] = as_file({"a": A | {"dtype": value}, "b": B})
    FILES[f"offset {value_text}"] = as_file({"a": A | {"data_offsets": [0, value]}, "b": B})
    if value != []:  # a number, of 4 bytes
        FILES[f"shape {value_text}"] = as_file({"a": A | {"shape": value}, "b": B})
    FILES[f"side {value_text}"] = as_file({"a": A | {"shape": [2, value]}, "b": B})
for key in A:
    FILES[f"no {key}"] = as_file({"a": {name: A[name] for name in A if name != key}, "b": B})


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_an_invalid_safetensors_header_is_refused_by_file_name(tmp_path, content):
    file = tmp_path / SINGLE_FILE
    file.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_header(file)
    text = str(error.value)
    assert text.startswith(str(file)) and len(text) < 700 and text.isprintable()
    with pytest.raises(ValueError, match="model.safetensors"):
        tensors_of(tmp_path)


def test_a_download_that_ends_within_the_header_is_called_cut_short(tmp_path):
    content = as_file(HEADER, b"")
    for size in (9, len(content) - 1):
        (tmp_path / SINGLE_FILE).write_bytes(content[:size])
        message = f"has {size} of its {len(content)} bytes: the download was cut short"
        with pytest.raises(ValueError, match=message):
            read_header(tmp_path / SINGLE_FILE)


def test_headers_are_read_as_safetensors_reads_them(tmp_path):
    """Each dtype, scalars, empty tensors, and a header without tensors."""
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32]
    dtypes += [torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn]
    dtypes += [torch.float8_e5m2, torch.complex64, torch.uint16, torch.uint32, torch.uint64]
    tensors = {f"t{number}": torch.zeros(2, 3).to(dtype) for number, dtype in enumerate(dtypes)}
    tensors |= {"scalar": torch.zeros(()), "empty": torch.zeros(0, 5), "n" * 300: torch.zeros(1)}
    for sources in (tensors, {}):
        save_file(sources, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
        with safe_open(tmp_path / SINGLE_FILE, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {n: TensorInfo(tuple(s.get_shape()), s.get_dtype()) for n, s in slices.items()}
        assert read_header(tmp_path / SINGLE_FILE) == shapes == tensors_of(tmp_path)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), st.sampled_from(b'09afFx"[]{},: \x00\xff'))))
def test_every_accepted_header_opens_with_safetensors(tmp_path_factory, changes):
    content, file = bytearray(as_file(HEADER)), tmp_path_factory.getbasetemp() / "changed"
    for place, byte in changes:
        content[place % len(content)] = byte
    file.write_bytes(content)
    try:
        header = read_header(file)
    except ValueError:
        return
    with safe_open(file, framework="pt") as read:
        assert {*read.keys()} == {*header}


def index(where, **more) -> dict:
    return {"metadata": {}, "weight_map": where} | more


ODD_NAMES = ["", ".", "..", "../a", "a/b", "a\\b", "/etc/passwd", "C:\\a", "a\0b", "a\nb", "\ud800"]
GOOD = {"a": "1.safetensors", "b": "2.safetensors"}
INDEXES = {
    "no JSON": b"{",
    "no text": b"\xff",
    "nested": DEEP,
    "a list": [],
    "empty": {},
    "no weight_map": {"metadata": {}},
    "no metadata": {"weight_map": GOOD},
    "no tensors": index({}),
    "a file that is not there": index(GOOD | {"b": "3.safetensors"}),
    "a name without end": index(GOOD | {"b": "n" * 300}),
    "a name of a folder": index(GOOD | {"b": "folder"}),
    "a name of a pipe": index(GOOD | {"b": "pipe"}),
    "a tensor that no file has": index(GOOD | {"c" * 300: "1.safetensors"}),
    "a tensor that is not named": index({"a": "1.safetensors", "b": "3"}),
    "another file": index({"a": "2.safetensors", "b": "1.safetensors"}),
    "a file with the tensor, too": index(GOOD | {"c": "3"}),
}
INDEXES |= {f"the name {name!r}": index(GOOD | {"b": name}) for name in ODD_NAMES}
for value in (None, True, -1, 1e999, "x", [], ["a"], [["a", "1.safetensors"]], {"a": {}}):
    INDEXES[f"weight_map {value!r}"] = index(value)
    INDEXES[f"a name {value!r}"] = index(GOOD | {"b": value})
    if not isinstance(value, dict):
        INDEXES[f"metadata {value!r}"] = index(GOOD, metadata=value)


@pytest.mark.parametrize("content", INDEXES.values(), ids=INDEXES)
def test_an_invalid_weights_index_is_refused(tmp_path, content):
    for name, file in GOOD.items():
        save_file({name: torch.zeros(2)}, tmp_path / file)
    save_file({"b": torch.zeros(2), "c": torch.zeros(2)}, tmp_path / "3")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / WEIGHTS_INDEX).write_text(json.dumps(index(GOOD)))
    assert {*tensors_of(tmp_path)} == {*GOOD}
    written = content if isinstance(content, bytes) else json.dumps(content).encode()
    (tmp_path / WEIGHTS_INDEX).write_bytes(written)
    with pytest.raises(ValueError, match=rf"{WEIGHTS_INDEX}|nnn|is missing") as error:
        tensors_of(tmp_path)
    assert len(str(error.value)) < 700


def test_a_single_weights_file_is_read_without_the_index(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / SINGLE_FILE)
    (tmp_path / WEIGHTS_INDEX).write_text(json.dumps(index({"of another save": SINGLE_FILE})))
    assert {*tensors_of(tmp_path)} == {"a"} and shards_of(tmp_path) == [SINGLE_FILE]


def test_damaged_weights_are_the_problem_of_a_model_folder(model):
    assert find_model_problem(str(model)) is None
    (model / SINGLE_FILE).write_bytes(FILES["a header that is no JSON"])
    assert f"{SINGLE_FILE}: its header cannot be read" in str(find_model_problem(str(model)))
