"""What others have put under names that we use is neither followed, nor written to, nor copied."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm4v_patched.cli import main
from glm4v_patched.inference import answer
from glm4v_patched.inference.answer_worker import Answer
from tests.helpers.recipes import drawn_recipe, write_recipe
from tests.helpers.tiny import update_json

SECRET = "a key of somebody"


THINGS = {
    "link": lambda path, secret: path.symlink_to(secret),
    "link to nothing": lambda path, secret: path.symlink_to(secret.with_name("nothing")),
    "hard link": lambda path, secret: os.link(secret, path),
    "pipe": lambda path, secret: os.mkfifo(path),
    "folder": lambda path, secret: path.mkdir(),
    "own file": lambda path, secret: path.write_text("mine"),
}


@pytest.fixture(scope="module")
def demo_recipe(tmp_path_factory):
    return drawn_recipe(tmp_path_factory.mktemp("others"))


@pytest.fixture
def secret(tmp_path) -> Path:
    path = tmp_path / "secret" / "key"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


def seen(root: Path) -> dict[str, tuple]:
    """All that lies there: its kind, where it leads to, and its bytes."""
    return {
        str(path.relative_to(root)): (
            path.lstat().st_mode,
            path.readlink() if path.is_symlink() else None,
            path.read_bytes() if path.is_file() and not path.is_symlink() else None,
        )
        for path in root.rglob("*")
    }


def refused(command: list[str], place: Path, secret: Path, capfd) -> None:
    before = seen(place), seen(secret.parent)
    assert main(command) == 1
    assert (seen(place), seen(secret.parent)) == before
    assert SECRET not in "".join(capfd.readouterr())


@pytest.mark.parametrize("thing", THINGS)
def test_what_is_not_its_own_is_left_by_each_command(demo_recipe, tmp_path, secret, capfd, thing):
    out, recipe = tmp_path / "out", tmp_path / "recipe.json"
    write_recipe(demo_recipe.override({"out": str(out)}), recipe)
    train = ["train", str(recipe), "--device", "cpu", "--processes", "1"]
    arguments = [demo_recipe.model, "--data", demo_recipe.data.train, "--device", "cpu", "--out"]
    answering = ["answer", *arguments, str(out / "a.jsonl")]
    evaluating = ["evaluate", *arguments, str(out)]
    for name, command in (
        ("run.lock", train),
        ("run.json", train),
        ("run.json", [*train, "--overwrite"]),
        ("training.json", [*train, "--resume"]),
        ("a.jsonl", answering),
        ("a.jsonl.settings.json", answering),
        ("answers.jsonl", evaluating),
        ("metrics.json", evaluating),
        ("answers.png", evaluating),
    ):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        THINGS[thing](out / name, secret)
        refused(command, out, secret, capfd)


@pytest.mark.parametrize("name", ["MODEL_LICENSE", "generation_config.json"])
@pytest.mark.parametrize("thing", [*THINGS][:5])
def test_merge_copies_no_key_out_of_a_model(files, tmp_path, secret, capfd, thing, name):
    model = Path(shutil.copytree(files.model, tmp_path / "model"))
    (model / name).unlink(missing_ok=True)
    THINGS[thing](model / name, secret)
    adapters = Path(shutil.copytree(files.adapters, tmp_path / "adapters"))
    update_json(adapters / "adapter_config.json", base_model_name_or_path=str(model))
    (adapters / "training.json").unlink(missing_ok=True)  # of the model as it was
    refused(["merge", str(adapters), "--out", str(tmp_path / "merged")], model, secret, capfd)
    assert not (tmp_path / "merged").exists()


FEW = settings(max_examples=16, derandomize=True, deadline=None)
MANY = settings(max_examples=1200, derandomize=True, deadline=None)
# Ours, of several commands and libraries, and others.
NAMES = ["run.lock", "run.json", "training.json", "checked_data", "checkpoint-2", "config.json"]
NAMES += ["model.safetensors", "adapter_config.json", "loss.png", "metrics.json", "answers.jsonl"]
NAMES += ["answers.jsonl.settings.json", "answers.png", "incomplete-checkpoint-2", "notes", ".own"]
LYING_THERE = st.dictionaries(
    st.sampled_from(NAMES), st.sampled_from([*THINGS.values()]), max_size=5
)


@pytest.mark.parametrize("profile", [FEW, pytest.param(MANY, marks=pytest.mark.exhaustive)])
def test_whatever_lies_there_stays_as_it_is(demo_recipe, tmp_path_factory, profile, monkeypatch):
    root = tmp_path_factory.mktemp("lying_there")
    data = ["--data", demo_recipe.data.train, "--device", "cpu"]

    def answers(options, base, questions):
        return ((question, Answer("a", "stop")) for question in questions)

    monkeypatch.setattr(answer, "generate_answers", answers)

    @profile
    @given(st.sampled_from(["train", "answer", "evaluate"]), LYING_THERE)
    def check(command, existing):
        shutil.rmtree(root)
        out, secret = root / "out", root / "secret" / "key"
        for path in (out, secret.parent):
            path.mkdir(parents=True)
        secret.write_text(SECRET)
        for name, thing in existing.items():
            thing(out / name, secret)
        before, secret_before = seen(out), seen(secret.parent)
        if command == "train":
            write_recipe(demo_recipe.override({"out": str(out)}), root / "recipe.json")
            main(["train", str(root / "recipe.json"), "--device", "cpu", "--dry-run"])
            assert seen(out) == before
        else:
            target = out / "answers.jsonl" if command == "answer" else out
            main([command, demo_recipe.model, *data, "--out", str(target)])
            assert before.items() <= seen(out).items()
        assert seen(secret.parent) == secret_before

    check()
