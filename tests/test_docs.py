"""README and docs: links lead somewhere, examples are read, figures are measured."""

import json
import re

import pytest
import yaml

from glm4v_patched.bench.table import read_measurements
from glm4v_patched.finetune.recipe.sections import Recipe
from glm4v_patched.finetune.recipe.shipped import FOLDER
from tests.helpers.pages import DOCS, PAGES, README, ROOT, blocks

CARD = ROOT / "hub_upload" / "MODEL_CARD.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_are_there(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_linked_from_the_readme():
    linked = set(re.findall(r"\]\(docs/(\w+\.md)\)", README.read_text("utf-8")))
    assert linked == {page.name for page in DOCS}


RECIPES = [
    (page, number)
    for page in [*PAGES, CARD]
    for number, block in enumerate(blocks(page, "yaml"))
    if "trainer:" in block
]
assert {page.name for page, _ in RECIPES} >= {"README.md", "training.md"}


@pytest.mark.parametrize(
    ("page", "number"), RECIPES, ids=lambda value: getattr(value, "name", None)
)
def test_recipes_are_read(page, number, tmp_path):
    (tmp_path / "recipe.yaml").write_text(blocks(page, "yaml")[number])
    assert Recipe.read(tmp_path / "recipe.yaml").trainer.per_device_train_batch_size > 0


def test_what_you_need_is_measured():
    """Each row of README's table is one of the results on its card, of its recipe or the bench."""
    folder = ROOT / "docs" / "benchmarks"
    files = [*folder.glob("bench_*.json"), *folder.glob("fp8_*.json")]
    files.append(folder / "zero3_h100_x2.json")
    results = [row for file in files for row in read_measurements(file)]
    for row in json.loads((folder / "recipes_h200_x2.json").read_text()):
        name = row["recipe"].replace("lora_both", "lora_all")  # its name when it was measured
        recipe = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
        results.append(row | {"workload": recipe["trained"]})
    results = [row for row in results if "error" not in row]
    lines = re.findall(
        r"^\| (\d) x (\d+) GB \| `(\w+)`(.*)\| ([\d.]+) \|$", README.read_text("utf-8"), re.M
    )
    assert len(lines) >= 10
    for gpus, gigabytes, trained, words, speed in lines:
        assert any(
            row["workload"] == trained
            and row["gpus"] == int(gpus)
            and ("H100" if "on H100s" in words else "H200") in row["device"]
            and bool(row.get("fp8")) == ("fp8" in words)
            and f"{row['samples_per_s_per_gpu']:.3g}" == speed
            and row["peak_reserved_gib"] < int(gigabytes)
            for row in results
        ), (gpus, gigabytes, trained, speed)


def test_the_notebook_has_no_outputs_and_trains_the_tiny_model():
    """The stored notebook has no outputs; nox's session ``notebook`` runs it."""
    cells = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code)
    assert "REAL = False\n" in code[1]["source"]
