"""What others have put under names that we use is neither followed, nor written to, nor copied."""

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm4v_patched.cli import main
from hub_upload.build import build, read_source
from tests.helpers.recipes import drawn_recipe

SECRET = "a key of somebody"


def link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def link_to_nothing(path: Path, secret: Path) -> None:
    path.symlink_to(secret.with_name("nothing"))


def hard_link(path: Path, secret: Path) -> None:
    os.link(secret, path)


def pipe(path: Path, secret: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, secret: Path) -> None:
    path.mkdir()


def own_file(path: Path, secret: Path) -> None:
    path.write_text("mine")


THINGS = [link, link_to_nothing, hard_link, pipe, folder, own_file]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
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


@pytest.mark.parametrize("name", ["run.lock", "run.json"])
@pytest.mark.parametrize("thing", THINGS)
def test_train_leaves_what_is_not_its_own(drawn, tmp_path, secret, capfd, thing, name):
    out = tmp_path / "out"
    out.mkdir()
    thing(out / name, secret)
    recipe = tmp_path / "recipe.json"
    drawn.override({"out": str(out)}).write(recipe)
    command = ["train", str(recipe), "--device", "cpu", "--processes", "1"]
    refused([*command, "--dry-run"], out, secret, capfd)
    refused([*command, "--overwrite"], out, secret, capfd)
    refused(command, out, secret, capfd)


WRITTEN = [
    ("answer", "answers.jsonl", "answers.jsonl"),
    ("answer", "answers.jsonl", "answers.jsonl.settings.json"),
    ("evaluate", ".", "answers.jsonl"),
    ("evaluate", ".", "metrics.json"),
    ("evaluate", ".", "answers.png"),
]


@pytest.mark.parametrize(("command", "given", "name"), WRITTEN)
@pytest.mark.parametrize("thing", THINGS)
def test_answers_leave_what_is_not_theirs(
    drawn, tmp_path, secret, capfd, thing, command, given, name
):
    out = tmp_path / "out"
    out.mkdir()
    thing(out / name, secret)
    asked = [command, drawn.model, "--data", drawn.data.train, "--device", "cpu"]
    refused([*asked, "--out", str(out / given)], out, secret, capfd)


@pytest.mark.parametrize("name", ["LICENSE", "MODEL_LICENSE", "generation_config.json"])
@pytest.mark.parametrize("thing", [link, link_to_nothing, hard_link, pipe, folder])
def test_no_key_is_copied_out_of_a_model(files, tmp_path, secret, capfd, thing, name):
    model = Path(shutil.copytree(files.model, tmp_path / "model"))
    (model / name).unlink(missing_ok=True)
    thing(model / name, secret)
    adapters = Path(shutil.copytree(files.adapters, tmp_path / "adapters"))
    config = json.loads((adapters / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(model)
    (adapters / "adapter_config.json").write_text(json.dumps(config))
    (adapters / "training.json").unlink(missing_ok=True)  # of the model as it was
    refused(["merge", str(adapters), "--out", str(tmp_path / "merged")], model, secret, capfd)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("name", ["LICENSE", "MODEL_LICENSE", "generation_config.json"])
@pytest.mark.parametrize("thing", [link, link_to_nothing, hard_link])
def test_no_key_is_built_into_what_is_published(files, tmp_path, secret, thing, name):
    model = Path(shutil.copytree(files.model, tmp_path / "model"))
    (model / name).unlink(missing_ok=True)
    thing(model / name, secret)
    with pytest.raises(ValueError, match=name):
        source = read_source(str(model), "zai-org/glm-4v-9b", "shapes")
        build(source, tmp_path / "built", "our-org/built")
    assert not (tmp_path / "built").exists()


FEW = settings(max_examples=12, derandomize=True, deadline=None)
MANY = settings(max_examples=400, derandomize=True, deadline=None)
# Ours, of several commands and libraries, and others.
NAMES = ["run.lock", "run.json", "training.json", "checked_data", "checkpoint-2", "config.json"]
NAMES += ["model.safetensors", "adapter_config.json", "loss.png", "metrics.json", "answers.jsonl"]
NAMES += ["answers.jsonl.settings.json", "answers.png", "incomplete-checkpoint-2", "notes", ".own"]
LYING_THERE = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(THINGS), max_size=5)


@pytest.mark.parametrize("profile", [FEW, pytest.param(MANY, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("command", ["train", "answer", "evaluate"])
def test_whatever_lies_there_stays_as_it_is(drawn, tmp_path_factory, command, profile):
    root = tmp_path_factory.mktemp("lying_there")
    data = ["--data", drawn.data.train, "--device", "cpu", "--max-new-tokens", "1"]

    @profile
    @given(LYING_THERE)
    def check(there):
        shutil.rmtree(root)
        out, secret = root / "out", root / "secret" / "key"
        for path in (out, secret.parent):
            path.mkdir(parents=True)
        secret.write_text(SECRET)
        for name, thing in there.items():
            thing(out / name, secret)
        before, kept = seen(out), seen(secret.parent)
        if command == "train":
            drawn.override({"out": str(out)}).write(root / "recipe.json")
            main(["train", str(root / "recipe.json"), "--device", "cpu", "--dry-run"])
            assert seen(out) == before
        else:
            given = out / "answers.jsonl" if command == "answer" else out
            main([command, drawn.model, *data, "--out", str(given)])
            assert before.items() <= seen(out).items()
        assert seen(secret.parent) == kept

    check()
