"""A file of safetensors or an index is what it says, or a ``ValueError`` names the file."""

import json
import os

import pytest
import torch
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
FILES = {
    "empty": b"",
    "seven bytes": b"1234567",
    "a header that is no text": as_file(b"\xff\xfe{}"),
    "a header that is no JSON": as_file(b"{'a': 1}"),
    "a nested header": as_file(DEEP),
    "a number without end": as_file(b'{"a": ' + b"9" * 10_000 + b"}"),
    "a pickle": b"\x80\x02}q\x00(X\x01\x00\x00\x00a" + DATA,
    "HTML": b"<!DOCTYPE html><html>404</html>",
    "a pointer": b"version https://git-lfs.github.com/spec/v1\noid",
    "a length beyond the library's": as_file(HEADER, length=MAX_HEADER_BYTES + 1),
    "a length beyond the file": as_file(HEADER, length=1_000_000),
    "a byte less": as_file(HEADER, DATA[:-1]),
    "no data": as_file(HEADER, b""),
    "a byte behind the end": as_file(HEADER, DATA + b"x"),
    "data without tensors": as_file({}, DATA),
    "metadata of a list": as_file(HEADER | {"__metadata__": []}),
    "a gap": as_file({"a": A, "b": B | {"data_offsets": [26, 34]}}, DATA + b"xx"),
    "another shape": as_file({"a": A | {"shape": [2, 4]}, "b": B}),
    "a shape of huge sides": as_file({"a": A | {"shape": [2**62] * 64}, "b": B}),
    "a long name": as_file({"n" * 300: A | {"dtype": "F99"}, "b": B}),
    "a dtype of a terminal": as_file({"a": A | {"dtype": "\x1b[2J"}, "b": B}),
    "an offset of many digits": as_file({"a": A | {"data_offsets": [0, 10**400]}, "b": B}),
    "an offset that is infinite": as_file({"a": A | {"data_offsets": [0, 1e999]}, "b": B}),
}


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


def test_shapes_and_dtypes_are_read(tmp_path):
    tensors = {"scalar": torch.zeros(()), "empty": torch.zeros(0, 5), "n" * 300: torch.zeros(1)}
    tensors["bf16"] = torch.zeros(2, 3, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    expected = {name: TensorInfo(tuple(tensor.shape), "F32") for name, tensor in tensors.items()}
    expected["bf16"] = TensorInfo((2, 3), "BF16")
    assert read_header(tmp_path / SINGLE_FILE) == expected == tensors_of(tmp_path)


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
    assert f"{SINGLE_FILE} cannot be read as safetensors: " in str(find_model_problem(str(model)))
