"""The card beside adapters that were trained: what they are of, what was done, how to load them."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from ..atomic import write_atomically
from ..models.base import ModelSource
from .ending import saved

CARD_FILE = "README.md"
PACKAGES = ("peft", "transformers", "torch")
TEXT = """
# LoRA adapters for glm-4v

Adapters (`{trained}`) for {base}, trained with glm4v-patched on {rows:,} rows, for {steps:,} steps.

{scores}

## Load them

{where}

```python
glm4v_patched.apply()  # after `import glm4v_patched`: the base gets code that runs
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

With {packages}. What the license of the base model says of models made from it holds here, too.
"""


# Where the base is a folder of somebody's: it is named when the adapters are built for the Hub.
NOT_ON_HUB, BASE_PLACEHOLDER = "a model that is not on the Hub", '"BASE"'
BASE_LOCATION = "`BASE` is a folder of the model; `training.json` has the digests of its files."
ADAPTERS_LOCATION = "`ADAPTERS` is this folder, or its id on the Hub."


def write_card(
    folder: Path, base: ModelSource, shown: Mapping[str, Any], report: Mapping[str, Any], rows: int
) -> None:
    """Write it in place of the empty one that peft leaves.

    Args:
        shown: Of :class:`job.Job`.
        base: Under the adapters. One that is a folder is not named: it is nothing to others.
        report: ``training.json``.
        rows: That were learned in an epoch.
    """
    _, scores = saved(report)
    data = ModelCardData(
        library_name="peft",
        pipeline_tag="image-text-to-text",
        tags=["lora", "glm-4v", "glm4v-patched"],
    )
    told = ", ".join(f"{name.removeprefix('eval_')} {value:.4g}" for name, value in scores.items())
    text = TEXT.format(
        trained=shown["trained"],
        base=NOT_ON_HUB,
        rows=rows,
        steps=report["steps"]["done"],
        scores=f"On rows that were not trained on: {told}." if told else "They were not evaluated.",
        where=f"{ADAPTERS_LOCATION} {BASE_LOCATION}",
        model=BASE_PLACEHOLDER,
        recipe=yaml.safe_dump(dict(shown), sort_keys=False),
        packages=", ".join(f"{name} {version(name)}" for name in PACKAGES),
    )
    card = f"---\n{data.to_yaml()}\n---\n{text}"
    if not Path(base.model).is_dir():
        card = name_base(card, base.model, base.revision or "main")
    write_atomically(folder / CARD_FILE, card)


def name_base(text: str, model: str, revision: str) -> str:
    """A card with its base, which it does not name yet: an id of the Hub, and a commit."""
    card = ModelCard(text)
    data: Any = card.data
    data.base_model = model
    named = f"[{model}](https://huggingface.co/{model}) at `{revision}`"
    new = {NOT_ON_HUB: named, BASE_PLACEHOLDER: f'"{model}", revision="{revision}"', f" {BASE_LOCATION}": ""}
    for old, shown in new.items():
        card.text = card.text.replace(old, shown)
    return f"---\n{data.to_yaml()}\n---\n{card.text}"
