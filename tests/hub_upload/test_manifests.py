"""Damaged manifests raise errors of one line and never pass."""

import copy as copying
import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hub_upload import verify
from hub_upload.build import add_manifest
from hub_upload.files import BuiltFiles, File, read_folder
from hub_upload.manifest import MANIFEST, parse_manifest
from hub_upload.publish import read_built_folder

HEALTH = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
OPTIONS = {"deadline": None, "derandomize": True, "suppress_health_check": HEALTH}
TEXT = st.text(max_size=8) | st.sampled_from(["..", "/etc/passwd", "a/b", "../x.py", "0" * 64])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def damages(draw, valid: dict) -> bytes:
    """A valid object with a changed value or key, or with changed bytes."""
    if draw(st.booleans()):
        text = json.dumps(valid).encode()
        at = draw(st.integers(0, len(text) - 1))
        end = draw(st.sampled_from([at + 1, len(text)]))
        return text[:at] + draw(st.binary(max_size=50)) + text[end:]
    values = within = copying.deepcopy(valid)
    while True:
        key = draw(st.sampled_from([*within]))
        if not (within[key] and isinstance(within[key], dict) and draw(st.integers(0, 3))):
            break
        within = within[key]
    kind, value = draw(st.sampled_from(["value", "gone", "key", "more"])), draw(JSON)
    old = within[key] if kind == "more" else within.pop(key)
    if kind != "gone":
        within[key if kind == "value" else draw(TEXT)] = old if kind == "key" else value
    return json.dumps(values).encode()


@pytest.mark.parametrize("size", ["5", 5.0, True, -1])
def test_a_size_is_an_integer(size, built):
    manifest = json.loads((built / MANIFEST).read_text())
    manifest["files"]["LICENSE"]["size"] = size
    with pytest.raises(ValueError, match=r"files\.LICENSE\.size"):
        parse_manifest(json.dumps(manifest).encode())


@pytest.mark.parametrize("number", [40, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_verify_and_publish_refuse_a_damaged_manifest(number, copy, monkeypatch):
    """A manifest that passes lists the same files from the same origin; publish compares the hashes
    of weights only when it sends them."""
    files = read_folder(copy)
    original = json.loads(files[MANIFEST].content)
    contents = {n: file.content for n, file in files.items() if file.content and n != MANIFEST}

    def rebuild(target, *_):  # reading the vocabulary in each example would take minutes
        return add_manifest(contents, target)

    monkeypatch.setattr(verify, "build_contents", rebuild)

    def same(content: bytes, hashes_of_weights: bool) -> bool:
        pair = [json.loads(content), copying.deepcopy(original)]
        for values in pair:
            for name, file in values["files"].items():
                if name.endswith(".safetensors") and not hashes_of_weights:
                    file["sha256"] = "any"
        return all(pair[0][name] == pair[1][name] for name in ("files", "weights_from"))

    def holds(data) -> None:
        content = data.draw(damages(original))
        (copy / MANIFEST).write_bytes(content)
        try:
            manifest = parse_manifest(content)
            target = BuiltFiles("a build", files | {MANIFEST: File.of(content)})
            verify.check_files(target)
            verify.check_weight_files(target, read_weights=True)
        except ValueError:
            pass
        else:
            assert same(content, True), content
            assert all(re.fullmatch(r"\w[\w.-]*", name, re.ASCII) for name in manifest.names)
        try:
            read_built_folder(copy)
        except ValueError as error:
            assert "does not pass verify" in str(error) or MANIFEST in str(error)
        else:
            assert same(content, False), content

    settings(max_examples=number, **OPTIONS)(given(data=st.data())(holds))()
