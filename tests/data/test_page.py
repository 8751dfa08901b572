"""What docs/data.md shows can be read."""

import os
from pathlib import Path

import pytest
import yaml
from PIL import Image

from glm4v_patched.data.rows import read_conversations
from glm4v_patched.finetune.recipe.sections import Recipe
from tests.data.samples import turns
from tests.helpers.pages import ROOT, blocks
from tests.helpers.recipes import LEAST

PAGE = ROOT / "docs" / "data.md"
ROWS = blocks(PAGE, "json")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8)).save(tmp_path / "cat.png")
    return tmp_path


@pytest.mark.parametrize("rows", ROWS, ids=range(len(ROWS)))
def test_each_format_says_the_same(folder, rows):
    assert len(ROWS) == 8
    (folder / "rows").write_text(rows)
    expected = turns("What is it?", "A cat.", image=str(folder / "cat.png"))
    assert read_conversations(folder / "rows") == [expected]


def test_a_table_says_the_same(folder):
    code, *_ = blocks(PAGE, "python")
    exec(compile(code, str(PAGE), "exec"), {})
    ((question, answer),) = read_conversations(folder / "cats.parquet")
    image = Path(question["image"])
    assert [question, answer] == turns("What is it?", "A cat.", image=str(image))
    assert image.read_bytes() == (folder / "cat.png").read_bytes()


def test_its_recipe_can_be(folder):
    moved, of_columns, text, streamed = blocks(PAGE, "yaml")
    assert Recipe.from_values(LEAST | yaml.safe_load(of_columns)).data.ignore == ["id", "source"]
    assert Recipe.from_values(LEAST | yaml.safe_load(streamed)).data.is_streamed
    (source,) = Recipe.from_values(LEAST | yaml.safe_load(moved)).data.sources()
    assert (source.image_root, source.image_folder) == ("/mnt/old/images", "/data/images")
    recipe = Recipe.from_values(LEAST | yaml.safe_load(text))
    cats, dogs, birds = recipe.data.sources()
    assert (cats.weight, dogs.weight, birds.weight, recipe.data.eval) == (1, 2, 0.5, 0.05)
    assert dogs.image_folder == os.path.abspath("photos")
