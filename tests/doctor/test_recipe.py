"""What doctor says of a recipe: all that the launcher would refuse, and what shows only later."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from glm4v_patched.cli import main
from glm4v_patched.doctor import recipe as of_recipe
from glm4v_patched.doctor.findings import Finding
from glm4v_patched.engine import ram
from glm4v_patched.finetune.recipe import Recipe
from glm4v_patched.finetune.run_folder import locked
from tests.helpers.recipes import drawn_recipe


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Recipe:
    return drawn_recipe(tmp_path_factory.mktemp("doctor"))


@pytest.fixture
def asked(drawn, tmp_path) -> Path:
    """The recipe's file, with a model of its own."""
    folder = tmp_path / "model"
    shutil.copytree(drawn.model, folder)
    changes = {"model": str(folder), "out": str(tmp_path / "out")}
    drawn.override(changes).write(tmp_path / "recipe.json")
    return tmp_path / "recipe.json"


def checks(path: Path, *overrides: str) -> dict[str, Finding]:
    return {each.check: each for each in of_recipe.check_recipe(path, overrides, None, "cpu")}


def test_a_recipe_that_can_be_trained_is_described(asked):
    found = checks(asked)
    assert {each.verdict for each in found.values()} == {"ok"}
    assert "20 rows, 20 pictures" in found["data"].found
    assert found.keys() >= {"weights", "processor", "memory of a step", "folder (out)"}
    assert not Path(json.loads(asked.read_text())["out"]).exists()  # nothing was written


def test_the_first_rows_are_shown_as_they_are_learned(asked, capsys):
    folder = Path(asked).parent
    shutil.copy(next(Path(Recipe.read(asked).data.train).parent.rglob("*.png")), folder / "a.png")
    (folder / "rows.csv").write_text("file,what\na.png,red\nb.png,blue\na.png,red\n")
    columns = 'data.columns={question: "What is it?", answer: what, image: file}'
    given = [f"data.train={folder / 'rows.csv'}", "data.eval=null", columns]
    assert main(["doctor", str(asked), *given, "--rows", "2"]) == 1
    first, second = capsys.readouterr().out.split(f"{folder}/rows.csv:")[1:]
    assert first.startswith(f"2:\n  picture {folder}/a.png\n")
    assert "What is it?" in first and "red" in re.findall(r"\[\[(.*?)\]\]", first, re.DOTALL)[0]
    assert second.startswith("3:") and "b.png" in second and "there is no file" in second
    assert main(["doctor", str(asked), *given, "--rows", "1"]) == 0
    capsys.readouterr()
    # Without columns, the line is printed that reads them.
    assert main(["doctor", str(asked), *given[:2], "--rows", "1"]) == 1
    line = 'data.columns={question: "What is in the picture?", answer: what, image: file}'
    assert line in capsys.readouterr().out
    assert main(["doctor", "--rows", "1"]) == 1 == main(["doctor", str(asked), "--rows", "0"])


def test_all_faults_of_the_fields_are_told_and_what_else_can_be_is_looked_at(asked):
    fields = of_recipe.check_recipe(asked, ["engine.zero_stage=7", "trained=all"], 1, "cpu")
    found = [each.found for each in fields if each.verdict == "fails"]
    assert len(found) == 2 and all(text.startswith("command line: ") for text in found)
    # Without the GPUs that are wanted.
    found = {each.check: each for each in of_recipe.check_recipe(asked, [], 64, "cuda")}
    assert found["recipe"].verdict == "fails"
    assert found["data"].verdict == "ok" and "memory of a step" not in found


def rename_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    renamed = {name.replace("transformer.", "model.", 1): each for name, each in weights.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def lose_image_size(folder: Path) -> None:
    for name in ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            (folder / name).write_text((folder / name).read_text().replace(": 56", ": 112"))


@pytest.mark.parametrize(
    ("damage", "check", "told"),
    [
        (rename_weights, "weights", "weights are missing, which would begin at random.*model.emb"),
        (cut_weights, "recipe", r"model.safetensors has [\d,]+ of its [\d,]+ bytes"),
        (lose_image_size, "processor", "its pictures take 16 positions, and the model's 4"),
    ],
)
def test_a_damaged_model_is_told(asked, damage, check, told):
    damage(asked.parent / "model")
    found = checks(asked)[check]
    assert found.verdict == "fails" and found.cure
    assert re.search(told, found.found), found


def test_a_small_disk_and_rows_that_cannot_be_used_are_told(asked, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    (tmp_path / "bad.jsonl").write_text('{"messages": [], "images": []}\n')
    found = checks(asked, f"data.train={tmp_path / 'bad.jsonl'}")
    assert found["data"].verdict == "fails" and "bad.jsonl:1: " in found["data"].found
    found = checks(asked)
    assert found["disk (out)"].verdict == "fails" and found["data"].verdict == "ok"
    assert "1.0 kB are free there, and the model (" in found["disk (out)"].found


def test_a_folder_that_another_run_holds_is_told_and_left_as_it_is(asked, tmp_path):
    with locked(tmp_path / "out"):
        before = (tmp_path / "out" / "run.lock").read_bytes()
        found = checks(asked)["folder (out)"]
        assert found.verdict == "fails" and "another run writes to" in found.found
        assert (tmp_path / "out" / "run.lock").read_bytes() == before
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "model.safetensors").touch()
    assert checks(asked)["folder (out)"].verdict == "fails"


def test_memory_that_does_not_suffice_is_told(asked, monkeypatch):
    """An estimate may be a tenth too much: what is that near is a warning."""
    needed, compare = [], of_recipe._compare_memory
    monkeypatch.setattr(
        of_recipe, "_compare_memory", lambda *given: needed.append(given[1]) or compare(*given)
    )
    checks(asked)
    for room, verdict in ((0.5, "fails"), (0.95, "warning"), (1.1, "ok")):
        monkeypatch.setattr(ram, "free_ram", lambda room=room: room * needed[0])
        found = checks(asked)["memory of a step"]
        assert found.verdict == verdict
        assert verdict == "ok" or "lora_lm, qlora" in found.cure
