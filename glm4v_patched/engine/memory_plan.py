"""What training takes of a GPU's memory, estimated from the model's sizes, and what to keep there.

The estimates are arithmetic on a config: nothing is built. They rest on what layers keep
when they are compiled (:mod:`activation_checkpointing` says what each policy keeps) and were
compared with measured peaks at the real size (``tests/engine/test_memory_plan.py``).
"""

from dataclasses import dataclass, replace
from itertools import product

import torch

from ..remote.configuration_chatglm import ChatGLMConfig
from .options import ALL_WEIGHTS, trains_tower

GIB = 2**30
BF16, FP32 = 2, 4
# In the order in which ties in time are broken.
CANDIDATES = ("none", "linear", "every 4", "every 3", "every 2", "selective", "attention", "full")
# Weights that may stay gathered where not all do: some layers, and just enough to gather ahead.
SOME_GATHERED = (1e9, 5e8)
GATHERED_AHEAD = 2e8  # zero_config's prefetch bucket; as many are on their way back
# What a GPU keeps beside torch's own memory: the driver's context and NCCL's buffers.
OUTSIDE_TORCH = 2 * GIB
# Freed memory that gathers of weights still hold, and what the allocator cannot use.
ALLOCATOR_SHARE = 0.05
# What layers keep that are not compiled, against those that are: copies in fp32 among others.
NOT_COMPILED_TOWER, NOT_COMPILED_LANGUAGE = 1.65, 2.3
# Multiply-adds that a GPU does in the time it takes to move one channel of a token: 700 TFLOP/s
# against 4 TB/s, which is what both reach in training on an H200.
WORK_OF_A_CHANNEL = 175


@dataclass(frozen=True, kw_only=True)
class Training:
    """What decides the memory of one process. ``row_length`` is in positions, images included."""

    trained: str
    micro_batch: int
    row_length: int
    images_per_row: float = 1.0
    zero_stage: int = 3
    processes: int = 1
    optimizer: str = "adamw"
    offload: bool = False
    loss_chunk: int = 1024
    compiled: bool = True


@dataclass(frozen=True)
class Kept:
    """What stays between forward and backward: policies of :mod:`activation_checkpointing`, and
    how many weights of ZeRO-3 (:func:`deepspeed.config.zero_config`)."""

    tower: str
    language: str
    gathered: float = 1e9


def free_memory(limit: float | None = None) -> float:
    """Bytes free on this process's GPU, the least of all processes, as they have to choose alike.

    Args:
        limit: Of what torch may allocate, in bytes.

    Returns:
        0 without a GPU: of a machine's own memory nobody knows how much is for this.
    """
    if not torch.cuda.is_available():
        return 0.0
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    if limit is not None:
        free = min(free, limit + OUTSIDE_TORCH)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        least = torch.tensor(float(free), dtype=torch.float64, device="cuda")
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
        free = least.item()
    return float(free)


def choose_kept(config: ChatGLMConfig, training: Training, free: float, asked: Kept) -> Kept:
    """What to keep so that it fits into ``free`` bytes and least is computed again, then gathered.

    Args:
        asked: What is not "auto" (None for ``gathered``) stays as it is.

    Returns:
        Where nothing fits, what is smallest: the estimate may err, and an out-of-memory error is no
        worse than a refusal.
    """
    room = _room(free)
    towers = CANDIDATES if trains_tower(training.trained) else ("full",)
    gathered = (1e9,)
    if training.compiled:
        gathered = (_all_that_return(config, training), *SOME_GATHERED)
    choices = [
        Kept(*choice)
        for choice in product(
            towers if asked.tower == "auto" else (asked.tower,),
            CANDIDATES if asked.language == "auto" else (asked.language,),
            gathered if asked.gathered is None else (asked.gathered,),
        )
    ]
    sizes = {choice: estimate(config, training, choice) for choice in choices}
    fitting = [choice for choice in choices if sizes[choice] <= room]
    if not fitting:
        return min(choices, key=sizes.get)
    return min(fitting, key=lambda kept: (recomputed_flop(config, training, kept), -kept.gathered))


def choose_offload(config: ChatGLMConfig, training: Training, free: float) -> bool:
    """Whether training fits into ``free`` bytes only with the optimizer's states on the CPU."""
    smallest = Kept("full", "full", min(SOME_GATHERED))
    size = estimate(config, replace(training, offload=False), smallest)
    helped = estimate(config, replace(training, offload=True), smallest) < size
    return helped and size > _room(free)


def estimate(config: ChatGLMConfig, training: Training, kept: Kept) -> float:
    """Peak bytes that torch allocates in a step."""
    return (
        states(config, training)
        + activations(config, training, kept)
        + transient(config, training, kept)
    )


def count_parameters(config: ChatGLMConfig) -> tuple[int, int]:
    """Weights of the vision part (tower and adapter), and of the language model."""
    vision, width, inner = config.vision, config.hidden_size, config.ffn_hidden_size
    of_layer = 4 * vision.hidden_size**2 + 2 * vision.hidden_size * vision.intermediate_size
    of_layer += 9 * vision.hidden_size + vision.intermediate_size
    adapter = width * (4 * vision.hidden_size + width + 3 * inner)
    # Positions, patches with their bias, class token; biases and vectors at the adapter's width.
    embedded = vision.num_positions + vision.in_channels * vision.patch_size**2 + 2
    tower = (
        vision.num_hidden_layers * of_layer + adapter + embedded * vision.hidden_size + 5 * width
    )
    projected, fused = _projected(config)
    of_block = width * (projected + fused + 3 * inner + 2) + fused
    return tower, config.num_layers * of_block + (2 * config.padded_vocab_size + 1) * width


def states(config: ChatGLMConfig, training: Training) -> float:
    """Weights, gradients and optimizer between two steps; adapters are too small to count."""
    of_tower, of_language = count_parameters(config)
    shards = training.processes
    weights = BF16 * (of_tower + of_language) / (shards if training.zero_stage == 3 else 1)
    if training.trained == "qlora":
        embeddings = 2 * config.padded_vocab_size * config.hidden_size
        weights = BF16 * embeddings + (of_tower + of_language - embeddings) * 0.55
    trained = {"full": of_tower + of_language, "lm": of_language}.get(training.trained, 0)
    if training.offload:
        return weights
    gradients = BF16 * trained / (shards if training.zero_stage >= 2 else 1)
    moments = 2 * (1 if training.optimizer == "adamw_8bit" else FP32)
    optimizer = (FP32 + moments) * trained / shards
    if training.zero_stage == 0:
        optimizer = moments / 2 * trained  # moments in the weights' bf16, no fp32 copy
    return weights + gradients + optimizer


def activations(config: ChatGLMConfig, training: Training, kept: Kept) -> float:
    """What the layers keep from their forward pass to their backward."""
    tower_tokens, language_tokens = _tokens(config, training)
    of_tower, of_language = _channels(config, training)
    channels = config.num_layers * language_tokens * _of_layers(kept.language, of_language)
    if trains_tower(training.trained):
        of_layers = _of_layers(kept.tower, of_tower)
        channels += config.vision.num_hidden_layers * tower_tokens * of_layers
    return BF16 * channels


def transient(config: ChatGLMConfig, training: Training, kept: Kept) -> float:
    """What comes and goes within a step: gathered weights, one layer's insides, logits."""
    gathered = 0.0
    if training.zero_stage == 3:
        output_layer = config.padded_vocab_size * config.hidden_size
        gathered = min(kept.gathered + 2 * GATHERED_AHEAD, sum(count_parameters(config)))
        gathered = max(gathered, output_layer)
    tower_tokens, language_tokens = _tokens(config, training)
    of_tower, of_language = _channels(config, training)
    inside = max(tower_tokens * of_tower["none"], language_tokens * of_language["none"])
    logits = min(training.loss_chunk, language_tokens) * config.padded_vocab_size
    return BF16 * (gathered + inside) + (BF16 + 2 * FP32) * logits


def recomputed_flop(config: ChatGLMConfig, training: Training, kept: Kept) -> float:
    """Work of one step that is done a second time."""
    vision, width = config.vision, config.hidden_size
    side, inner = vision.hidden_size, vision.intermediate_size
    projected, fused = _projected(config)
    # Multiply-adds of a token in a layer; "linear": norms, rotations and activation functions.
    tower = {"none": 0, "linear": WORK_OF_A_CHANNEL * (4 * side + 2 * inner)}
    tower["selective"] = tower["linear"] + 3 * side**2 + side * inner
    tower["attention"] = tower["selective"] + side**2
    tower["full"] = tower["attention"] + 2 * vision.num_positions * side
    up = 2 * config.ffn_hidden_size
    language = {"none": 0, "linear": WORK_OF_A_CHANNEL * (4 * width + 2 * fused + 1.5 * up)}
    language["selective"] = language["linear"] + width * up
    language["attention"] = language["selective"] + width * (projected + fused)
    language["full"] = language["attention"] + training.row_length * projected
    if training.trained == "qlora":
        language["linear"] = language["selective"] = language["attention"]
    tower_tokens, language_tokens = _tokens(config, training)
    work = config.num_layers * language_tokens * _of_layers(kept.language, language)
    if trains_tower(training.trained):
        work += vision.num_hidden_layers * tower_tokens * _of_layers(kept.tower, tower)
    return 2 * work


def _all_that_return(config: ChatGLMConfig, training: Training) -> float:
    """How many weights have to stay gathered so that all do which are needed again in a step.

    DeepSpeed counts them forwards from the first layer of the language model if only that has a
    backward pass; a larger number keeps a frozen tower, too, until the step ends.
    """
    return ALL_WEIGHTS if trains_tower(training.trained) else float(count_parameters(config)[1])


def _room(free: float) -> float:
    """What of so many free bytes tensors can take."""
    return (free - OUTSIDE_TORCH) * (1 - ALLOCATOR_SHARE)


def _tokens(config: ChatGLMConfig, training: Training) -> tuple[float, int]:
    rows = training.micro_batch
    images = rows * training.images_per_row
    return images * config.vision.num_positions, rows * training.row_length


def _channels(config: ChatGLMConfig, training: Training) -> tuple[dict, dict]:
    """Channels that a layer of each tower keeps of a token, by policy."""
    side, inner = config.vision.hidden_size, config.vision.intermediate_size
    tower = {"full": side, "attention": 2 * side, "selective": 4 * side}
    # The input; query, key, value; what attention, dense and fc2 gave; what fc1 gave.
    tower["linear"] = tower["none"] = 7 * side + inner
    width, up, (projected, fused) = (
        config.hidden_size,
        2 * config.ffn_hidden_size,
        _projected(config),
    )
    language = {"full": width, "attention": width + projected}
    language["selective"] = 2 * width + projected + fused
    language["linear"] = language["selective"] + up
    language["none"] = language["linear"] + 2 * width
    if training.trained in ("full", "lm"):
        # Gradients of weights take the inputs of linear layers.
        tower["none"] += inner
        language["none"] += up // 2
    if training.trained == "qlora":  # policies do not know linear layers of 4 bits
        language["linear"] = language["selective"] = language["attention"]
    if not training.compiled:
        tower["none"] *= NOT_COMPILED_TOWER
        language["none"] *= NOT_COMPILED_LANGUAGE
    return tower, language


def _projected(config: ChatGLMConfig) -> tuple[int, int]:
    """Channels of the language model's queries, and of queries, keys and values."""
    queries = config.num_attention_heads * config.kv_channels
    return queries, queries + 2 * config.multi_query_group_num * config.kv_channels


def _of_layers(policy: str, values: dict) -> float:
    """The mean over layers; ``every N`` treats one in N as ``full`` and others as ``none``."""
    if not policy.startswith("every "):
        return values[policy]
    every = int(policy.split()[1])
    return values["full"] / every + values["none"] * (1 - 1 / every)
