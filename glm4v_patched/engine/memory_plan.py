"""Estimates the GPU memory of a training from the model's sizes, and chooses settings that fit.

The estimates are arithmetic on a config; no model is built. They use what compiled layers keep
(:mod:`activation_policies` says what each policy keeps) and were compared with measured peaks at
the real size (``tests/engine/test_memory_plan.py``).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch

from ..remote.configuration_chatglm import ChatGLMConfig
from .activation_policies import POLICIES, LayerSizes, Policy, policies_of_layers
from .options import (
    ALL_WEIGHTS,
    LANGUAGE_TARGETS,
    TOWER_TARGETS,
    EngineOptions,
    is_lora,
    parts_trained,
    trains_tower,
)

GIB = 2**30
BF16, FP32 = 2, 4
# In the order in which ties in time are broken.
CANDIDATES = ("none", "linear", "every 4", "every 3", "every 2", "selective", "attention", "full")
# Weights that may stay gathered where not all do: some layers, and just enough to gather ahead.
SOME_GATHERED = (1e9, 5e8)
GATHERED_AHEAD = 2e8  # deepspeed_config's prefetch bucket; as many are on their way back
# What a GPU keeps beside torch's own memory: the driver's context and NCCL's buffers.
OUTSIDE_TORCH = 2 * GIB
# Freed memory that gathers of weights still hold, and what the allocator cannot use.
ALLOCATOR_SHARE = 0.05
# Of all weights: smaller adapters take less than the estimate errs.
ADAPTERS_THAT_COUNT = 0.001
# What layers keep that are not compiled, against those that are: copies in fp32 among others.
NOT_COMPILED_TOWER, NOT_COMPILED_LANGUAGE = 1.65, 2.3
# Linear layers of 4 bits, of which all that they return is counted, keep nothing more.
NOT_COMPILED_QLORA = 1.5
# Multiply-adds that a GPU does in the time it takes to move one channel of a token: 700 TFLOP/s
# against 4 TB/s, which is what both reach in training on an H200.
WORK_OF_A_CHANNEL = 175
# Compiling takes about a minute (docs/benchmarks/loss_curve.json: the first step) and saves from
# 0.2 s of a step on (docs/performance.md: 1.35 s instead of 1.82 s).
STEPS_THAT_PAY_FOR_COMPILING = 300


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a step of one process is given; lengths in positions, images included."""

    rows: int
    row_length: int  # of the longest row
    images_per_row: float = 1.0
    processes: int = 1  # that take part in the step, each with such a batch


def free_memory(limit: float | None = None) -> float:
    """Bytes free on this process's GPU, the least of all processes, as they have to choose alike;
    0 without a GPU. ``limit``: GiB that torch may allocate."""
    if not torch.cuda.is_available():
        return 0.0
    free = within_limit(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved(), limit)
    if not torch.distributed.is_initialized():
        return float(free)
    least = torch.tensor(float(free), dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
    return least.item()


def within_limit(free: float, limit: float | None) -> float:
    """Of so many free bytes of a GPU, those that are to be used; ``limit`` in GiB, of torch's."""
    return free if limit is None else min(free, limit * GIB + OUTSIDE_TORCH)


def decide(
    config: ChatGLMConfig,
    options: EngineOptions,
    batch: Batch,
    free: float,
    steps: int | None = None,
) -> EngineOptions:
    """The options with a decision for all that is "auto": what fits into ``free`` bytes and is
    fastest, so that least is computed again, then gathered. Where nothing fits, what is smallest:
    the estimate may err, and an out-of-memory error is no worse than a refusal.

    Args:
        free: Of each GPU (:func:`free_memory`), 0 for none.
        steps: How many will be trained; None for so many that compiling pays.
    """
    room = (free - OUTSIDE_TORCH) * (1 - ALLOCATOR_SHARE)
    if options.compile == "auto":
        pays = steps is None or steps >= STEPS_THAT_PAY_FOR_COMPILING
        # Layers of 4 bits are bitsandbytes's, which are not compiled.
        options = replace(options, compile=free > 0 and pays and options.trained != "qlora")
    if options.offload == "auto":
        may = free > 0 and options.zero_stage > 0 and options.optimizer != "adamw_8bit"
        smallest = replace(
            options,
            tower="full",
            language="full",
            stage3_max_live_parameters=min(SOME_GATHERED),
            keep_transposed=False,
        )
        without, with_it = (
            estimate(config, replace(smallest, offload=offload), batch) for offload in (False, True)
        )
        options = replace(options, offload=may and without > max(room, with_it))
    choices = list(_choices(config, options))
    sizes = {choice: estimate(config, choice, batch) for choice in choices}
    fitting = [choice for choice in choices if sizes[choice] <= room]
    if not fitting:
        return min(choices, key=sizes.__getitem__)

    def cost(choice: EngineOptions) -> tuple[float, bool, float]:
        again = recomputed_flop(config, choice, batch)
        return again, not choice.keep_transposed, -_live(choice)

    return min(fitting, key=cost)


def _choices(config: ChatGLMConfig, options: EngineOptions) -> Iterator[EngineOptions]:
    towers = CANDIDATES if trains_tower(options.trained) else ("full",)
    gathered: tuple[float, ...] = (1e9,)
    if options.compile:
        # All that is needed again in a step. DeepSpeed counts weights forwards from the first layer
        # of the language model if only that has a backward pass; a larger number keeps a frozen
        # tower, too, until the step ends.
        of_language = float(count_parameters(config)[1])
        gathered = (ALL_WEIGHTS if trains_tower(options.trained) else of_language, *SOME_GATHERED)
    asked = options.stage3_max_live_parameters
    for tower, language, live, transposed in product(
        towers if options.tower == "auto" else (options.tower,),
        CANDIDATES if options.language == "auto" else (options.language,),
        gathered if asked is None else (asked,),
        (True, False) if options.keeps_transposed else (options.keep_transposed,),
    ):
        yield replace(
            options,
            tower=tower,
            language=language,
            stage3_max_live_parameters=live,
            keep_transposed=transposed,
        )


def _live(options: EngineOptions) -> float:
    assert options.stage3_max_live_parameters is not None, "decide() comes first"
    return options.stage3_max_live_parameters


def estimate(config: ChatGLMConfig, options: EngineOptions, batch: Batch) -> float:
    """Peak bytes that torch allocates in a step, of options that are decided."""
    return (
        states(config, options, batch)
        + activations(config, options, batch)
        + transient(config, options, batch)
    )


def count_parameters(config: ChatGLMConfig) -> tuple[int, int]:
    """Weights of the vision part (tower and adapter), and of the language model."""
    vision, width = config.vision, config.hidden_size
    tower, language = linear_layers(config)
    of_layer = sum(map(prod, tower.values())) + 9 * vision.hidden_size + vision.intermediate_size
    of_block = sum(map(prod, language.values())) + language["query_key_value"][1] + 2 * width
    # Positions, patches with their bias, class token.
    embedded = vision.num_positions + vision.in_channels * vision.patch_size**2 + 2
    of_tower = vision.num_hidden_layers * of_layer + embedded * vision.hidden_size
    of_embeddings = (2 * config.padded_vocab_size + 1) * width
    return of_tower + count_projection(config), config.num_layers * of_block + of_embeddings


def count_projection(config: ChatGLMConfig) -> int:
    """Weights of the adapter between tower and language model, which the vision part includes."""
    width, inner = config.hidden_size, config.ffn_hidden_size
    # Biases and vectors at its width last.
    return width * (4 * config.vision.hidden_size + width + 3 * inner) + 5 * width


def linear_layers(config: ChatGLMConfig) -> tuple[dict[str, tuple[int, int]], ...]:
    """Channels in and out of the linear layers of a layer of the tower, and of one of the language
    model, by their names."""
    width, inner, side = config.hidden_size, config.ffn_hidden_size, config.vision.hidden_size
    queries = config.num_attention_heads * config.kv_channels
    fused = queries + 2 * config.multi_query_group_num * config.kv_channels
    wide = config.vision.intermediate_size
    tower = [(side, 3 * side), (side, side), (side, wide), (wide, side)]
    language = [(width, fused), (queries, width), (width, 2 * inner), (inner, width)]
    return (
        dict(zip(TOWER_TARGETS, tower, strict=True)),
        dict(zip(LANGUAGE_TARGETS, language, strict=True)),
    )


def count_lora(config: ChatGLMConfig, options: EngineOptions) -> int:
    """Weights of LoRA adapters."""
    if not is_lora(options.trained):
        return 0
    tower, language = linear_layers(config)
    stacks = [(config.num_layers, language)]
    if options.trained == "lora_all":
        stacks.append((config.vision.num_hidden_layers, tower))
    lora = options.lora
    return sum(
        layers * (lora.rank * sum(sides[name]) + sides[name][1] * bool(lora.use_dora))
        for layers, sides in stacks
        for name in lora.names
        if name in sides
    )


def count_trained(config: ChatGLMConfig, options: EngineOptions) -> int:
    """Weights that are trained."""
    of_vision, of_language = count_parameters(config)
    projection = count_projection(config)
    sizes = {"tower": of_vision - projection, "adapter": projection, "language_model": of_language}
    parts = parts_trained(options.trained)
    return count_lora(config, options) + sum(sizes[part] for part in parts)


def states(config: ChatGLMConfig, options: EngineOptions, batch: Batch) -> float:
    """Weights, gradients and optimizer between two steps; adapters only if they are large."""
    everything = sum(count_parameters(config))
    stage, width = options.zero_stage, _width(options)
    of_weights = batch.processes if stage == 3 else 1
    weights = (width * everything - _saved_by_fp8(config, options)) / of_weights
    if stage == 3 and options.zero_hpz_partition_size > 1:  # a second copy, within a machine
        weights += width * everything / options.zero_hpz_partition_size
    if options.trained == "qlora":
        embeddings = 2 * config.padded_vocab_size * config.hidden_size
        weights = BF16 * embeddings + (everything - embeddings) * 0.55
    trained = count_trained(config, options)
    if is_lora(options.trained):
        if trained < ADAPTERS_THAT_COUNT * everything:
            trained = 0
        weights += width * trained / of_weights
    moments = 2 * (1 if options.optimizer == "adamw_8bit" else FP32)
    if stage == 0:  # trained weights are held in fp32, as are their gradients
        return weights + (FP32 - width + FP32 + moments) * trained
    gradients = width * trained / (batch.processes if stage >= 2 else 1)
    if options.offload is True:  # ZeRO-3 keeps gradients here all the same (deepspeed.zero3)
        return weights + (gradients if stage == 3 else 0)
    return weights + gradients + (FP32 + moments) * trained / batch.processes


def count_held(config: ChatGLMConfig, options: EngineOptions) -> tuple[int, int]:
    """Weights of tower and language model that are held in fp8 (:func:`fp8.linear_layers`)."""
    if not options.holds_fp8:
        return 0, 0
    tower, language = linear_layers(config)
    left_out = ("dense",) if options.compile else ("dense", "fc2")
    of_layer = sum(prod(sides) for name, sides in tower.items() if name not in left_out)
    of_blocks = config.num_layers * sum(map(prod, language.values()))
    return config.vision.num_hidden_layers * of_layer, of_blocks


def _saved_by_fp8(config: ChatGLMConfig, options: EngineOptions) -> float:
    """Bytes that held weights take less than those in bf16."""
    of_tower, of_language = count_held(config, options)
    transposed = of_language + (of_tower if trains_tower(options.trained) else 0)
    return (BF16 - 1) * (of_tower + of_language) - options.keeps_transposed * transposed


def offloaded(config: ChatGLMConfig, options: EngineOptions) -> float:
    """Bytes of the machine's memory, of all processes together, that an offloaded optimizer takes:
    fp32 copies, fp32 gradients and two moments. Adapters are too small to count."""
    if options.offload is not True or is_lora(options.trained):
        return 0.0
    return 4.0 * FP32 * count_trained(config, options)


def activations(config: ChatGLMConfig, options: EngineOptions, batch: Batch) -> float:
    """What the layers keep from their forward pass to their backward."""
    return _width(options) * sum(
        stack.channels(policy) for stack in _learning(config, options, batch) for policy in stack
    )


def transient(config: ChatGLMConfig, options: EngineOptions, batch: Batch) -> float:
    """What comes and goes within a step: gathered weights, one layer's insides, logits."""
    gathered = 0.0
    if options.zero_stage == 3:
        everything = sum(count_parameters(config))
        gathered = min(_live(options) + 2 * GATHERED_AHEAD, everything)
        # Those in fp8 count half.
        gathered *= 1 - sum(count_held(config, options)) / everything / 2
        gathered = max(gathered, config.padded_vocab_size * config.hidden_size)
    inside = max(stack.channels(POLICIES["none"]) for stack in _stacks(config, options, batch))
    positions = options.loss_chunk_size or config.loss_chunk_size
    logits = min(positions, batch.rows * batch.row_length) * config.padded_vocab_size
    width = _width(options)
    return width * (gathered + inside) + (width + 2 * FP32) * logits


def recomputed_flop(config: ChatGLMConfig, options: EngineOptions, batch: Batch) -> float:
    """Work of one step that is done a second time."""
    return 2 * sum(
        stack.tokens * policy.work(stack.sizes)
        for stack in _learning(config, options, batch)
        for policy in stack
    )


@dataclass(frozen=True)
class _Stack:
    """The layers of a tower, as their policies; tokens that go through them; a layer's sizes."""

    policies: list[Policy]
    tokens: float
    sizes: LayerSizes
    not_compiled: float  # times as much is kept where all is kept

    def __iter__(self) -> Iterator[Policy]:
        return iter(self.policies)

    def channels(self, policy: Policy) -> float:
        """That a layer of this policy keeps of all tokens."""
        factor = self.not_compiled if policy.name == "none" else 1.0
        return self.tokens * policy.channels(self.sizes) * factor


def _learning(config: ChatGLMConfig, options: EngineOptions, batch: Batch) -> list[_Stack]:
    """Those of tower and language model that have a backward pass."""
    stacks = _stacks(config, options, batch)
    return stacks if trains_tower(options.trained) else stacks[1:]


def _stacks(config: ChatGLMConfig, options: EngineOptions, batch: Batch) -> list[_Stack]:
    """Of the tower, and of the language model."""
    side, inner = config.vision.hidden_size, config.vision.intermediate_size
    parts = parts_trained(options.trained)
    # The input of the MLP's last layer is kept for its own gradient, and for LoRA's.
    of_tower = "tower" in parts or "fc2" in options.lora.names
    of_language = "language_model" in parts or "dense_4h_to_h" in options.lora.names
    tower = LayerSizes(
        width=side,
        attention_output=side,
        narrow_outputs=2 * side,  # dense and fc2
        wide_outputs=3 * side + inner,
        elementwise_outputs=0,
        linear_inputs=inner if of_tower else 0,
        elementwise_work=WORK_OF_A_CHANNEL * (4 * side + 2 * inner),
        wide_work=3 * side**2 + side * inner,
        narrow_work=side**2,
        attention_work=2 * config.vision.num_positions * side,
    )
    width, up = config.hidden_size, 2 * config.ffn_hidden_size
    of_language_model = linear_layers(config)[1]
    fused, projected = of_language_model["query_key_value"][1], of_language_model["dense"][0]
    language = LayerSizes(
        width=width,
        attention_output=projected,
        narrow_outputs=width + fused,
        wide_outputs=up,
        elementwise_outputs=2 * width,
        linear_inputs=up // 2 if of_language else 0,
        elementwise_work=WORK_OF_A_CHANNEL * (4 * width + 2 * fused + 1.5 * up),
        wide_work=width * up,
        narrow_work=width * (projected + fused),
        attention_work=batch.row_length * projected,
    )
    in_4_bits = options.trained == "qlora"
    if in_4_bits:  # policies do not know linear layers of 4 bits
        language = replace(
            language,
            narrow_outputs=0,
            wide_outputs=0,
            elementwise_outputs=language.elementwise_outputs + width + fused + up,
            elementwise_work=POLICIES["attention"].work(language),
            wide_work=0,
            narrow_work=0,
        )
    factors = NOT_COMPILED_TOWER, NOT_COMPILED_QLORA if in_4_bits else NOT_COMPILED_LANGUAGE
    if options.compile:
        factors = 1.0, 1.0
    positions = batch.rows * batch.images_per_row * config.vision.num_positions
    towers = policies_of_layers(options.tower, config.vision.num_hidden_layers)
    blocks = policies_of_layers(options.language, config.num_layers)
    return [
        _Stack(towers, positions, tower, factors[0]),
        _Stack(blocks, batch.rows * batch.row_length, language, factors[1]),
    ]


def _width(options: EngineOptions) -> int:
    """Bytes of a number that is computed with."""
    return FP32 if options.precision == "fp32" else BF16
