"""The model card: its metadata is correct, and its code and recipe run."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from PIL import Image

from tests.helpers import pages
from tests.helpers.local_hub import LocalHub
from tests.helpers.processes import cpu_environment, run_with_limit
from tests.helpers.publishable import NAME, ROOT, TAG, UPSTREAM, as_files


@pytest.fixture
def card(built) -> tuple[dict, str]:
    _, front, body = (built / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), body


def test_it_has_the_metadata_of_the_hub(card):
    data, body = card
    expected = {"license": "other", "license_name": "glm-4", "base_model": UPSTREAM}
    expected |= {"license_link": f"https://huggingface.co/{UPSTREAM}/blob/main/LICENSE"}
    expected |= {"base_model_relation": "finetune", "library_name": "transformers"}
    expected |= {"pipeline_tag": "image-text-to-text", "language": ["zh", "en"]}
    assert {name: data[name] for name in expected} == expected and "custom_code" in data["tags"]
    for wanted in ("Built with glm-4", "2406.12793", f'revision="{TAG}"', NAME, "`MODEL_LICENSE`"):
        assert wanted in body, wanted
    assert "{{" not in body and "{%" not in body and "requirements.txt" not in body
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = " ".join(f'"{package}"' for package in project["dependencies"])
    assert body.count(f"pip install {named}") == 3


def test_the_text_of_the_collection_fits():
    """The Hub's limits, as huggingface_hub's create_collection and its server give them."""
    page = (ROOT / "docs" / "publishing.md").read_text()
    [title] = re.findall(r'hf collections create "(.*?)"', page)
    [description] = re.findall(r'--description "(.*?)"', page)
    assert len(title) < 60 and 100 < len(description) <= 150


@pytest.fixture
def blocks(built, tmp_path, monkeypatch) -> list[str]:
    """The card's Python, with the folder in place of the repository, and an image."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 30), "red").save(tmp_path / "image.png")
    pinned = f'name, revision = "{NAME}", "{TAG}"'
    code = pages.blocks(built / "README.md", "python")
    assert all(pinned in block for block in code)
    return [block.replace(pinned, f'name, revision = "{built}", None') for block in code]


def succeed(command: list[str], folder: Path, **variables: str) -> None:
    """Run a command with empty caches and require success."""
    caches = {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    result = run_with_limit(command, 900, cpu_environment() | caches | variables)
    assert result.status == 0, result.output[-6000:]


@pytest.mark.slow
def test_its_recipe_trains_on_two_processes_from_the_hub(card, built, blocks, tmp_path):
    """As written, except for the steps; the saved adapters load as the card says."""
    recipe, line = re.findall(r"```(?:yaml|json)\n(.*?)\n```", card[1], re.DOTALL)
    (tmp_path / "recipe.yaml").write_text(recipe)
    (tmp_path / "train.jsonl").write_text(f"{line}\n" * 16)
    use = blocks[0].replace(f'"{built}", None', f'"{NAME}", "{TAG}"')
    (command,) = re.findall(r"`glm4v-patched (train .*?)`", card[1])
    one, other = re.findall(r"`([^`]*PeftModel[^`]*)`", card[1])
    answer = use.index("output_ids = ")
    script = 'import sys\nsys.modules["glm4v_patched"] = None  # cannot be imported\n'
    script += "\n".join([use[:answer], one, other, use[answer:]])
    script += "learned = [n for n, p in model.named_parameters() if 'lora_B' in n and p.any()]\n"
    (tmp_path / "loads.py").write_text(f"{script}assert len(learned) == 2, learned\n")
    with LocalHub() as hub:
        repository = hub.add_repository(NAME, as_files(built))
        repository.refs[TAG] = repository.head
        repository.add_commit({"config.json": b"no JSON"})
        online = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")} | hub.environment
        command += " trainer.max_steps=4 --device cpu"
        train = [sys.executable, "-m", "glm4v_patched.cli", *command.split()]
        for part in (train, [sys.executable, "loads.py"]):
            succeed(part, tmp_path, **online)
