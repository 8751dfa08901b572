"""The summary of a run that is printed before its first step."""

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
from ..terminal_text import format_bytes, pluralize
from .plan import Plan
from .schedule import schedule_warnings

MAX_SAMPLE_CHARACTERS = 1500
MAX_LEARNING_RATE = 1e-2  # far above the rates that train a model of any size
# What each policy of activation checkpointing recomputes; "every N" recomputes each Nth layer.
RECOMPUTED = {
    "none": "nothing",
    "linear": "elementwise operations",
    "selective": "elementwise operations and wide linear layers",
    "attention": "all but attention",
    "full": "everything",
}


def describe_plan(plan: Plan, checked: CheckedData) -> str:
    """Return the summary: data, steps, trained weights, devices, memory, disk, and one sample."""
    options, config = plan.options, load_model_config(plan.base)
    stage = options.zero_stage
    device = "CPU" if plan.placement.on_cpu else find_gpus().devices[0].name
    entries = {
        "changed": _describe_changes(plan),
        "data": describe_data(checked, plan.is_streamed),
        "evaluation": _describe_evaluation(plan, checked),
        "steps": _describe_steps(plan),
        "trained": _describe_trained(plan, config),
        "device": f"{plan.placement.processes} x {device}, {_describe_precision(plan)}, "
        + (f"ZeRO-{stage}" if stage else "no ZeRO"),
        "engine": describe_engine(plan),
        "memory": describe_memory(plan),
        "optimizer": _describe_offloaded(plan, config),
        "disk": _describe_disk(plan),
    }
    lines = [f"{name:<12}{text}" for name, text in entries.items() if text]
    lines += [f"{'warning':<12}{text}" for text in find_warnings(plan)]
    lines += [f"{'warning':<12}{text}" for text in checked.find_warnings()]
    lines.append("the first sample, with its supervised tokens between [[ and ]]:")
    lines.append(show_sample(load_processor(plan.base), checked.conversations()[0]))
    return "\n".join(lines)


def show_sample(processor: ChatGLMProcessor, conversation: Sequence[dict]) -> str:
    """Return the text of a conversation as the model gets it.

    Supervised tokens are between ``[[`` and ``]]``. An image is shown as its number of tokens.
    """
    batch = ConversationCollator(processor)([list(conversation)])
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    markers = ["<|begin_of_image|>", "<|end_of_image|>"]
    begin, end = processor.tokenizer.convert_tokens_to_ids(markers)
    kinds, in_image = [], False  # of each token: whether it is of an image, and supervised
    for token, label in zip(ids, labels, strict=True):
        in_image = in_image and token != end
        kinds.append((in_image, label != IGNORE_INDEX))
        in_image = in_image or token == begin
    sample = ""
    for (is_image, is_supervised), indices in groupby(range(len(ids)), key=kinds.__getitem__):
        span = [ids[index] for index in indices]
        text = processor.decode(span, spaces_between_special_tokens=False)
        if is_image:
            text = f"({len(span):,} image tokens)"
        sample += f"[[{text}]]" if is_supervised else text
    if len(sample) > MAX_SAMPLE_CHARACTERS:
        sample = f"{sample[:MAX_SAMPLE_CHARACTERS]} ... ({len(ids):,} tokens)"
    return "\n".join("  " + line for line in sample.split("\n"))


def _describe_precision(plan: Plan) -> str:
    """Return the precision, and if the recipe left it open, the reason and the recipe's field."""
    reason = plan.precision_reason
    return plan.options.precision + (f" ({reason}; engine.precision)" if reason else "")


def _describe_changes(plan: Plan) -> str:
    """Describe the accepted changes of the rows since the checkpoint."""
    if not plan.changes:
        return ""
    lines = [f"the data has changed since {plan.checkpoint} was written:"]
    lines += [f"- {change}" for change in plan.changes]
    lines.append(
        "the order of the rows depends on the seed and on their number: if the number differs, "
        "some rows of the interrupted epoch may come twice and others not at all"
    )
    return "\n  ".join(lines)


def describe_data(checked: CheckedData, is_streamed: bool) -> str:
    """Describe the size of the checked training data."""
    counts = checked.counts
    samples, images = pluralize(counts.samples, "sample"), pluralize(counts.images, "image")
    tokens = f"{pluralize(counts.tokens, 'token')}, {counts.supervised:,} of them supervised"
    text = f"{samples}, {images}; {tokens}"
    if is_streamed:
        text = f"a stream; checked before training: {text}"
    return text + (f"; {pluralize(checked.skipped, 'row')} skipped" if checked.skipped else "")


def _describe_evaluation(plan: Plan, checked: CheckedData) -> str:
    if checked.eval is None:
        return "none: data.eval is not set"
    schedule = f"every {pluralize(plan.arguments['eval_steps'], 'step')} and at the end"
    if plan.arguments["eval_strategy"] == "no":
        schedule = "never"
    return f"{schedule}, on {pluralize(checked.eval.counts.samples, 'sample')}"


def _describe_steps(plan: Plan) -> str:
    text = f"{plan.steps:,}"
    if not plan.is_streamed:
        epochs = plan.steps / plan.steps_per_epoch
        text += f", {plan.steps_per_epoch:,} an epoch: {epochs:.2f} epochs"
    if plan.ignored_epochs is not None:
        text += f" (max_steps overrides num_train_epochs, which is {plan.ignored_epochs:g})"
    return (
        f"{text}; effective batch {plan.effective_batch} (per_device_train_batch_size "
        f"{plan.arguments['per_device_train_batch_size']} x gradient_accumulation_steps "
        f"{plan.arguments['gradient_accumulation_steps']} x "
        f"{pluralize(plan.placement.processes, 'process')})"
    )


def _describe_trained(plan: Plan, config: ChatGLMConfig) -> str:
    num_trained, total = count_trained(config, plan.options), sum(count_parameters(config))
    rates = plan.loop.rates or {"": plan.arguments["learning_rate"]}
    in_words = ", ".join(f"{part} {rate:g}".strip() for part, rate in rates.items())
    return f"{plan.options.trained}: {num_trained:,} of {total:,} weights; learning rate {in_words}"


def describe_engine(plan: Plan) -> str:
    """Describe the engine's choices, and the length of the sequences that they were made for."""
    options = plan.options
    parts = {"vision tower": options.tower, "language model": options.language}
    recomputed = [
        f"{RECOMPUTED.get(policy, 'each Nth layer')} ({policy}) of the {part}"
        for part, policy in parts.items()
    ]
    return (
        f"recomputes {' and '.join(recomputed)}; offload {str(options.offload).lower()}, compile "
        f"{str(options.compile).lower()}, for sequences of up to "
        f"{pluralize(plan.batch.sequence_length, 'token')}"
    )


def describe_memory(plan: Plan) -> str:
    """Describe the estimated peak memory of a GPU; return "" on a CPU, which has no estimate."""
    if not plan.free_bytes:
        return ""
    available = (plan.free_bytes - NON_TORCH_BYTES) / GIB
    text = f"{plan.needed_bytes / GIB:.1f} GiB on each GPU, of {available:.1f} GiB that are free"
    return f"{text}: it may not suffice" if plan.is_tight else text


def _describe_offloaded(plan: Plan, config: ChatGLMConfig) -> str:
    """Describe the RAM that offloading takes on this machine; return "" without offloading."""
    needed = offloaded_bytes(config, plan.options) * plan.placement.local_process_share
    if not needed:
        return ""
    return (
        f"{format_bytes(needed)} of the machine's memory, of which {format_bytes(free_ram())} are "
        "free"
    )


def _describe_disk(plan: Plan) -> str:
    space = plan.disk_space
    text = f"{format_bytes(space.total)}: the model {format_bytes(space.model)}"
    if space.max_checkpoints == 1:
        text += f", one checkpoint of {format_bytes(space.checkpoint)}"
    elif space.max_checkpoints:
        text += f", {space.max_checkpoints} checkpoints at once of "
        text += f"{format_bytes(space.checkpoint)} each"
    if plan.arguments["save_strategy"] == "no":
        text += ", no checkpoints (trainer.save_steps)"
    return f"{text}; {format_bytes(space.free)} are free"


def find_warnings(plan: Plan) -> Iterator[str]:
    """Yield a line for each value that is most likely a mistake."""
    rate = plan.arguments["learning_rate"]
    if rate > MAX_LEARNING_RATE:
        yield (
            f"trainer.learning_rate is {rate:g}: AdamW changes a weight by up to this in a step, "
            "and most weights are below 0.1; usual rates are 1e-4 for LoRA, and 1e-5 for the "
            "model's own weights"
        )
    yield from schedule_warnings(plan.arguments)
    if plan.effective_batch > plan.num_rows and not plan.is_streamed:
        yield (
            f"the effective batch, {plan.effective_batch:,}, is larger than the number of rows, "
            f"{plan.num_rows:,}: an epoch is one step"
        )
