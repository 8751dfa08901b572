"""Problems of a recipe on this machine are reported before anything expensive starts."""

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm4v_patched.cli import main
from glm4v_patched.finetune.preflight import validate_recipe
from glm4v_patched.finetune.recipe.file import RecipeError, set_nested
from glm4v_patched.finetune.recipe.sections import check_values, declared_fields
from glm4v_patched.finetune.recipe.trainer import installed_fields
from glm4v_patched.finetune.recipe.types import annotated_type, expected_in_words
from tests.helpers.recipes import LEAST


def problem_lines(recipe_file: Path, *overrides: str, **options) -> list[str]:
    """Lines of the error, without where they come from; none if there is no error."""
    try:
        validate_recipe(recipe_file, overrides, **({"device": "cpu"} | options))
    except RecipeError as error:
        return [line.split(": ", 1)[1] for line in str(error).split("\n")]
    return []


def test_all_that_is_wrong_comes_in_one_answer(recipe_file, has_gpus, capsys, words):
    has_gpus(2)
    fields = ["engine.compile=1", "--processes", "4", "data.train=none.jsonl", "model=modle"]
    assert main(["train", str(recipe_file), *fields]) == 1
    lines = sorted(capsys.readouterr().err.splitlines())
    named = ["4 processes", "data.train", "engine.compile", "model"]
    assert all(name in line for name, line in zip(named, lines, strict=True))
    words("\n".join(lines))


def index_of(*names: object) -> str:
    where = {str(number): name for number, name in enumerate(names)}
    return json.dumps({"metadata": {}, "weight_map": where})


INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "a folder without config.json"),
        ("config.json", "[" * 100_000, "config.json cannot be read"),
        ("config.json", '{"model_type": "chatglm"}', "vision_config is None, expected an object"),
        (WEIGHTS, None, "a folder without weights; expected model.safetensors"),
        (WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid", "git-lfs pointer without"),
        (INDEX, index_of("m-1.safetensors", WEIGHTS), "m-1.safetensors is missing"),
        (INDEX, index_of(WEIGHTS, "../o/a"), "names '../o/a'; expected only names of files"),
        (INDEX, index_of(WEIGHTS, 5), "names 5; expected only names of files"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(
    recipe_file, tmp_path, model_folder, name, content, message
):
    folder = shutil.copytree(model_folder, tmp_path / "changed")
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content)
    [line] = problem_lines(recipe_file, f"model={folder}")
    assert line.startswith(f'model is "{folder}": ') and message in line


def test_files_and_folders_that_cannot_be_are_told_of_each_field(
    recipe_file, tmp_path, monkeypatch, words
):
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    overrides = [
        f"model={recipe_file}",
        f"out={tmp_path}/link/out",
        f"data.reuse_features={tmp_path}/link",
    ]
    for name in ("none", "empty", "folder", "link"):
        overrides += [f"data.train={tmp_path}/{name}", f"data.eval={tmp_path}/{name}"]
    lines = []
    for assignment in overrides:
        [line] = problem_lines(recipe_file, assignment, "trained=lm")
        assert line.startswith(assignment.split("=")[0])
        lines.append(line)
    words("\n".join(lines))
    # The superuser, as whom tests may run, is let in everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)
    [line] = problem_lines(recipe_file)
    assert line.endswith(f"permission to write to {tmp_path}") and not (tmp_path / "new").exists()


def test_a_folder_of_images_is_no_place_for_a_run(recipe_file, tmp_path):
    out = tmp_path / "photos"
    out.mkdir()
    (out / "loss.png").touch()  # a run's own
    assert problem_lines(recipe_file, f"out={out}") == []
    for name in ("b.JPG", "a.png", "c.webp", "notes.txt"):
        (out / name).touch()
    [line] = problem_lines(recipe_file, f"out={out}")
    assert "out is " in line and "contains images (a.png, b.JPG and 1 more), and" in line


def test_a_device_that_cannot_is_told_before_anything_starts(tmp_path, has_gpus):
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(LEAST | {"engine": {"fp8": True}}))
    old = "capability 8.9 or newer (Ada, Hopper), and NVIDIA H200 has 8"
    for capabilities, device, processes, message in (
        ([(8, 9), (9, 0)], "cuda", None, None),
        ([(8, 9), (8, 0)], "cuda", None, old),
        ([(8, 9), (8, 0)], "cuda", 1, None),  # the second takes no part
        ([], "cuda", None, None),  # of which another fault tells
        ([], "cpu", None, "engine.fp8 is true, which runs on a GPU, and --device is cpu"),
    ):
        has_gpus(len(capabilities), capabilities=capabilities)
        with pytest.raises(RecipeError) as error:
            validate_recipe(file, (), processes, device)
        faults = [line for line in str(error.value).split("\n") if "fp8" in line]
        assert len(faults) == (message is not None) and (not message or message in faults[0])


ANYTHING = (st.none() | st.booleans() | st.integers(-2, 5) | st.floats() | st.text(max_size=6)) | (
    st.sampled_from(["/dev/null", "/proc/1", "a/b", ".", "qlora", "lm", "adamw_8bit", "full"])
    | st.sampled_from([[], {}, {"train": "/no/such"}, {"x": 1}, 2**70, 1e-300])
)


@pytest.mark.parametrize("examples", [150, pytest.param(3000, marks=pytest.mark.exhaustive)])
def test_any_recipe_can_be_run_or_is_refused(tmp_path_factory, model_folder, has_gpus, examples):
    """One whose fields are partly missing and partly anything."""
    folder = tmp_path_factory.mktemp("any")
    (folder / "train.jsonl").write_text("{}\n")
    right = {"model": str(model_folder), "out": str(folder / "out")}
    right |= {"data.train": str(folder / "train.jsonl"), "trainer.save_steps": 2}
    right |= {f"trainer.{name}": value for name, value in LEAST["trainer"].items()}
    names = [name for name, _ in declared_fields()]
    names += [f"trainer.{name}" for name in installed_fields()]
    has_gpus(2)

    @settings(max_examples=examples, derandomize=True, deadline=None)
    @given(
        st.sets(st.sampled_from(sorted(right)), max_size=2),
        st.dictionaries(st.sampled_from(names), ANYTHING, max_size=2),
        st.none() | st.integers(1, 4),
        st.sampled_from(["cuda", "cpu"]),
    )
    def attempt(missing, changed, processes, device):
        values = set_nested({}, {k: v for k, v in right.items() if k not in missing} | changed)
        (folder / "r.json").write_text(json.dumps(values))
        try:
            recipe, placement = validate_recipe(folder / "r.json", (), processes, device)
        except RecipeError as error:
            starts = (f"{folder}/r.json:", "command line: ")
            assert all(line.startswith(starts) for line in str(error).split("\n"))
            return
        assert recipe.flat().keys() >= right.keys() and placement.on_cpu == (device == "cpu")
        assert not (folder / "out").exists()

    attempt()


def test_groups_of_zero_plus_plus_are_those_of_all_machines(recipe_file):
    groups = "engine.zero_hpz_partition_size=4"
    assert problem_lines(recipe_file, groups, processes=1, world_size=8) == []
    [line] = problem_lines(recipe_file, groups, processes=1, world_size=6)
    assert "zero_hpz_partition_size" in line and "6" in line


def test_a_folder_is_told_to_be_no_recipe(recipe_file, tmp_path):
    with pytest.raises(RecipeError, match=r"is a folder; expected .*recipe\.json"):
        validate_recipe(tmp_path, device="cpu")


@pytest.fixture
def laid_out(recipe_file, tmp_path, model_folder) -> Path:
    """Folders that a recipe reads, each beside one whose name begins alike."""
    shutil.copytree(model_folder, tmp_path / "model")
    for name in ("train", "eval", "images"):
        (tmp_path / name).mkdir()
        shutil.copy(tmp_path / "train.jsonl", tmp_path / name / "rows.jsonl")
    for name in ("model", "train", "eval", "images"):
        (tmp_path / f"{name}-private").mkdir()
    return tmp_path


READ = {"model": "model", "train": "data.train", "eval": "data.eval", "images": "data.image_folder"}


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("as_list", [False, True])
def test_what_is_written_lies_neither_in_nor_around_what_is_read(
    recipe_file, laid_out, monkeypatch, name, as_list
):
    folder = laid_out / name
    monkeypatch.chdir(laid_out)
    overrides = [f"{READ[name]}={name}"]
    if as_list and name in ("train", "eval"):
        overrides = [f"{READ[name]}=[{{path: {name}}}]"]
    elif as_list and name == "images":
        overrides = ["data.train=[{path: train.jsonl, image_folder: images}]"]
    (laid_out / "link").symlink_to(folder)
    field = "data.reuse_features"
    around = f"{name}-private/../{name}/run"
    for out in (name, f"{name}/run", f"{folder}/", around, "link/run", "."):
        [line] = problem_lines(recipe_file, *overrides, f"out={out}")
        assert line.startswith("out") and f"{folder}, which is read" in line
    [line] = problem_lines(recipe_file, *overrides, f"{field}={name}/kept", "trained=lm")
    assert line.startswith(field) and f"{folder}, which is read" in line
    for out in (f"{name}-private", f"{name}-private/run", f"{name}_run"):
        beside = [f"out={out}", f"{field}={out}/kept", "trained=lm"]
        assert problem_lines(recipe_file, *overrides, *beside) == []


def test_an_image_folder_around_the_rows_is_a_prefix_of_paths(recipe_file, laid_out, monkeypatch):
    monkeypatch.chdir(laid_out)
    for folder in (".", str(laid_out.parent)):
        assert problem_lines(recipe_file, f"data.image_folder={folder}", "out=runs/one") == []


def test_features_are_kept_in_out_or_apart_from_it(recipe_file, laid_out):
    cached = f"data.reuse_features={laid_out}/kept"
    assert problem_lines(recipe_file, cached, f"out={laid_out}/run", "trained=lm") == []
    for out in ("kept", "kept/run"):
        [line] = problem_lines(recipe_file, cached, f"out={laid_out}/{out}", "trained=lm")
        assert line.startswith("out") and "data.reuse_features" in line


@pytest.mark.parametrize(
    ("pattern", "refused", "right"),
    [
        ("*.jsonl", ["."], ["run", "train/run"]),
        ("train/*.jsonl", ["train", "link"], ["train/run", "run", "."]),
        ("*/rows.jsonl", ["run", ".", "train"], ["train/run", "run/out"]),
        ("train/**/*.jsonl", ["train", "train/run", "train/a/b", "link/run"], ["run", "eval", "."]),
        ("t*/**/*.jsonl", ["train/a/b", "."], ["eval/a"]),
    ],
)
def test_a_run_does_not_write_where_a_pattern_looks_for_rows(
    recipe_file, laid_out, monkeypatch, pattern, refused, right
):
    monkeypatch.chdir(laid_out)
    (laid_out / "link").symlink_to("train")
    for sets in (f"data.train='{pattern}'", f"data.train=[{{path: '{laid_out}/{pattern}'}}]"):
        for out in refused:
            [line] = problem_lines(recipe_file, sets, f"out={out}")
            assert line.startswith("out") and "may contain files that match" in line
        for out in right:
            assert problem_lines(recipe_file, sets, f"out={out}") == []


def test_paths_of_a_recipe_are_expanded_wherever_they_stand(recipe_file, laid_out, monkeypatch):
    monkeypatch.setenv("HOME", str(laid_out))
    monkeypatch.setenv("DATA", str(laid_out))
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.chdir(laid_out / "model-private")
    names = {"model": "model", "out": "new", "data.train": "train", "data.eval": "eval"}
    names |= {"data.image_folder": "images", "data.reuse_features": "kept"}
    overrides = [f"{field}=~/{name}" for field, name in names.items()]
    validated, _ = validate_recipe(recipe_file, [*overrides, "trained=lm"], device="cpu")
    assert {field: validated.flat()[field] for field in names} == {
        field: f"{laid_out}/{name}" for field, name in names.items()
    }
    for field, name in names.items():
        [line] = problem_lines(recipe_file, f"{field}=${{DATA}}/{name}", "trained=lm")
        assert line.startswith(field)
        assert line.endswith(f"expected the path itself: {laid_out}/{name}")
        [line] = problem_lines(recipe_file, f"{field}=${{OUT}}/{name}", "trained=lm")
        assert line.startswith(field) and "OUT is not set" in line
    for sets in (
        "[~/train/rows.jsonl]",
        "['~/train/*.jsonl']",
        "[{path: ~/train/rows.jsonl, image_folder: ~/images}]",
    ):
        validated, _ = validate_recipe(recipe_file, [f"data.train={sets}"], device="cpu")
        [source] = validated.data.sources()
        assert source.path == f"{laid_out}/train/rows.jsonl"
        [line] = problem_lines(recipe_file, f"data.train={sets.replace('~', '$DATA', 1)}")
        assert line.startswith("data.train: "), line
        assert f"expected the path itself: {laid_out}/" in line
    assert source.image_folder == f"{laid_out}/images"
    assert not (laid_out / "model-private" / "~").exists()


def test_every_field_of_files_or_folders_is_a_path():
    words = {name: expected_in_words(annotated_type(field)) for name, field in declared_fields()}
    paths = set()
    for name in words:
        faults = check_values(set_nested(LEAST, {name: "~nobody-of-this-name/a"})).problems
        paths |= {name for fault in faults if "there is no user of that name" in fault.text}
    assert paths == {name for name, text in words.items() if "folder" in text or "file" in text}
