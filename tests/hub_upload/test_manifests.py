"""Manifests and indices that are damaged in any way: an error of one line, never a pass."""

import copy
import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hub_upload.build import Source, build
from hub_upload.files import File, read_folder
from hub_upload.layout import INDEX, MANIFEST, SINGLE_FILE
from hub_upload.manifest import read_manifest
from hub_upload.publish import read_build
from tests.helpers.publishable import FILES, SMALL_SHARDS, failures, write_build

HEALTH = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
OPTIONS = {"deadline": None, "derandomize": True, "suppress_health_check": HEALTH}
TEXT = st.text(max_size=8)
ODD_TEXTS = ["..", "/etc/passwd", "a/b", "../x.py", "\x1b[2J", "0" * 64, "0.1.0"]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.sampled_from(ODD_TEXTS)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def places(values: object, path: tuple = ()) -> list[tuple]:
    """The paths to every value in JSON."""
    inner = values.items() if isinstance(values, dict) else ()
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


@st.composite
def damages(draw, sound: dict) -> bytes:
    """A sound object with a value or a key exchanged, or bytes in it or from there on; or any."""
    kind = draw(st.sampled_from(["value", "gone", "key", "more", "bytes", "json"]))
    if kind == "json":
        return json.dumps(draw(JSON)).encode()
    if kind == "bytes":
        text = json.dumps(sound).encode()
        at = draw(st.integers(0, len(text) - 1))
        end = draw(st.sampled_from([at + 1, len(text)]))
        return text[:at] + draw(st.binary(max_size=50)) + text[end:]
    values = copy.deepcopy(sound)
    *path, last = draw(st.sampled_from([place for place in places(sound) if place]))
    within = values
    for key in path:
        within = within[key]
    if kind in ("value", "more"):
        within[last if kind == "value" else draw(TEXT)] = draw(JSON)
    else:
        value = within.pop(last)
        if kind == "key":
            within[draw(TEXT)] = value
    return json.dumps(values).encode()


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> tuple[Path, dict[str, File]]:
    """A build, and its files as they were written, whatever its manifest becomes."""
    folder = write_build(tmp_path_factory.mktemp("sound") / "build", SMALL_SHARDS, local=True)
    return folder, read_folder(folder)


def says_the_same(content: bytes, sound: dict, hashes_of_weights: bool = True) -> bool:
    """Whether it lists the same files with the same hashes, from the same place.

    Hashes of weights are compared by verify where it is asked to, and by publish when it has read
    them to send them.
    """
    pair = [json.loads(content), copy.deepcopy(sound)]
    for name in () if hashes_of_weights else SMALL_SHARDS:
        for values in pair:
            values["files"][name]["sha256"] = "any"
    return all(pair[0][name] == pair[1][name] for name in ("files", "weights_from"))


def everybody_refuses_what_is_damaged(sound, data) -> None:
    """verify, publish and build with a damaged manifest; what passes says what the sound one does.

    Another version that has the form of one, and a fine-tune, are not seen here.
    """
    folder, files = sound
    original = json.loads(files[MANIFEST].content)
    content = data.draw(damages(original))
    (folder / MANIFEST).write_bytes(content)
    try:
        manifest = read_manifest(content)
    except ValueError as error:
        assert MANIFEST in str(error)
        with pytest.raises(ValueError, match=MANIFEST):
            read_build(folder)
        return
    assert failures(files | {MANIFEST: File.of(content)}) or says_the_same(content, original), (
        content
    )
    assert all(re.fullmatch(r"\w[\w.-]*", name, re.ASCII) for name in manifest.names)
    try:
        read_build(folder)
    except ValueError as error:
        assert "does not pass verify" in str(error)
    else:
        assert says_the_same(content, original, hashes_of_weights=False), content
    # Nothing else than what it lists would be replaced.
    foreign = set(os.listdir(folder)) - manifest.names
    with pytest.raises(ValueError, match="that no build wrote" if foreign else "has no con"):
        build(Source("nothing", dict.fromkeys([SINGLE_FILE], File(1, "0" * 64))), folder, "a/b")


def never_a_traceback(sound, data) -> None:
    """Damage in any JSON of a build whose manifest agrees with it: a report, whatever it says."""
    files = sound[1]
    name = data.draw(st.sampled_from(sorted(n for n in FILES if n.endswith(".json")) + [INDEX]))
    content = data.draw(damages(json.loads(files[name].content)))
    manifest = json.loads(files[MANIFEST].content)
    file = File.of(content)
    manifest["files"][name] = {"size": file.size, "sha256": file.sha256}
    failures(files | {name: file, MANIFEST: File.of(json.dumps(manifest).encode())})


@pytest.mark.parametrize("number", [40, pytest.param(1000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("holds", [everybody_refuses_what_is_damaged, never_a_traceback])
def test_damages(holds, number, sound):
    settings(max_examples=number, **OPTIONS)(
        given(data=st.data())(lambda data: holds(sound, data))
    )()


ODD = ["", "null", "[]", "5", '"a"', "{}", "[" * 100_000, '{"version": "\\ud800"}', "\ufeff{}"]


@pytest.mark.parametrize("content", [*ODD, "NaN"], ids=lambda text: repr(text[:20]))
def test_a_manifest_of_any_form_is_refused_with_its_name(content):
    with pytest.raises(ValueError, match=MANIFEST):
        read_manifest(content.encode())
