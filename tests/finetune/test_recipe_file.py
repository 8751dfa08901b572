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

from glm4v_patched.finetune.recipe.file import (
    MAX_RECIPE_BYTES,
    Document,
    RecipeProblem,
    read_document,
    set_nested,
)
from glm4v_patched.finetune.recipe.sections import (
    Recipe,
    RecipeError,
    check_values,
    declared_fields,
    describe_fields,
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


def problem_lines(tmp_path: Path, content: str | bytes, *rest: str) -> list[str]:
    """Lines of the error, without the folder."""
    with pytest.raises(RecipeError) as error:
        read(tmp_path, content, *rest)
    return str(error.value).replace(f"{tmp_path}/", "").split("\n")


def test_numbers_are_what_they_look_like(tmp_path):
    """YAML 1.1, which PyYAML reads, takes 1e-4 for text and 010 for 8."""
    for text, value in (("1e-4", 1e-4), ("2.5E3", 2500), (".5", 0.5), ("+1", 1)):
        assert read(tmp_path, RIGHT.replace("1e-4", text)).trainer.learning_rate == value
    for text in ("010", "1_000", "1:30", "0x10", "2024-01-01", ".nan", ".inf"):
        [message] = problem_lines(tmp_path, RIGHT.replace("max_steps: 100", f"max_steps: {text}"))
        assert message.startswith("r.yaml:6: trainer.max_steps is ")
    for text in ("2024-01-01", "0012"):
        assert read(tmp_path, RIGHT + f"revision: {text}").revision == text


def test_all_faults_of_a_file_come_in_one_answer_each_with_its_line(tmp_path, words, monkeypatch):
    wrong = RIGHT.replace("100", "0").replace("1e-4", "'1e-4'").replace("out: out\n", "")
    wrong += "engine:\n  zero_stage: 0\n  offload: true\n  towr: none\n  compile: 1\n"
    messages = problem_lines(tmp_path, wrong)
    lines = ["", "5:", "7:", "10:", "11:", "12:"]
    assert [line.split()[0] for line in messages] == [f"r.yaml:{line}" for line in lines]
    words("\n".join(messages))
    looked_for = Mock(wraps=difflib.get_close_matches)
    monkeypatch.setattr(difflib, "get_close_matches", looked_for)
    messages = problem_lines(tmp_path, RIGHT + "".join(f"unknown_{n}: 1\n" for n in range(50)))
    assert looked_for.call_count == 20  # of 7,000 keys it took 7 s
    assert len(messages) == 21 and messages[-1] == "and 30 more"


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
        # Each problem is one line, whatever text is in it.
        (RIGHT + "engine.tower: none\n", ":9: engine.tower is one key with a dot; expected the"),
        (RIGHT + '"e\\e[31m\\n": 1\n', r":9: e\x1b[31m\n is not a field"),
    ],
    "r.json": [
        ('{"a": 1,\n"b": ]}', ":2: while parsing a flow node, expected the node content"),
        ('{"a": ' + "9" * 5000 + "}", ":1: Exceeds the limit"),
        ('{"a":\n' + "[" * 5000, ": too many levels; a recipe has"),
    ],
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_recipe_is_told_by_line(tmp_path, name):
    for content, message in BROKEN[name]:
        [line] = problem_lines(tmp_path, content, name)
        assert line.startswith(name + message) and len(line) < 350


def test_an_absent_field_has_the_line_of_the_innermost_section(tmp_path):
    lines = {"a": 1, "a.b": 3}
    problems = [RecipeProblem(name, name) for name in ("a.b.c.d", "a.c", "b")]
    messages = str(Document(tmp_path, {}, lines).error(problems)).splitlines()
    assert [message.split(":")[1] for message in messages] == ["3", "1", " b"]


def test_a_key_that_is_there_twice_is_told_with_its_line(tmp_path):
    """Also where the command line says another value."""
    messages = problem_lines(tmp_path, RIGHT + "out: there\n", "r.yaml", "out=elsewhere")
    assert messages == ["r.yaml:9: out is there twice, in lines 2 and 9"]
    text = '{\n\t"a": [{"b": "}, \\"c\\": "},\n {"b": 1, "b": 2}],\n\t"d": {}}'
    messages = problem_lines(tmp_path, text, "r.json")
    assert messages == ["r.json:3: a.1.b is there twice, in lines 3 and 3"]


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
    overrides = ["engine.compile=true", "trainer.learning_rate=2e-5", "model=a=b", "revision="]
    result = read(tmp_path, RIGHT + "revision: v1\n", "r.yaml", *overrides, "lora={rank: 4}")
    assert result.engine.compile is True and result.trainer.learning_rate == 2e-5
    assert result.model == "a=b" and result.revision is None and result.lora.rank == 4
    assert result.trainer.max_steps == 100


def test_faults_of_the_command_line_come_with_those_of_the_file(tmp_path):
    first, second = problem_lines(tmp_path, RIGHT.replace("100", "0"), "r.yaml", "lora.rank=0")
    assert first.startswith("command line: lora.rank is 0")
    assert second.startswith("r.yaml:6: trainer.max_steps is 0")
    [message] = problem_lines(tmp_path, RIGHT + "engine: 5\n", "r.yaml", "engine.compile=true")
    assert message == "command line: engine.compile cannot be set: engine is 5, not a section"
    [message] = problem_lines(tmp_path, RIGHT, "r.yaml", "engine={compile: true, compile: true}")
    assert message.startswith("command line: engine:1: compile is there twice")


def test_every_field_has_a_line_in_the_help():
    help_text = describe_fields()
    assert all(field.description and f"{name}: " in help_text for name, field in declared_fields())
    assert "engine.zero_stage: 0, 1, 2 or 3 (default 3)" in help_text and "``" not in help_text


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

names = [name for name, _ in declared_fields()] + [f"trainer.{name}" for name in installed_fields()]
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
    """Try any document, and a recipe with bytes that are cut out, put in or changed."""
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
        assert [f.text for f in in_file.problems] == [f.text for f in on_line.problems]
        if on_line.problems:
            messages = str(given_value.error(on_line.problems)).split("\n")
            assert all(line.startswith(("command line: ", f"{path}:")) for line in messages)
        for copy in names_of_copies if in_file.recipe else ():
            write_recipe(in_file.recipe, tmp_path / copy)
            assert Recipe.read(tmp_path / copy) == in_file.recipe

    check()


@pytest.mark.parametrize(
    ("line", "wrong", "mistake"),
    [
        ("model: org/name", "model org/name", "1: a colon is missing; write model: org/name"),
        ("out: out", "out out", "2: a colon is missing; write out: out"),
        ("data:", "data", "3: a colon is missing; write data:"),
        ("  max_steps: 100", "  max_steps 100", "6: a colon is missing; write max_steps: 100"),
        ("learning_rate: 1e-4", "learning_rate 1e-4", "8: a colon is missing; write learning_ra"),
        ("out: out", "out = out", "2: there is = in place of a colon; write out: out"),
        ("out: out", "out:out", "2: a space is missing after the colon; write out: out"),
        ("max_steps: 100", "max_steps:100", "6: a space is missing after the colon; write max_"),
        ("out: out", "out：out", "2: the colon is full-width; write out: out"),
        ("data:", "data：", "3: the colon is full-width; write data:"),
        ("1e-4", "{tower: 1e-5，language_model: 1e-4}", "8: ， is full-width; write ,"),
        ("  max_steps", "\tmax_steps", "6: there is a tab; expected spaces"),
        ("max_steps: 100", "max_steps:\t100", "6: there is a tab; expected spaces"),
        ("  max_steps", "\u3000max_steps", "6: the line begins with whitespace other than"),
        ("  max_steps", " max_steps", "7: the line is indented by 2, and the one before by 1"),
        ("  per_device", "   per_device", "7: the line is indented by 3, and the one before by 2"),
        ("model: org/name", 'model: "org/name', "1: a quote is not closed"),
        ("1e-4", "{tower: 1e-5", "8: a { is not closed"),
        ("org/name", "@org", "1: this text needs quotes; write model: '@org'"),
        ("org/name", "a: b", "1: this text needs quotes; write model: 'a: b'"),
    ],
)
def test_a_mistake_in_yaml_is_told_with_its_line_and_what_to_write(tmp_path, line, wrong, mistake):
    assert line in RIGHT
    [message] = problem_lines(tmp_path, RIGHT.replace(line, wrong))
    assert message.startswith(f"r.yaml:{mistake}"), message


def test_a_file_without_any_plain_colon_is_told_what_to_write(tmp_path):
    [message] = problem_lines(tmp_path, "# mine\nmodel：org/name\nout：out\n")
    assert message == "r.yaml:2: the colon is full-width; write model: org/name"
