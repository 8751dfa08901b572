"""What a run is going to do, in some lines, before its first step."""

from collections.abc import Sequence
from itertools import groupby

from ..data.check import CheckedData
from ..data.collate import ConversationCollator
from ..engine import memory_check
from ..engine.gpus import find_gpus
from ..engine.memory_plan import (
    OUTSIDE_TORCH,
    count_parameters,
    count_trained,
    offloaded,
)
from ..engine.options import PARTS, parts_with_rates
from ..engine.ram import free_ram
from ..models.loading import config_of, load_processor
from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.loss import IGNORE_INDEX
from ..remote.processing_chatglm import ChatGLMProcessor
from ..terminal_text import in_bytes
from .disk import needed_space
from .plan import Plan
from .recipe import Recipe
from .recipe_trainer import eval_strategy, rate_of, steps_in_epoch
from .recipe_warnings import find_doubts

GIB = 2**30
LONGEST_SAMPLE = 1500  # characters


def describe(plan: Plan, checked: CheckedData) -> str:
    """Rows, steps, what is trained, on what, with how much memory and disk, and one sample."""
    recipe, base = plan.recipe, plan.base
    config = config_of(base)
    told = {
        "data": describe_data(checked),
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
    doubts = find_doubts(recipe, plan.rows, plan.steps, plan.placement.processes)
    lines += [f"{'doubtful':<12}{text}" for text in doubts]
    sample = show_sample(load_processor(base), checked.conversations()[0])
    return "\n".join(
        [*lines, "the first row, with what is learned of it between [[ and ]]:", sample]
    )


def fault_of_memory(plan: Plan) -> str:
    """What to tell the user where the training surely does not fit into this machine; empty where
    it may."""
    base = plan.base
    config = config_of(base)
    return memory_check.fault_of_memory(
        config, plan.options, plan.batch, plan.free, plan.placement.share
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


def describe_data(checked: CheckedData) -> str:
    counts = checked.counts
    told = f"{counts.rows:,} rows, {counts.pictures:,} pictures; {counts.positions:,} positions, "
    told += f"of which {counts.learned:,} are learned"
    return told + (f"; {checked.skipped:,} rows left out" if checked.skipped else "")


def _describe_evaluation(recipe: Recipe, checked: CheckedData) -> str:
    if checked.eval is None:
        return "none: data.eval is not set"
    when = eval_strategy(recipe.trainer, True)
    often = {"no": "never", "epoch": "after every epoch"}
    told = often.get(when, f"every {recipe.trainer.eval_steps} steps and at the end")
    return f"{told}, on {checked.eval.counts.rows:,} rows"


def _describe_steps(plan: Plan) -> str:
    asked, processes = plan.recipe.trainer, plan.placement.processes
    per_epoch = steps_in_epoch(asked, plan.rows, processes)
    each, times = asked.per_device_train_batch_size, asked.gradient_accumulation_steps
    return (
        f"{plan.steps:,}, {per_epoch:,} an epoch: {plan.steps / per_epoch:.2f} epochs; effective "
        f"batch {each * times * processes} (per_device_train_batch_size {each} x "
        f"gradient_accumulation_steps {times} x {processes} processes)"
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
    space = needed_space(plan.recipe.flat(), plan.steps)
    if space is None:
        return "not known for this model"
    told = f"{in_bytes(space.total)}: the model {in_bytes(space.model)}"
    if space.number:
        told += f", {space.number} checkpoints at once of {in_bytes(space.checkpoint)}"
    return f"{told}; {in_bytes(space.free)} are free"
