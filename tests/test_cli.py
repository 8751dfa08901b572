"""The command line says what is wrong before it starts, and how to go on."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import glm4v_patched
from glm4v_patched import cli
from glm4v_patched.cli import main
from glm4v_patched.engine.deepspeed import config
from glm4v_patched.engine.deepspeed.config import require_deepspeed
from glm4v_patched.finetune import ending, launch, preflight
from glm4v_patched.finetune.checkpoints import ResumeFingerprint, write_checkpoint_manifest
from glm4v_patched.finetune.job import resolve_recipe
from glm4v_patched.finetune.plan import Plan, check_data, digest_rows
from glm4v_patched.finetune.recipe.model import resolve_base
from glm4v_patched.finetune.recipe.sections import Recipe
from glm4v_patched.models.base import identify
from glm4v_patched.terminal_text import printable
from tests.helpers.processes import in_plain_shell
from tests.helpers.recipes import drawn_recipe


def test_a_missing_deepspeed_is_told_with_its_cure(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"missing: DeepSpeed.*glm4v-patched\[train\]"):
        require_deepspeed()


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("demo --steps 0", "0 is less than 1"),
        ("train r.yaml out=a --lr 1e-5", "trainer.learning_rate"),
        ("answer m --data a --out b --max-tokens 5", "--max-new-tokens"),
        ("answer m out=a --data a --out b", "out=a"),
        ("train", "RECIPE"),
        ("Serve model", "serve"),
        ("help", "--help"),
    ],
)
def test_what_is_not_known_is_answered_with_the_nearest_that_is(typed, named, capsys, words):
    with pytest.raises(SystemExit, match="2"):
        main(typed.split())
    usage, _, error = capsys.readouterr().err.partition("error: ")
    assert usage.startswith("usage: glm4v-patched") and named in error
    words(error)


def test_each_help_has_an_example_that_is_accepted(capsys):
    parser = cli._build_parser()
    commands = parser.get_default("commands")
    examples = [example.partition(" > ")[0].split() for example in cli.EXAMPLES]
    assert sorted(words[0] for words in examples) == sorted(commands)
    for words, text in zip(examples, cli.EXAMPLES, strict=True):
        _, rest = parser.parse_known_args(words)
        assert all("=" in word for word in rest), text
        with pytest.raises(SystemExit, match="0"):
            main([words[0], "--help"])
        page = capsys.readouterr().out
        assert f"glm4v-patched {text}\n" in page and "exit status: 0 success, 1 error" in page
    assert "exit status: 0 success, 1 error" in parser.format_help()


def run_without(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a process that cannot import a module."""
    code = f"import runpy, sys; sys.modules[{module!r}] = None; "
    code += "runpy.run_module('glm4v_patched', run_name='__main__')"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_versions_are_told_without_loading_torch(monkeypatch, capsys):
    lines = run_without("torch", "--version").stdout.splitlines()
    assert lines[0] == f"glm4v-patched {glm4v_patched.__version__}"
    for name in ("torch", "transformers", "deepspeed"):
        assert f"{name} {version(name)}" in lines
    monkeypatch.setattr(cli, "VERSIONED_PACKAGES", ("torch", "not-there-at-all"))
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert "not-there-at-all is not installed" in capsys.readouterr().out


@pytest.mark.parametrize("package", ["yaml", "pydantic"])
def test_a_missing_package_of_recipes_is_told_with_its_cure(package):
    ended = run_without(package, "train", "recipe.yaml")
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert "PyYAML and pydantic: " in ended.stderr and "glm4v-patched[train]" in ended.stderr


@pytest.mark.parametrize("command", ["train", "doctor", "merge --out out", "compare"])
@pytest.mark.parametrize("name", ["x" * 5_000, "odd\x1b[31m\u202ename"])
def test_odd_names_end_in_lines_that_a_terminal_shows(command, name, capsys):
    """Too long for a file system, or with what a terminal would obey: no traceback, no control."""
    command, *rest = command.split()
    assert main([command, name, *rest]) == 1
    output = "".join(capsys.readouterr())
    assert output and printable(output, allow="\n") == output


def test_the_demo_checks_before_it_writes_anything(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(config, "version", lambda package: "0.1.0")
    assert main(["demo", "--device", "cpu", "--out", str(tmp_path / "new")]) == 1
    assert "a tested DeepSpeed instead of 0.1.0: " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def base_recipe(tmp_path_factory) -> Recipe:
    return drawn_recipe(tmp_path_factory.mktemp("command_line"), {})


@pytest.fixture
def recipe(tmp_path, monkeypatch, base_recipe) -> dict:
    """A recipe in ``recipe.json``, and no processes that it could be run on."""
    steps = {"max_steps": 10, "save_steps": 2}
    values = {
        "model": base_recipe.model,
        "out": str(tmp_path / "out"),
        "data": {"train": base_recipe.data.train},
        "trainer": {"per_device_train_batch_size": 1, "learning_rate": 1e-3, **steps},
    }
    (tmp_path / "recipe.json").write_text(json.dumps(values))
    monkeypatch.setattr(preflight, "require_deepspeed", lambda: None)
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("processes were started"))
    return values


@pytest.fixture
def train(recipe, tmp_path) -> list[str]:
    on_two = ["--processes", "2", "--device", "cpu"]
    return ["train", str(tmp_path / "recipe.json"), *on_two]


@pytest.fixture
def checkpoint(tmp_path, recipe) -> Path:
    """Return a checkpoint of the recipe on two processes, after its fourth step."""
    checkpoint = tmp_path / "out" / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "latest").write_text("x")
    mine = Recipe.read(tmp_path / "recipe.json")
    rows = digest_rows(check_data(resolve_recipe(mine)), with_eval=False)
    write_checkpoint_manifest(
        checkpoint,
        ResumeFingerprint(resolve_recipe(mine).settings(2), identify(resolve_base(mine)), rows),
    )
    return checkpoint


@pytest.mark.parametrize(
    ("typed", "reached"),
    [
        ("", {"resume": False, "overwrite": False, "accept_changed_data": False}),
        ("--overwrite trainer.max_steps=7", {"overwrite": True, "steps": 7}),
        ("--resume --accept-changed-data", {"resume": True, "accept_changed_data": True}),
        ("--resume-from there --dry-run", {"resume": Path("there"), "dry_run": True}),
    ],
)
def test_what_is_typed_reaches_the_training(typed, reached, train, monkeypatch):
    options = {}

    def note(recipe, placement, **keywords) -> None:
        options.update(keywords, steps=recipe.trainer.max_steps, processes=placement.processes)

    monkeypatch.setattr(launch, "launch", note)
    monkeypatch.setattr(ending, "describe_end", lambda *_: "")
    assert main([*train, *typed.split()]) == 0
    assert options == options | {"steps": 10, "processes": 2, "dry_run": False} | reached


def test_training_continues_from_the_checkpoint_it_names(
    tmp_path, train, checkpoint, monkeypatch, capsys
):
    commands = []
    monkeypatch.setattr(launch, "_run_processes", lambda command, _: commands.append(command) or "")
    monkeypatch.setattr(ending, "describe_end", lambda *_: "")
    monkeypatch.chdir(tmp_path)
    assert main([*train, "--resume-from", "out/checkpoint-4"]) == 0
    assert "checkpoint-4, after step 4" in capsys.readouterr().out
    plan = Plan.read(Path(commands[0][-1]))
    assert (tmp_path / plan.checkpoint).samefile(checkpoint)


def test_a_training_that_failed_says_how_to_continue(
    tmp_path, recipe, train, checkpoint, monkeypatch, capsys
):
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(
        launch, "_run_processes", lambda command, _: "process 0 ended with status 1"
    )
    assert main([*train, "--resume"]) == 1
    message = capsys.readouterr().err
    assert "failed: process 0 ended with status 1" in message
    text, _, command = message.rstrip("\n").rpartition(":\n  ")
    assert text.endswith(f"to resume from {checkpoint}")

    # As printed, in the same shell; it ends before any process starts.
    monkeypatch.undo()
    (checkpoint / "latest").unlink()
    written = tmp_path / "out" / "recipe.json"
    written.write_text(json.dumps(recipe | {"model": "gone"}))
    continued = in_plain_shell(command)
    assert continued.status == 1 and f'{written}:1: model is "gone"' in continued.output


def test_ctrl_c_ends_with_the_status_of_a_signal(train, monkeypatch, capsys):
    def interrupt(command, environment):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_run_processes", interrupt)
    assert main(train) == 128 + signal.SIGINT
    assert "training was stopped by SIGINT\nto resume" in capsys.readouterr().err
