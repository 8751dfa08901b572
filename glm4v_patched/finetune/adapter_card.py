"""The model card beside trained adapters: their base, their training, and how to load them."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from ..atomic import write_atomically
from ..models.base import ModelSource
from .ending import saved_step_and_scores

CARD_FILE = "README.md"
VERSIONED = ("peft", "transformers", "torch")  # packages whose versions the card names
TEMPLATE = """
# LoRA adapters for glm-4v

Adapters (`{trained}`) for {base}, trained with glm4v-patched on {rows:,} rows, for {steps:,} steps.

{scores}

## Load them

{where}

```python
glm4v_patched.apply()  # after `import glm4v_patched`; replaces the code of the base model
model = AutoModelForCausalLM.from_pretrained({model}, trust_remote_code=True)
model = PeftModel.from_pretrained(model, "ADAPTERS")
```

```bash
glm4v-patched answer ADAPTERS --data questions.jsonl --out answers.jsonl
glm4v-patched merge ADAPTERS --out merged
```

## How they were trained

```yaml
{recipe}```

With {packages}. The terms of the base model's license for derived models apply to them.
"""


# Texts for a base model in a local folder. name_base replaces them by the base's id on the Hub.
NOT_ON_HUB, BASE_PLACEHOLDER = "a model that is not on the Hub", '"BASE"'
BASE_LOCATION = "`BASE` is a folder of the model; `training.json` has the digests of its files."
ADAPTERS_LOCATION = "`ADAPTERS` is this folder, or its id on the Hub."


def write_card(
    folder: Path, base: ModelSource, recipe: Mapping[str, Any], report: Mapping[str, Any], rows: int
) -> None:
    """Write the card of adapters, which replaces the empty one that peft has written.

    Args:
        folder: The folder of the adapters.
        base: The adapters' base model. The card has its id on the Hub, but never a local path.
        recipe: Values of the recipe that may be published (:attr:`job.Job.public_values`).
        report: Contents of ``training.json``.
        rows: Number of rows in an epoch.
    """
    _, scores = saved_step_and_scores(report)
    data = ModelCardData(
        library_name="peft",
        pipeline_tag="image-text-to-text",
        tags=["lora", "glm-4v", "glm4v-patched"],
    )
    results = ", ".join(
        f"{name.removeprefix('eval_')} {value:.4g}" for name, value in scores.items()
    )
    evaluated = f"On rows that were not trained on: {results}."
    text = TEMPLATE.format(
        trained=recipe["trained"],
        base=NOT_ON_HUB,
        rows=rows,
        steps=report["steps"]["done"],
        scores=evaluated if results else "They were not evaluated.",
        where=f"{ADAPTERS_LOCATION} {BASE_LOCATION}",
        model=BASE_PLACEHOLDER,
        recipe=yaml.safe_dump(dict(recipe), sort_keys=False),
        packages=", ".join(f"{name} {version(name)}" for name in VERSIONED),
    )
    card = f"---\n{data.to_yaml()}\n---\n{text}"
    if not Path(base.model).is_dir():
        card = name_base(card, base.model, base.revision or "main")
    write_atomically(folder / CARD_FILE, card)


def name_base(text: str, model: str, revision: str) -> str:
    """Return a card in which the base model is named by its id on the Hub and its commit."""
    card = ModelCard(text)
    data: Any = card.data
    data.base_model = model
    replacements = {
        NOT_ON_HUB: f"[{model}](https://huggingface.co/{model}) at `{revision}`",
        BASE_PLACEHOLDER: f'"{model}", revision="{revision}"',
        f" {BASE_LOCATION}": "",
    }
    for old, new in replacements.items():
        card.text = card.text.replace(old, new)
    return f"---\n{data.to_yaml()}\n---\n{card.text}"
