"""What a run is going to do, in some lines, before its first step."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from ..data.check import CheckedData
from ..data.collate import ConversationCollator
from ..engine.gpus import find_gpus
from ..engine.memory_plan import (
    OUTSIDE_TORCH,
    count_parameters,
    count_trained,
    offloaded,
)
from ..engine.options import PARTS, is_lora, parts_with_rates
from ..engine.ram import free_ram
from ..models.loading import config_of, load_processor
from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.loss import IGNORE_INDEX
from ..remote.processing_chatglm import ChatGLMProcessor
from ..terminal_text import in_bytes
from .plan import Plan
from .recipe import Recipe
from .recipe_trainer import eval_strategy, highest_rate, rate_of, warmup

GIB = 2**30
LONGEST_SAMPLE = 1500  # characters
# Far above what trains a model of any size.
HIGHEST_RATE, MOST_DECAY, MOST_EPOCHS, MOST_SCALING = 1e-2, 1.0, 100, 64.0
NO_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")


def describe(plan: Plan, checked: CheckedData) -> str:
    """Rows, steps, what is trained, on what, with how much memory and disk, and one sample."""
    recipe, base = plan.recipe, plan.base
    config = config_of(base)
    told = {
        "changed": _describe_changes(plan),
        "data": describe_data(checked, recipe.data.is_streamed),
        "evaluation": _describe_evaluation(recipe, checked),
        "steps": _describe_steps(plan),
        "trained": _describe_trained(plan, config),
        "device": _describe_device(plan),
        "kept": describe_policies(plan),
        "memory": _describe_memory(plan),
        "optimizer": _describe_offloaded(plan, config),
        "disk": _describe_disk(plan),
    }
    lines = [f"{name:<12}{text}" for name, text in told.items() if text]
    doubts = find_doubts(plan)
    lines += [f"{'doubtful':<12}{text}" for text in doubts]
    sample = show_sample(load_processor(base), checked.conversations()[0])
    return "\n".join(
        [*lines, "the first row, with what is learned of it between [[ and ]]:", sample]
    )


def show_sample(processor: ChatGLMProcessor, conversation: Sequence[dict]) -> str:
    """A conversation as the model sees it, pictures as their number of positions."""
    collator = ConversationCollator(processor)
    batch = collator([list(conversation)])
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    inside = _places_of_pictures(processor, ids)
    parts = []
    for learned, run in groupby(range(len(ids)), key=lambda at: labels[at] != IGNORE_INDEX):
        text = ""
        for is_picture, places in groupby(run, key=inside.__getitem__):
            some = [ids[at] for at in places]
            if is_picture:
                text += f"({len(some):,} positions of a picture)"
            else:
                text += processor.decode(some, spaces_between_special_tokens=False)
        parts.append(f"[[{text}]]" if learned else text)
    shown = "".join(parts)
    if len(shown) > LONGEST_SAMPLE:
        shown = f"{shown[:LONGEST_SAMPLE]} ... ({len(ids):,} positions)"
    return "\n".join("  " + line for line in shown.split("\n"))


def _places_of_pictures(processor: ChatGLMProcessor, ids: list[int]) -> list[bool]:
    """Whether each id stands between those that begin and end a picture."""
    begin, end = processor.tokenizer.convert_tokens_to_ids(
        ["<|begin_of_image|>", "<|end_of_image|>"]
    )
    inside, is_inside = [], False
    for token in ids:
        is_inside = is_inside and token != end
        inside.append(is_inside)
        is_inside = is_inside or token == begin
    return inside


def _describe_changes(plan: Plan) -> str:
    """Of the rows since the checkpoint was written, and what becomes of their order."""
    if not plan.changes:
        return ""
    if plan.recipe.data.pack_to is not None:
        order = "conversations may be packed into other rows, in another order"
    elif any(" are gone" in change for change in plan.changes):
        order = (
            "the order of rows is drawn from the seed and their number: of the epoch that was "
            "stopped, some may come a second time and others not at all"
        )
    else:
        order = (
            "the order of places in the file stays as it was, as their number has not changed: the "
            "epoch that was stopped goes on with what stands there now"
        )
    told = f"the data has changed since {plan.checkpoint} was written:"
    return "\n  ".join([told, *(f"- {change}" for change in plan.changes)]) + f"\n  {order}"


def describe_data(checked: CheckedData, is_streamed: bool) -> str:
    counts = checked.counts
    told = "a stream, of which were looked at " if is_streamed else ""
    told += f"{counts.rows:,} rows, {counts.pictures:,} pictures; {counts.positions:,} positions, "
    told += f"of which {counts.learned:,} are learned"
    return told + (f"; {checked.skipped:,} rows left out" if checked.skipped else "")


def _describe_evaluation(recipe: Recipe, checked: CheckedData) -> str:
    if checked.eval is None:
        return "none: data.eval is not set"
    when = eval_strategy(recipe.trainer)
    often = {"no": "never", "epoch": "after every epoch"}
    told = often.get(when, f"every {recipe.trainer.eval_steps} steps and at the end")
    return f"{told}, on {checked.eval.counts.rows:,} rows"


def _describe_steps(plan: Plan) -> str:
    asked, told = plan.recipe.trainer, f"{plan.steps:,}"
    if not plan.recipe.data.is_streamed:
        epochs = plan.steps / plan.steps_an_epoch
        told += f", {plan.steps_an_epoch:,} an epoch: {epochs:.2f} epochs"
    return (
        f"{told}; effective batch {plan.effective_batch} (per_device_train_batch_size "
        f"{asked.per_device_train_batch_size} x gradient_accumulation_steps "
        f"{asked.gradient_accumulation_steps} x {plan.placement.processes} processes)"
    )


def _describe_trained(plan: Plan, config: ChatGLMConfig) -> str:
    recipe = plan.recipe
    number, total = count_trained(config, plan.options), sum(count_parameters(config))
    parts = [part for part in PARTS if part in parts_with_rates(recipe.trained)]
    rates = ", ".join(f"{part} {rate_of(recipe.trainer, part):g}" for part in parts)
    if not isinstance(recipe.trainer.learning_rate, dict):
        rates = f"{recipe.trainer.learning_rate:g}"
    return f"{recipe.trained}: {number:,} of {total:,} weights; learning rate {rates}"


def _describe_device(plan: Plan) -> str:
    where = "CPU" if plan.placement.on_cpu else find_gpus().found[0].name
    stage = plan.recipe.engine.zero_stage
    zero = f"ZeRO-{stage}" if stage else "no ZeRO"
    return f"{plan.placement.processes} x {where}, {plan.recipe.engine.precision}, {zero}"


def describe_policies(plan: Plan) -> str:
    options = plan.options
    return (
        f"tower {options.tower}, language {options.language}, offload {options.offload}, compile "
        f"{options.compile} (for rows of up to {plan.batch.row_length:,} positions)"
    )


def _describe_memory(plan: Plan) -> str:
    if not plan.free:
        return ""  # of a machine's own it is not estimated
    room = (plan.free - OUTSIDE_TORCH) / GIB
    told = f"{plan.needed / GIB:.1f} GiB on each GPU, of {room:.1f} GiB that are free"
    return told + (": it may not suffice" if plan.needed / GIB > room else "")


def _describe_offloaded(plan: Plan, config: ChatGLMConfig) -> str:
    if not (needed := offloaded(config, plan.options) * plan.placement.share):
        return ""
    return f"{in_bytes(needed)} of the machine's memory, of which {in_bytes(free_ram())} are free"


def _describe_disk(plan: Plan) -> str:
    space = plan.space
    told = f"{in_bytes(space.total)}: the model {in_bytes(space.model)}"
    if space.number:
        told += f", {space.number} checkpoints at once of {in_bytes(space.checkpoint)}"
    return f"{told}; {in_bytes(space.free)} are free"


def find_doubts(plan: Plan) -> Iterator[str]:
    """What is told of each such value."""
    recipe, trainer, steps = plan.recipe, plan.recipe.trainer, plan.steps
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
    if not recipe.data.is_streamed:  # else it is not known how many rows there are
        if plan.effective_batch > plan.rows:
            yield (
                f"the effective batch, {plan.effective_batch:,}, is larger than the number of "
                f"rows, {plan.rows:,}: an epoch is one step"
            )
        if (epochs := steps / plan.steps_an_epoch) > MOST_EPOCHS:
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
