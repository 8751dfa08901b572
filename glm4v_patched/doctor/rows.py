"""The first rows of a recipe's sets, as the model would learn them."""

from collections.abc import Iterator
from itertools import islice

from ..data.rows import Fault, place, read_rows
from ..finetune.recipe import Recipe
from ..finetune.recipe_model import base_of
from ..finetune.summary import show_sample
from ..models.base import pin
from ..models.loading import load_processor


def show_rows(recipe: Recipe, number: int) -> Iterator[tuple[str, bool]]:
    """The text of each, with what is learned between ``[[`` and ``]]`` or why it cannot be used,
    and whether it can.

    Raises:
        ValueError: a set or the model's tokenizer cannot be read.
    """
    processor = load_processor(pin(base_of(recipe)))
    for source in recipe.data.all_sources():
        for row in islice(read_rows(source), number):
            where = place(source, row.line)
            if isinstance(row, Fault):
                yield f"{where}: {row.text}", False
                continue
            pictures = "".join(f"\n  picture {picture}" for picture in row.pictures)
            try:
                yield f"{where}:{pictures}\n{show_sample(processor, row.messages)}", True
            except (ValueError, OSError) as error:
                yield f"{where}:{pictures}\n  {error}", False
