"""Values of a recipe that are allowed, and most likely mistakes."""

from collections.abc import Iterator

from ..engine.options import is_lora
from .recipe import Recipe
from .recipe_trainer import highest_rate, steps_in_epoch, warmup

# Far above what trains a model of any size.
HIGHEST_RATE, MOST_DECAY, MOST_EPOCHS, MOST_SCALING = 1e-2, 1.0, 100, 64.0
NO_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")


def find_doubts(recipe: Recipe, rows: int, steps: int, processes: int) -> Iterator[str]:
    """What is told of each such value.

    Args:
        rows: That are trained on; of packed rows, those that samples are packed to.
        steps: Of the run.
    """
    trainer = recipe.trainer
    if (rate := highest_rate(trainer)) > HIGHEST_RATE:
        yield (
            f"trainer.learning_rate is {rate:g}: AdamW moves a weight by up to that in a step, and "
            "most are below 0.1; usual are 1e-4 for LoRA and 1e-5 for the weights themselves"
        )
    if trainer.weight_decay > MOST_DECAY:
        yield (
            f"trainer.weight_decay is {trainer.weight_decay:g}: a step takes that times the "
            "learning rate from each weight; usual are 0 to 0.1"
        )
    warm = warmup(trainer, steps)
    if warm >= steps > 1 and trainer.lr_scheduler_type not in NO_WARMUP:
        yield (
            f"trainer.warmup_steps is {warm:,} and the run has {steps:,} steps: its learning rate "
            f"ends at {steps / warm:.0%} of trainer.learning_rate"
        )
    each = trainer.per_device_train_batch_size * trainer.gradient_accumulation_steps * processes
    if each > rows:
        yield (
            f"the effective batch, {each:,}, is larger than the number of rows, {rows:,}: an epoch "
            "is one step"
        )
    epochs = steps / steps_in_epoch(trainer, rows, processes)
    if epochs > MOST_EPOCHS:
        yield f"each row is learned {epochs:,.0f} times"
    yield from _doubts_of_lora(recipe)
    if isinstance(recipe.data.eval, float) and recipe.data.eval > 0.5:
        yield f"data.eval is {recipe.data.eval:g}: most rows are held out and not learned"


def _doubts_of_lora(recipe: Recipe) -> Iterator[str]:
    lora = recipe.lora
    if lora.alpha is None or not is_lora(recipe.trained):
        return
    scaling = lora.alpha / (lora.rank**0.5 if lora.use_rslora else lora.rank)
    if scaling > MOST_SCALING:
        yield (
            f"lora.alpha is {lora.alpha:,} and lora.rank {lora.rank}: what adapters add is "
            f"multiplied by {scaling:,.0f}; usual are 1 to 4"
        )
