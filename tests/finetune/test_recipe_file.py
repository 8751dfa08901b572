"""Recipes as files: what is wrong with one is told at once, with all of its faults and lines."""

import difflib
import json
import math
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from glm4v_patched.finetune.recipe.file import MAX_RECIPE_BYTES, set_nested, read_document
from glm4v_patched.finetune.recipe.sections import (
    Recipe,
    RecipeError,
    check_values,
    describe_fields,
    fields,
)
from glm4v_patched.finetune.recipe.trainer import installed_fields
from tests.helpers.recipes import LEAST, recipe, write_recipe

RIGHT = """\
model: org/name
out: out
data:
  train: train.jsonl
trainer:
  max_steps: 100
  per_device_train_batch_size: 1
  learning_rate: 1e-4
"""


def read(tmp_path: Path, content: str | bytes, name: str = "r.yaml", *overrides: str) -> Recipe:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Recipe.read(path, overrides)


def faults(tmp_path: Path, content: str | bytes, *rest: str) -> list[str]:
    """Lines of the error, without the folder."""
    with pytest.raises(RecipeError) as told:
        read(tmp_path, content, *rest)
    return str(told.value).replace(f"{tmp_path}/", "").split("\n")


def test_numbers_are_what_they_look_like(tmp_path):
    """YAML 1.1, which PyYAML reads, takes 1e-4 for text and 010 for 8."""
    for text, value in (("1e-4", 1e-4), ("2.5E3", 2500), (".5", 0.5), ("+1", 1)):
        assert read(tmp_path, RIGHT.replace("1e-4", text)).trainer.learning_rate == value
    for text in ("010", "1_000", "1:30", "0x10", "2024-01-01", ".nan", ".inf"):
        [told] = faults(tmp_path, RIGHT.replace("max_steps: 100", f"max_steps: {text}"))
        assert told.startswith("r.yaml:6: trainer.max_steps is ")
    for text in ("2024-01-01", "0012"):
        assert read(tmp_path, RIGHT + f"revision: {text}").revision == text


def test_all_faults_of_a_file_come_in_one_answer_each_with_its_line(tmp_path, words, monkeypatch):
    wrong = RIGHT.replace("100", "0").replace("1e-4", "'1e-4'").replace("out: out\n", "")
    wrong += "engine:\n  zero_stage: 0\n  offload: true\n  towr: none\n  compile: 1\n"
    told = faults(tmp_path, wrong)
    lines = ["", "5:", "7:", "10:", "11:", "12:"]
    assert [line.split()[0] for line in told] == [f"r.yaml:{line}" for line in lines]
    words("\n".join(told))
    looked_for = Mock(wraps=difflib.get_close_matches)
    monkeypatch.setattr(difflib, "get_close_matches", looked_for)
    told = faults(tmp_path, RIGHT + "".join(f"unknown_{n}: 1\n" for n in range(50)))
    assert looked_for.call_count == 20  # of 7,000 keys it took 7 s
    assert len(told) == 21 and told[-1] == "and 30 more"


# The words are PyYAML's where they are not ours.
BROKEN = {
    "r.yaml": [
        ("", ": the recipe is empty; expected sections and fields, as in model: FOLDER"),
        ("[]", ": the recipe is []; expected"),
        ("a: 1\n---\nb: 2", ":2: expected a single document"),
        ("a: &x 1\nb: *x", ":2: *x is an alias; write the value itself"),
        ("? [a]\n: 2", ":1: a key is not text"),
        ("a: !!python/object/apply:os.getcwd []", ":1: tag:yaml.org,2002:python/o"),
        ("a:\n " + "[" * 1000, ": too many levels; a recipe has"),
        ("a: 1\nb: \x07", r":2: the character \x07 cannot be in YAML"),
        ("a: 1\n".encode("utf-16"), ":1: byte 0xff is not UTF-8; save the file as UTF-8"),
        (b"a: 1\nb: \xe4", ":2: byte 0xe4 is not UTF-8; save the file as UTF-8"),
        (b"a" * (MAX_RECIPE_BYTES + 1), ": has over 65,536 bytes"),
        # Of faults, one on a line, whatever is in them.
        (RIGHT + "engine.tower: none\n", ":9: engine.tower is one key; expected tower under"),
        (RIGHT + '"e\\e[31m\\n": 1\n', r":9: e\x1b[31m\n is not a field"),
    ],
    "r.json": [
        ('{"a": 1,\n"b": ]}', ":2: while parsing a flow node, expected the node content"),
        ('{"a": ' + "9" * 5000 + "}", ":1: Exceeds the limit"),
        ('{"a":\n' + "[" * 60_000, ": too many levels; a recipe has"),
    ],
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_recipe_is_told_by_line(tmp_path, name):
    for content, told in BROKEN[name]:
        [line] = faults(tmp_path, content, name)
        assert line.startswith(name + told) and len(line) < 350


def test_a_key_that_is_there_twice_is_told_with_its_line(tmp_path):
    """Also where the command line says another value."""
    told = faults(tmp_path, RIGHT + "out: there\n", "r.yaml", "out=elsewhere")
    assert told == ["r.yaml:9: out is there twice, in lines 2 and 9"]
    text = '{\n\t"a": [{"b": "}, \\"c\\": "},\n {"b": 1, "b": 2}],\n\t"d": {}}'
    told = faults(tmp_path, text, "r.json")
    assert told == ["r.json:3: a.1.b is there twice, in lines 3 and 3"]


def test_a_byte_order_mark_is_no_fault_and_a_file_may_have_the_most_bytes(tmp_path):
    assert read(tmp_path, ("\ufeff" + RIGHT).ljust(MAX_RECIPE_BYTES - 2)) == read(tmp_path, RIGHT)
    assert read(tmp_path, "\ufeff" + json.dumps(LEAST), "r.json") == Recipe.from_values(LEAST)


def test_json_is_read_as_what_it_says(tmp_path):
    question = "\u2028\u0085\ufeff\x7f \U0001f600 \u3000/"
    data = {"train": "a", "columns": {"question": question, "answer": "b"}}
    for escapes in (True, False):
        text = json.dumps(LEAST | {"data": data}, ensure_ascii=escapes, indent="\t")
        text = text.replace("/", "\\/")
        assert read(tmp_path, text, "r.json").data.columns["question"] == question


def test_the_command_line_is_laid_over_the_file(tmp_path):
    given = ["engine.compile=true", "trainer.learning_rate=2e-5", "model=a=b", "revision="]
    found = read(tmp_path, RIGHT + "revision: v1\n", "r.yaml", *given, "lora={rank: 4}")
    assert found.engine.compile is True and found.trainer.learning_rate == 2e-5
    assert found.model == "a=b" and found.revision is None and found.lora.rank == 4
    assert found.trainer.max_steps == 100


def test_faults_of_the_command_line_come_with_those_of_the_file(tmp_path):
    first, second = faults(tmp_path, RIGHT.replace("100", "0"), "r.yaml", "lora.rank=0")
    assert first.startswith("command line: lora.rank is 0")
    assert second.startswith("r.yaml:6: trainer.max_steps is 0")
    [told] = faults(tmp_path, RIGHT + "engine: 5\n", "r.yaml", "engine.compile=true")
    assert told == "command line: engine.compile cannot be: engine is 5, and no section"
    [told] = faults(tmp_path, RIGHT, "r.yaml", "engine={compile: true, compile: true}")
    assert told.startswith("command line: engine:1: compile is there twice")


def test_every_field_has_a_line_in_the_help():
    told = describe_fields()
    assert all(field.description and f"{name}: " in told for name, field in fields())
    assert "engine.zero_stage: 0, 1, 2 or 3 (default 3)" in told and "``" not in told


def test_a_mistake_is_told_with_its_cure_where_a_package_is_missing(tmp_path):
    """And whatever takes long is not imported for it."""
    (tmp_path / "r.yaml").write_text(RIGHT + "engine: {zero_stage: 9}\n")
    code = f"""
import sys
sys.modules["torch"] = None
from glm4v_patched.cli import main
status = main(["train", {str(tmp_path / "r.yaml")!r}])
assert not {{"transformers", "deepspeed", "accelerate", "numpy", "peft"}} & {{*sys.modules}}
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "engine.zero_stage is 9; expected 0" in done.stderr, done


each_profile = pytest.mark.parametrize(
    "profile",
    [
        settings(max_examples=150, derandomize=True, deadline=None),
        pytest.param(
            settings(max_examples=5000, derandomize=True, deadline=None),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["few", "many"],
)

names = [name for name, _ in fields()] + [f"trainer.{name}" for name in installed_fields()]
parts = sorted({part for name in names for part in name.split(".")})
keys = st.sampled_from(parts) | st.text(max_size=8)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 2**33)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["auto", "every 2", "bf16", "qlora", "1e-4", "100", "true", "\ud800", "a\0"])
)
documents = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=6)
)


@each_profile
def test_any_file_is_a_recipe_or_an_error_that_names_it(profile, tmp_path):
    """Of any document, and of a recipe of which bytes are cut out, put in or changed."""
    written = tmp_path / "source.json"
    write_recipe(recipe({"model": "ä/\U0001f600", "trained": "lora_all"}), written)
    json_, yaml_ = written.read_bytes(), RIGHT.encode()
    marks = b"{ } [ \" ' : & *a ! | > - ? % # \\ ---".split()

    @profile
    @given(st.data())
    def check(data):
        # Lone surrogates and NaN are in files as escapes and as words.
        values = data.draw(documents)
        sources = [(".json", json_), (".yaml", json_), (".yaml", yaml_)]
        sources += [(".json", json.dumps(values).encode())]
        sources += [(".yaml", yaml.safe_dump(values).encode())]
        suffix, content = data.draw(st.sampled_from(sources))
        for _ in range(data.draw(st.integers(0, 3))):
            start = data.draw(st.integers(0, len(content)))
            end = data.draw(st.integers(start, min(start + 12, len(content))))
            put = data.draw(st.binary(max_size=4) | st.sampled_from([*marks, b"\n", b"\t"]))
            content = content[:start] + put + content[end:]
        path = tmp_path / f"file{suffix}"
        path.write_bytes(content)
        try:
            Recipe.read(path)
        except RecipeError as error:
            lines = str(error).split("\n")
            assert all(line.startswith((f"{path}:", "and ")) for line in lines), lines
            assert all(len(line) < 900 and line.isprintable() for line in lines), lines

    check()


def in_yaml(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}[str(value)]
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)


@each_profile
def test_an_override_is_what_the_file_could_have_said(profile, tmp_path):
    """A value means the same in both, and is refused with the same words; what is not refused
    reads back as it is written, as JSON and as YAML."""
    path, names_of_copies = tmp_path / "base.yaml", ("back.json", "back.yaml", "back")
    path.write_text(json.dumps(LEAST))
    document = read_document(path)

    @profile
    @given(st.sampled_from(names), scalars | st.sampled_from(["yes", "010", "~", "2024-01-01"]))
    def check(name, value):
        changed = set_nested(LEAST, {name: value})
        given_value = document.override([f"{name}={in_yaml(value)}"])
        in_file, on_line = (check_values(values) for values in (changed, given_value.values))
        assert in_file.recipe == on_line.recipe
        assert [f.text for f in in_file.faults] == [f.text for f in on_line.faults]
        if on_line.faults:
            told = str(given_value.error(on_line.faults)).split("\n")
            assert all(line.startswith(("command line: ", f"{path}:")) for line in told)
        for copy in names_of_copies if in_file.recipe else ():
            write_recipe(in_file.recipe, tmp_path / copy)
            assert Recipe.read(tmp_path / copy) == in_file.recipe

    check()
