"""The command line says what is wrong before it starts."""

import importlib.util
import json
import os
import re
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
from glm4v_patched.finetune.checkpoints import Origin, Rows, write_manifest
from glm4v_patched.finetune.plan import Plan, check_data, settings_of
from glm4v_patched.finetune.recipe import Recipe
from glm4v_patched.finetune.recipe_model import base_of
from glm4v_patched.models.base import identify
from glm4v_patched.terminal_text import printable
from tests.helpers.processes import in_plain_shell
from tests.helpers.recipes import drawn_recipe


def test_a_missing_deepspeed_is_told_with_its_cure(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"missing: DeepSpeed.*glm4v-patched\[train\]"):
        require_deepspeed()


@pytest.mark.parametrize("option", ["--steps", "--processes"])
def test_less_than_one_is_refused(option, capsys):
    with pytest.raises(SystemExit):
        main(["demo", option, "0"])
    assert "0 is less than 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("train recipe.yaml --dryrun", "unrecognized arguments: --dryrun; did you mean --dry-run?"),
        (
            "train r.yaml out=a --lr 1e-5",
            "arguments: --lr 1e-5; fields of a recipe have no dashes, as trainer.lear",
        ),
        ("answer m --data a --out b --max-tokens 5", "did you mean --max-new-tokens?"),
        ("serve model --prot=80", "unrecognized arguments: --prot=80; did you mean --port?"),
        ("merge adapters more --out b", "unrecognized arguments: more; --help lists"),
        ("train", "the following arguments are required: RECIPE\n"),
    ],
)
def test_unknown_options_are_answered_with_the_nearest_one(typed, told, capsys):
    with pytest.raises(SystemExit) as end:
        main(typed.split())
    error = capsys.readouterr().err
    assert end.value.code == 2 and told in error
    assert error.startswith(f"usage: glm4v-patched {typed.split()[0]}")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("tarin recipe.yaml", "there is no command 'tarin'; did you mean train?\n"),
        ("Serve model", "there is no command 'Serve'; did you mean serve?\n"),
        ("help", "there is no command 'help'; --help lists what there is\n"),
    ],
)
def test_unknown_commands_are_answered_with_the_nearest_one(typed, told, capsys):
    with pytest.raises(SystemExit) as end:
        main(typed.split())
    assert end.value.code == 2 and told in capsys.readouterr().err


def test_versions_are_told_without_loading_torch():
    code = "import runpy, sys; sys.modules['torch'] = None; "
    code += "runpy.run_module('glm4v_patched', run_name='__main__')"
    command = [sys.executable, "-c", code, "--version"]
    lines = subprocess.check_output(command, text=True).splitlines()
    assert lines[0] == f"glm4v-patched {glm4v_patched.__version__}"
    for name in ("torch", "transformers", "deepspeed"):
        assert f"{name} {version(name)}" in lines


def test_what_is_not_installed_has_no_version(monkeypatch, capsys):
    monkeypatch.setattr(cli, "NAMED_WITH_VERSION", ("torch", "not-there-at-all"))
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert "not-there-at-all is not installed" in capsys.readouterr().out


def test_a_data_file_that_is_not_there_ends_with_its_name(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path), "--data", str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "doctor", "answer", "merge", "compare", "serve"])
@pytest.mark.parametrize("name", ["x" * 5_000, "a/" * 3_000, "odd\x1b[31m\u202ename", "nul\0"])
def test_odd_names_end_in_lines_that_a_terminal_shows(command, name, tmp_path, capsys):
    """Too long for a file system, or with what a terminal would obey: no traceback, no control."""
    rest = {
        "answer": ["--data", name, "--out", name],
        "merge": ["--out", name],
        "serve": ["--device", "cpu"],
    }
    assert main([command, name, *rest.get(command, [])]) == 1
    told = "".join(capsys.readouterr())
    assert told and printable(told, kept="\n") == told


def test_one_conversation_cannot_be_split(tmp_path, capsys):
    data = tmp_path / "one.jsonl"
    data.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    assert main(["demo", "--out", str(tmp_path), "--data", str(data)]) == 1
    assert "1 conversations; at least 2 are needed" in capsys.readouterr().err


def test_the_demo_checks_before_it_writes_anything(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(config, "version", lambda package: "0.1.0")
    assert main(["demo", "--out", str(tmp_path / "new"), "--device", "cpu"]) == 1
    assert "a tested DeepSpeed, 0.1.0 is not: " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Recipe:
    return drawn_recipe(tmp_path_factory.mktemp("command_line"), {})


@pytest.fixture
def recipe(tmp_path, monkeypatch, drawn) -> dict:
    """A recipe in ``recipe.json``, and no processes that it could be run on."""
    values = {
        "model": drawn.model,
        "out": str(tmp_path / "out"),
        "data": {"train": drawn.data.train},
        "trainer": {
            "max_steps": 10,
            "per_device_train_batch_size": 1,
            "learning_rate": 1e-3,
            "save_steps": 2,
        },
    }
    (tmp_path / "recipe.json").write_text(json.dumps(values))
    monkeypatch.setattr(preflight, "require_deepspeed", lambda: None)
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("processes were started"))
    return values


def add_checkpoint(tmp_path, step: int, processes: int = 2) -> None:
    folder = tmp_path / "out" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "latest").write_text("x")
    mine = Recipe.read(tmp_path / "recipe.json")
    checked = check_data(mine)
    rows = Rows(checked.row_digests, checked.row_lines)
    base = identify(base_of(mine))
    write_manifest(folder, Origin(settings_of(mine, processes), base, rows))


def run_train(tmp_path, *options: str) -> int:
    return main(
        ["train", str(tmp_path / "recipe.json"), "--processes", "2", "--device", "cpu", *options]
    )


@pytest.mark.parametrize("field", ["out", "model", "data.train", "data.eval"])
def test_a_name_in_a_recipe_that_is_too_long_ends_with_one_line(field, recipe, tmp_path, capsys):
    assert run_train(tmp_path, "--dry-run", f"{field}={'x' * 5_000}") == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and len(told) < 1_000


def test_rows_of_another_format_are_told_without_loading_torch(tmp_path, drawn):
    (tmp_path / "rows.jsonl").write_text('{"image": "a.png", "caption": "a cat"}\n')
    asked = drawn.model_dump() | {"data": {"train": str(tmp_path / "rows.jsonl")}}
    asked["out"] = str(tmp_path / "out")
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(asked))
    code = "import runpy, sys; sys.modules['torch'] = None; "
    code += "runpy.run_module('glm4v_patched', run_name='__main__')"
    command = [sys.executable, "-c", code, "train", str(recipe), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "answer: caption, image: image}" in done.stderr, done.stderr  # the line that reads them
    assert done.returncode == 1 and not (tmp_path / "out").exists()


def test_rows_are_left_out_if_asked_also_where_the_first_ones_are_all_bad(tmp_path, recipe, capsys):
    good = Path(recipe["data"]["train"])
    mixed = good.with_name("mixed.jsonl")
    mixed.write_text('{"caption": "a cat"}\n' * 21 + good.read_text())
    asked = recipe | {"data": {"train": str(mixed)}}
    (tmp_path / "recipe.json").write_text(json.dumps(asked))
    assert run_train(tmp_path, "--dry-run") == 1
    assert "none of its first 20 rows can be used" in capsys.readouterr().err
    assert run_train(tmp_path, "--dry-run", "data.on_bad=skip") == 0
    assert "they are left out" in capsys.readouterr().out


def test_a_recipe_that_is_not_there_or_not_one_ends_with_its_name(tmp_path, capsys):
    assert main(["train", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err
    (tmp_path / "recipe.json").write_text('{"stepps": 3}')
    assert main(["train", str(tmp_path / "recipe.json")]) == 1
    assert re.search(
        "(?s)recipe.json: data.train is missing.*json:1: stepps is not", capsys.readouterr().err
    )


def test_training_does_not_start_among_checkpoints_unless_told_to_continue(
    tmp_path, recipe, capsys
):
    add_checkpoint(tmp_path, 4)
    assert run_train(tmp_path) == 1
    message = capsys.readouterr().err
    assert "holds checkpoint-4; give the new run another folder (out), or continue" in message
    assert "(--resume)" in message
    assert not (tmp_path / "out" / "recipe.json").exists()


@pytest.fixture
def commands(monkeypatch) -> list[list[str]]:
    """Of training processes, which do nothing here, so that nothing is told of what they did."""
    asked: list[list[str]] = []
    monkeypatch.setattr(launch, "_run", lambda command, _: asked.append(command) or "")
    monkeypatch.setattr(ending, "describe_end", lambda *_: "")
    return asked


@pytest.mark.parametrize("options", [["--resume"], ["--resume-from", "out/checkpoint-4"]])
def test_training_continues_from_the_checkpoint_it_names(
    tmp_path, recipe, options, commands, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    add_checkpoint(tmp_path, 4)
    assert run_train(tmp_path, *options) == 0
    assert "checkpoint-4, after step 4" in capsys.readouterr().out
    plan = Plan.read(Path(commands[0][-2]))
    assert (tmp_path / plan.checkpoint).samefile(tmp_path / "out" / "checkpoint-4")


def test_training_with_nothing_to_continue_from_says_so_and_renames_what_is_incomplete(
    tmp_path, recipe, commands, capsys
):
    (tmp_path / "out" / "checkpoint-4").mkdir(parents=True)
    assert run_train(tmp_path, "--resume") == 0
    assert "no complete checkpoint in" in capsys.readouterr().out
    assert (tmp_path / "out" / "incomplete-checkpoint-4").is_dir()
    assert Plan.read(tmp_path / "out" / "plan.json").checkpoint is None


def test_an_incomplete_checkpoint_that_is_named_is_refused(tmp_path, recipe, capsys):
    add_checkpoint(tmp_path, 4)
    checkpoint = tmp_path / "out" / "checkpoint-4"
    (checkpoint / "latest").write_text("longer")
    assert run_train(tmp_path, "--resume-from", str(checkpoint)) == 1
    assert "latest: expected 1 bytes, found 6" in capsys.readouterr().err


def test_a_run_of_another_number_of_processes_cannot_be_continued(tmp_path, recipe, capsys):
    add_checkpoint(tmp_path, 4, processes=3)
    assert run_train(tmp_path, "--resume") == 1
    assert "processes: 3 there, 2 now" in capsys.readouterr().err


@pytest.mark.parametrize("activated", [False, True])
def test_a_training_that_failed_says_how_to_continue(
    tmp_path, recipe, monkeypatch, capsys, activated
):
    path = os.pathsep.join([str(Path(sys.executable).parent)] * activated + [os.defpath])
    monkeypatch.setenv("PATH", path)
    add_checkpoint(tmp_path, 4)
    monkeypatch.setattr(launch, "_run", lambda command, _: "process 0 ended with status 1")
    assert run_train(tmp_path, "--resume") == 1
    message = capsys.readouterr().err
    assert "failed: process 0 ended with status 1" in message
    told, _, command = message.rstrip("\n").rpartition(":\n  ")
    assert told.endswith(f"to continue from {tmp_path / 'out' / 'checkpoint-4'}")

    # As printed, in the same shell; it ends before any process starts.
    monkeypatch.undo()
    (tmp_path / "out" / "checkpoint-4" / "latest").unlink()
    (tmp_path / "out" / "recipe.json").write_text(json.dumps(recipe | {"model": "gone"}))
    continued = in_plain_shell(command, path)
    assert continued.returncode == 1
    assert f'{tmp_path / "out" / "recipe.json"}:1: model is "gone"' in continued.stderr


def test_ctrl_c_ends_with_the_status_of_a_signal(tmp_path, recipe, monkeypatch, capsys):
    def interrupt(command, environment):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_run", interrupt)
    assert run_train(tmp_path) == 128 + signal.SIGINT
    assert "training was stopped by SIGINT\nto continue" in capsys.readouterr().err
