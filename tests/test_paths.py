"""How paths are expanded, and what lies apart from what."""

import argparse
import os
from pathlib import Path

import pytest

from glm4v_patched.cli import _build_parser
from glm4v_patched.paths import PathError, expand_path, is_within, refuse_overlap
from hub_upload.__main__ import _make_parser as publishing_parser

HOME = "/home/of/me"


@pytest.fixture(autouse=True)
def variables(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", HOME)
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("path", "expanded"),
    [
        ("~", HOME),
        ("~/runs", f"{HOME}/runs"),
        ("~root/runs", os.path.expanduser("~root/runs")),
        ("./~/runs", "./~/runs"),  # how a folder of that name is named
        ("a/~/b", "a/~/b"),
        ("a/b~", "a/b~"),
        ("zai-org/glm-4v-9b", "zai-org/glm-4v-9b"),
        ("https://host/~me/a$b.png", "https://host/~me/a$b.png"),
        ("rows/**/*.jsonl", "rows/**/*.jsonl"),
    ],
)
def test_only_a_home_at_the_beginning_is_expanded_and_only_once(path, expanded):
    assert expand_path(path) == expand_path(expanded) == expanded


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("$DATA/rows", "expected the path itself: /data/rows"),
        ("${DATA}/rows", "expected the path itself: /data/rows"),
        ("a$OUT/x", "OUT is not set"),
        ("$DATA/${OUT}", "OUT is not set"),
        ("$(pwd)/x", "expected the path itself"),
        ("cost$", "expected the path itself"),
        ("~nobody-of-that-name/x", "no user of that name"),
        ("~rows.jsonl", "./~rows.jsonl"),
        ("~a\0b/x", "no user of that name"),
        ("", "empty"),
    ],
)
def test_what_only_a_shell_expands_is_refused_with_the_path(path, named):
    with pytest.raises(PathError) as error:
        expand_path(path)
    assert named in str(error.value)
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--out", type=expand_path)
    with pytest.raises(argparse.ArgumentError, match="argument --out: ") as of_parser:
        parser.parse_args([f"--out={path}"])
    assert named in str(of_parser.value)


def test_a_name_that_contains_a_dollar_is_taken_where_it_exists(tmp_path):
    for name in ("a$b", "${OUT}", "$DATA", "$OUT"):
        (tmp_path / name).mkdir()
    assert (
        expand_path("a$b") == "a$b" and expand_path(f"{tmp_path}/a$b/new") == f"{tmp_path}/a$b/new"
    )
    assert expand_path("$OUT/x") == "$OUT/x"  # it can mean nothing else
    for name in ("${OUT}/x", "$DATA/x", "a$b/$c"):
        with pytest.raises(PathError):
            expand_path(name)


def spellings(folder: Path) -> list[str]:
    link = folder.with_name(f"link to {folder.name}")
    link.symlink_to(folder)
    away = Path(os.path.relpath(folder))
    return [str(folder), f"{folder}/", str(away), str(link), f"{folder}/../{folder.name}"]


def test_where_a_path_lies_does_not_depend_on_how_it_is_spelled(tmp_path):
    model, beside = tmp_path / "model", tmp_path / "model-private"
    for folder in (model / "inner", beside):
        folder.mkdir(parents=True)
    for one in spellings(model):
        for inner in ("", "/", "/inner", "/new/deeper", "/inner/../new"):
            assert is_within(f"{one}{inner}", model), (one, inner)
        assert not is_within(one, model / "inner") and not is_within(one, beside)
        for other in (str(beside), f"{model}-new", f"{one}/../elsewhere", str(tmp_path)):
            assert not is_within(other, one), (other, one)
    assert not is_within("MODEL", model)  # of another name here; samefile knows where it is not
    (tmp_path / "MODEL").symlink_to(model)
    assert is_within("MODEL/x", model)


def test_outputs_lie_apart_from_folders_that_are_read(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "rows.jsonl").touch()
    read = [("a file", tmp_path / "rows.jsonl"), ("an id", "org/name"), ("the data", data)]
    for out, where in ((data, "is"), (data / "new", "lies in"), (tmp_path, "contains")):
        with pytest.raises(ValueError, match=f"^--out.* {where} the data, {data}, which is read"):
            refuse_overlap(out, read, "--out")
    for out in (tmp_path / "data2", tmp_path / "new" / "data", "org/name/x"):
        refuse_overlap(out, read, "--out")


PATHS = {"FILE", "FOLDER", "DIR", "PATH", "IMAGE", "CHECKPOINT", "RECIPE", "ORIGINAL", "ADAPTER"}
PATHS |= {"MODEL_OR_ADAPTER", "MODEL2", "SOURCE", "DIR_OR_ID", "NAME=DIR", "FILE.py:FUNCTION"}
PATHS |= {"demo_output"}  # a default, of an option that has no such word


def options_of_commands():
    for parser in (_build_parser(), publishing_parser()):
        commands = next(a for a in parser._actions if isinstance(a.choices, dict)).choices
        for name, command in commands.items():
            for action in command._actions:
                if {action.metavar, str(action.default)} & PATHS:
                    yield pytest.param(action, id=f"{name} {action.metavar} {action.dest}")


@pytest.mark.parametrize("option", [*options_of_commands()])
def test_every_option_that_is_a_path_is_expanded(option):
    with pytest.raises(PathError):
        option.type("a=$OUT/b")
    expanded = option.type("name=~/x" if option.metavar == "NAME=DIR" else "~/x")
    assert str(expanded[1] if isinstance(expanded, tuple) else expanded) == f"{HOME}/x"


def test_the_folder_of_named_adapters_may_have_an_equals_sign():
    command = ["serve", "MODEL", "--adapter", "red=runs/lr=1e-5/a=b"]
    assert _build_parser().parse_args(command).adapter == [("red", "runs/lr=1e-5/a=b")]
