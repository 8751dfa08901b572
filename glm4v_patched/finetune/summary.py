"""What a run is going to do, in some lines, before its first step."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from ..data.check import CheckedData
from ..data.collate import ConversationCollator
from ..engine import memory_check
from ..engine.gpus import find_gpus
from ..engine.memory_plan import (
    OUTSIDE_TORCH,
    Batch,
    count_parameters,
    count_trained,
    decide,
    estimate,
    offloaded,
    within_limit,
)
from ..engine.options import PARTS, EngineOptions, parts_with_rates
from ..engine.ram import free_ram
from ..models.base import Base
from ..models.loading import load_processor
from ..models.placement import Placement
from ..printed import in_bytes
from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.loss import IGNORE_INDEX
from ..remote.processing_chatglm import ChatGLMProcessor
from .config import Recipe
from .config_trainer import eval_strategy, rate_of, steps_in_epoch, total_steps
from .config_warnings import find_doubts
from .disk import needed_space
from .worker import batch_of, options_of

GIB = 2**30
LONGEST_SAMPLE = 1500  # characters


class Plan(NamedTuple):
    """What is trained with, as far as it is known before training."""

    config: ChatGLMConfig
    options: EngineOptions
    """Decided."""
    batch: Batch
    steps: int
    free: float
    """Bytes of each GPU; 0 on a CPU."""


def plan(recipe: Recipe, base: Base, checked: CheckedData, placement: Placement) -> Plan:
    config = ChatGLMConfig.from_pretrained(base.model, revision=base.revision or "main")
    rows = checked.batch_rows()
    batch = batch_of(recipe, rows, placement.processes)
    steps = total_steps(recipe.trainer, len(rows.lengths), placement.processes)
    free = 0.0 if placement.on_cpu else float(min(gpu.memory for gpu in find_gpus().found))
    free = within_limit(free, recipe.engine.memory_limit)
    options = decide(config, options_of(recipe), batch, free, steps)
    return Plan(config, options, batch, steps, free)


def describe(
    recipe: Recipe, base: Base, checked: CheckedData, placement: Placement, planned: Plan
) -> str:
    """Rows, steps, what is trained, on what, with how much memory and disk, and one sample."""
    config, options, batch, steps, free = planned
    rows = len(checked.batch_rows().lengths)
    told = {
        "data": _describe_data(checked),
        "evaluation": _describe_evaluation(recipe, checked),
        "steps": _describe_steps(recipe, rows, steps, placement),
        "trained": _describe_trained(recipe, config, options),
        "device": _describe_device(recipe, placement),
        "kept": _describe_policies(options, batch),
        "memory": _describe_memory(estimate(config, options, batch), free),
        "optimizer": _describe_offloaded(planned, placement),
        "disk": _describe_disk(recipe, steps),
    }
    lines = [f"{name:<12}{text}" for name, text in told.items() if text]
    lines += [
        f"{'doubtful':<12}{text}" for text in find_doubts(recipe, rows, steps, placement.processes)
    ]
    sample = show_sample(load_processor(base), checked.conversations()[0])
    return "\n".join(
        [*lines, "the first row, with what is learned of it between [[ and ]]:", sample]
    )


def fault_of_memory(planned: Plan, placement: Placement) -> str:
    """What to tell the user where the training surely does not fit into this machine; empty where
    it may."""
    return memory_check.fault_of_memory(
        planned.config, planned.options, planned.batch, planned.free, placement.share
    )


def _offloaded_here(planned: Plan, placement: Placement) -> float:
    return offloaded(planned.config, planned.options) * placement.share


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


def _describe_data(checked: CheckedData) -> str:
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


def _describe_steps(recipe: Recipe, rows: int, steps: int, placement: Placement) -> str:
    asked = recipe.trainer
    per_epoch = steps_in_epoch(asked, rows, placement.processes)
    each, times = asked.per_device_train_batch_size, asked.gradient_accumulation_steps
    together = each * times * placement.processes
    return (
        f"{steps:,}, {per_epoch:,} an epoch: {steps / per_epoch:.2f} epochs; effective batch "
        f"{together} (per_device_train_batch_size {each} x gradient_accumulation_steps {times} x "
        f"{placement.processes} processes)"
    )


def _describe_trained(recipe: Recipe, config: ChatGLMConfig, options: EngineOptions) -> str:
    number, total = count_trained(config, options), sum(count_parameters(config))
    parts = [part for part in PARTS if part in parts_with_rates(recipe.trained)]
    rates = ", ".join(f"{part} {rate_of(recipe.trainer, part):g}" for part in parts)
    if not isinstance(recipe.trainer.learning_rate, dict):
        rates = f"{recipe.trainer.learning_rate:g}"
    return f"{recipe.trained}: {number:,} of {total:,} weights; learning rate {rates}"


def _describe_device(recipe: Recipe, placement: Placement) -> str:
    where = "CPU" if placement.on_cpu else find_gpus().found[0].name
    stage = recipe.engine.zero_stage
    zero = f"ZeRO-{stage}" if stage else "no ZeRO"
    return f"{placement.processes} x {where}, {recipe.engine.precision}, {zero}"


def _describe_policies(options: EngineOptions, batch: Batch) -> str:
    return (
        f"tower {options.tower}, language {options.language}, offload {options.offload}, compile "
        f"{options.compile} (for rows of up to {batch.row_length:,} positions)"
    )


def _describe_memory(needed: float, total: float) -> str:
    if not total:
        return ""  # of a machine's own it is not estimated
    room = (total - OUTSIDE_TORCH) / GIB
    told = f"{needed / GIB:.1f} GiB on each GPU, of {room:.1f} GiB if nothing else uses it"
    return told + (": it may not suffice" if needed / GIB > room else "")


def _describe_offloaded(planned: Plan, placement: Placement) -> str:
    if not (needed := _offloaded_here(planned, placement)):
        return ""
    return f"{in_bytes(needed)} of the machine's memory, of which {in_bytes(free_ram())} are free"


def _describe_disk(recipe: Recipe, steps: int) -> str:
    space = needed_space(recipe.flat(), steps)
    if space is None:
        return "not known for this model"
    told = f"{in_bytes(space.total)}: the model {in_bytes(space.model)}"
    if space.number:
        told += f", {space.number} checkpoints at once of {in_bytes(space.checkpoint)}"
    return f"{told}; {in_bytes(space.free)} are free"
