"""No command is silent for five seconds: its whole run is inside an activity of the ticker.

``test_terminal_text.py`` tests the ticker; here, each command is inside it, and leaves it only
where it waits for somebody. The slow tests watch real processes whose slow steps take longer still.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hub_upload.__main__ as hub_upload
from glm4v_patched import cli, terminal_text
from tests.helpers.processes import ROOT, cpu_environment

MAX_SILENCE = 5.0
# A command line of each command that argparse accepts.
ARGUMENTS = {
    "demo": "",
    "train": "r.yaml",
    "recipe": "",
    "answer": "m --data d --out o",
    "evaluate": "m --data d",
    "merge": "a --out o",
    "export": "m --format gguf --out o",
    "chat": "m",
    "serve": "m",
    "adopt": "f",
    "bench": "",
    "doctor": "",
    "compare": "f",
}
HUB_ARGUMENTS = {
    "build": "--weights w --out o",
    "verify": "w",
    "publish": "w --repo org/name",
}
# Files that suspend the ticker, for what they start or wait for prints itself.
SUSPENDING = {
    "finetune/launch.py": "the training processes, which have tickers of their own",
    "inference/chat.py": "the next question of a person",
    "inference/serving/connections.py": "requests",
}
SLOW_MODULES = ["torch", "transformers", "numpy", "pydantic", "huggingface_hub", "datasets"]


def test_every_command_is_in_the_tables():
    assert ARGUMENTS.keys() == cli._build_parser().get_default("commands").keys()
    [commands] = hub_upload._make_parser()._subparsers._group_actions
    assert HUB_ARGUMENTS.keys() == commands.choices.keys()


@pytest.mark.parametrize("command", ARGUMENTS)
def test_a_command_is_inside_an_activity_from_its_start_to_its_end(command, monkeypatch):
    build_parser, active = cli._build_parser, []

    def build():
        parser = build_parser()
        parser.get_default("commands")[command].set_defaults(
            run=lambda options: active.extend(terminal_text._active)
        )
        return parser

    monkeypatch.setattr(cli, "_build_parser", build)
    assert cli.main([command, *ARGUMENTS[command].split()]) == 0
    assert [activity.activity for activity in active] == [f"glm4v-patched {command}"]
    assert terminal_text._active == []


@pytest.mark.parametrize("command", HUB_ARGUMENTS)
def test_so_is_a_command_of_hub_upload(command, monkeypatch):
    active = []
    monkeypatch.setattr(
        hub_upload, "_run_command", lambda options: active.extend(terminal_text._active) or 0
    )
    assert hub_upload.main([command, *HUB_ARGUMENTS[command].split()]) == 0
    assert [activity.activity for activity in active] == [f"hub_upload {command}"]
    assert terminal_text._active == []


def test_the_ticker_is_suspended_only_where_another_prints_or_is_awaited():
    package = Path(cli.__file__).parent
    files = [*package.rglob("*.py"), *Path(hub_upload.__file__).parent.rglob("*.py")]
    suspending = {
        str(path.relative_to(package))
        for path in files
        if path.name != "terminal_text.py" and "no_progress()" in path.read_text(encoding="utf-8")
    }
    assert suspending == SUSPENDING.keys()


def test_the_limits_of_the_ticker_keep_what_is_promised():
    source = Path(terminal_text.__file__).read_text(encoding="utf-8")
    [numbers] = re.findall(r"^FIRST_LINE_SECONDS, .* = (.*)$", source, re.MULTILINE)
    first, following, poll = map(float, numbers.split(","))
    assert first + 2 * poll < 1 and following + 2 * poll < MAX_SILENCE


@pytest.mark.parametrize("module", ["glm4v_patched.cli", "hub_upload.__main__"])
def test_nothing_slow_is_imported_before_the_first_word(module):
    """The first line comes half a second after this import."""
    code = f"import {module}, sys; print([m for m in {SLOW_MODULES} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr


# Real processes: functions that sleep before they do their work, and the lines expected meanwhile.
# CI runs those of two commands; the others suspend the ticker, or start processes with their own.
SLOW_STEPS = {
    "answer model --data rows.jsonl --out answers.jsonl --device cpu --max-new-tokens 4": {
        "glm4v_patched.models.loading:build_on_device": "loading the model",
        "glm4v_patched.inference.answer_worker:count_positions": "glm4v-patched answer",
    },
    "merge adapters --out merged": {
        "glm4v_patched.inference.merge:merged_weight": "merging in fp32: 0 of 1 file",
    },
    "train recipe.yaml --device cpu --processes 1": {
        "glm4v_patched.finetune.launch:require_model": "checking the model",
        "glm4v_patched.finetune.plan:check_data": "reading rows",
        "glm4v_patched.finetune.worker:build_trainer": "training",
        "glm4v_patched.finetune.worker:write_atomically": "training",
    },
    "chat model --device cpu --max-new-tokens 4": {
        "glm4v_patched.inference.answer_worker:encode": "reading the question",
    },
    "serve model --engine transformers --device cpu --port 0 --max-new-tokens 4": {
        "glm4v_patched.inference.serving.app:make_app": "glm4v-patched serve",
    },
}
IN_CI = ("merge ", "answer ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from tests.helpers.answering import write_files
    from tests.helpers.recipes import drawn_recipe, write_recipe

    folder = tmp_path_factory.mktemp("silence")
    write_files(folder)
    (folder / "recipe").mkdir()
    write_recipe(drawn_recipe(folder / "recipe", {"trainer.max_steps": 2}), folder / "recipe.yaml")
    shutil.copy(ROOT / "tests" / "slowed.py", folder / "sitecustomize.py")
    return folder


def watch(command: list[str], folder: Path, slowed: str) -> tuple[float, str]:
    """Run a command with one line of input; return the longest silence in its output, and that.

    The time that the process takes to end, after its last line, is not counted. A server is ended
    when it is ready.
    """
    environment = cpu_environment() | {"HF_HUB_OFFLINE": "1", "SLOWED": slowed}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment["PYTHONPATH"]])
    output, longest, last = "", 0.0, time.monotonic()
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        process.stdin.write(b"which shape is it?\n")
        process.stdin.close()
        while received := os.read(process.stdout.fileno(), 65536):
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            output += received.decode()
            if "is served at" in output:
                process.kill()
    return longest, output


@pytest.mark.parametrize(
    "typed",
    [
        pytest.param(t, marks=[pytest.mark.exhaustive, pytest.mark.slow][t.startswith(IN_CI)])
        for t in SLOW_STEPS
    ],
)
def test_a_process_whose_steps_are_slow_is_never_silent(typed, folder):
    """Each step takes ten seconds longer. The ticker of these processes prints each second, so a
    busy machine may print its lines seconds late."""
    steps = SLOW_STEPS[typed]
    command = [sys.executable, "-m", "glm4v_patched", *typed.split()]
    silence, output = watch(command, folder, ",".join(steps))
    assert "Traceback" not in output
    assert silence < MAX_SILENCE, output
    for step, line in steps.items():
        assert f"(slow: {step})" in output, output
        assert len(re.findall(rf"^{re.escape(line)}.*$", output, re.MULTILINE)) > 3, output
