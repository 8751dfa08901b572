"""What a run is going to do, in some lines, before its first step."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from ..data.check import CheckedData
from ..data.collate import ConversationCollator
from ..engine.gpus import find_gpus
from ..engine.memory_plan import (
    GIB,
    NON_TORCH_BYTES,
    count_parameters,
    count_trained,
    offloaded_bytes,
)
from ..engine.ram import free_ram
from ..models.loading import load_model_config, load_processor
from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.loss import IGNORE_INDEX
from ..remote.processing_chatglm import ChatGLMProcessor
from ..terminal_text import format_bytes
from .plan import Plan
from .schedule import schedule_warnings

LONGEST_SAMPLE = 1500  # characters
HIGHEST_RATE = 1e-2  # far above what trains a model of any size


def describe_plan(plan: Plan, checked: CheckedData) -> str:
    """Rows, steps, what is trained, on what, with how much memory and disk, and one sample."""
    options, config = plan.options, load_model_config(plan.base)
    processes, stage = plan.placement.processes, options.zero_stage
    where = "CPU" if plan.placement.on_cpu else find_gpus().devices[0].name
    told = {
        "changed": _describe_changes(plan),
        "data": describe_data(checked, plan.is_streamed),
        "evaluation": _describe_evaluation(plan, checked),
        "steps": _describe_steps(plan),
        "trained": _describe_trained(plan, config),
        "device": f"{processes} x {where}, {options.precision}, "
        + (f"ZeRO-{stage}" if stage else "no ZeRO"),
        "kept": describe_policies(plan),
        "memory": describe_memory(plan),
        "optimizer": _describe_offloaded(plan, config),
        "disk": _describe_disk(plan),
    }
    lines = [f"{name:<12}{text}" for name, text in told.items() if text]
    doubts = [*find_warnings(plan), *checked.find_warnings()]
    lines += [f"{'warning':<12}{text}" for text in doubts]
    lines.append("the first row, with what is learned of it between [[ and ]]:")
    lines.append(show_sample(load_processor(plan.base), checked.conversations()[0]))
    return "\n".join(lines)


def show_sample(processor: ChatGLMProcessor, conversation: Sequence[dict]) -> str:
    """A conversation as the model sees it, images as their number of positions."""
    batch = ConversationCollator(processor)([list(conversation)])
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    marks = ["<|begin_of_image|>", "<|end_of_image|>"]
    begin, end = processor.tokenizer.convert_tokens_to_ids(marks)
    kinds, in_image = [], False
    for token, label in zip(ids, labels, strict=True):
        in_image = in_image and token != end
        kinds.append((in_image, label != IGNORE_INDEX))
        in_image = in_image or token == begin
    shown = ""
    for (is_image, is_learned), places in groupby(range(len(ids)), key=kinds.__getitem__):
        some = [ids[at] for at in places]
        text = processor.decode(some, spaces_between_special_tokens=False)
        if is_image:
            text = f"({len(some):,} positions of an image)"
        shown += f"[[{text}]]" if is_learned else text
    if len(shown) > LONGEST_SAMPLE:
        shown = f"{shown[:LONGEST_SAMPLE]} ... ({len(ids):,} positions)"
    return "\n".join("  " + line for line in shown.split("\n"))


def _describe_changes(plan: Plan) -> str:
    """Of the rows since the checkpoint was written, and what becomes of their order."""
    if not plan.changes:
        return ""
    told = [f"the data has changed since {plan.checkpoint} was written:"]
    told += [f"- {change}" for change in plan.changes]
    told.append(
        "the order of rows is drawn from the seed and their number: where that is another, some "
        "rows of the epoch that was stopped may come a second time and others not at all"
    )
    return "\n  ".join(told)


def describe_data(checked: CheckedData, is_streamed: bool) -> str:
    counts = checked.counts
    told = "a stream, of which were looked at " if is_streamed else ""
    told += f"{counts.samples:,} rows, {counts.images:,} images; {counts.tokens:,} positions, "
    told += f"of which {counts.supervised:,} are learned"
    return told + (f"; {checked.skipped:,} rows left out" if checked.skipped else "")


def _describe_evaluation(plan: Plan, checked: CheckedData) -> str:
    if checked.eval is None:
        return "none: data.eval is not set"
    told = f"every {plan.arguments['eval_steps']} steps and at the end"
    if plan.arguments["eval_strategy"] == "no":
        told = "never"
    return f"{told}, on {checked.eval.counts.samples:,} rows"


def _describe_steps(plan: Plan) -> str:
    told = f"{plan.steps:,}"
    if not plan.is_streamed:
        epochs = plan.steps / plan.steps_an_epoch
        told += f", {plan.steps_an_epoch:,} an epoch: {epochs:.2f} epochs"
    return (
        f"{told}; effective batch {plan.effective_batch} (per_device_train_batch_size "
        f"{plan.arguments['per_device_train_batch_size']} x gradient_accumulation_steps "
        f"{plan.arguments['gradient_accumulation_steps']} x {plan.placement.processes} processes)"
    )


def _describe_trained(plan: Plan, config: ChatGLMConfig) -> str:
    number, total = count_trained(config, plan.options), sum(count_parameters(config))
    rates = plan.loop.rates or {"": plan.arguments["learning_rate"]}
    told = ", ".join(f"{part} {rate:g}".strip() for part, rate in rates.items())
    return f"{plan.options.trained}: {number:,} of {total:,} weights; learning rate {told}"


def describe_policies(plan: Plan) -> str:
    options = plan.options
    return (
        f"tower {options.tower}, language {options.language}, offload {options.offload}, compile "
        f"{options.compile} (for rows of up to {plan.batch.sequence_length:,} positions)"
    )


def describe_memory(plan: Plan) -> str:
    if not plan.free:
        return ""  # of a machine's own it is not estimated
    room = (plan.free - NON_TORCH_BYTES) / GIB
    told = f"{plan.needed / GIB:.1f} GiB on each GPU, of {room:.1f} GiB that are free"
    return told + ": it may not suffice" * plan.is_tight


def _describe_offloaded(plan: Plan, config: ChatGLMConfig) -> str:
    if not (needed := offloaded_bytes(config, plan.options) * plan.placement.share):
        return ""
    return f"{format_bytes(needed)} of the machine's memory, of which {format_bytes(free_ram())} are free"


def _describe_disk(plan: Plan) -> str:
    space = plan.space
    told = f"{format_bytes(space.total)}: the model {format_bytes(space.model)}"
    if space.number:
        told += f", {space.number} checkpoints at once of {format_bytes(space.checkpoint)}"
    return f"{told}; {format_bytes(space.free)} are free"


def find_warnings(plan: Plan) -> Iterator[str]:
    """What is told of values that are most likely mistakes."""
    rate = plan.arguments["learning_rate"]
    if rate > HIGHEST_RATE:
        yield (
            f"trainer.learning_rate is {rate:g}: AdamW moves a weight by up to that "
            "in a step, and most are below 0.1; usual are 1e-4 for LoRA and 1e-5 for the weights "
            "themselves"
        )
    yield from schedule_warnings(plan.arguments)
    if plan.effective_batch > plan.rows and not plan.is_streamed:
        yield (
            f"the effective batch, {plan.effective_batch:,}, is larger than the number of rows, "
            f"{plan.rows:,}: an epoch is one step"
        )
