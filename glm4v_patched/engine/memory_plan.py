"""Estimates the GPU memory of a training from the model's sizes, and chooses settings that fit.

The estimates are arithmetic on a config; no model is built. They count what autograd saves in each
layer, compiled or not (:mod:`activation_policies` says what each policy keeps), and are compared
with measured peaks at the real size (``tests/engine/test_memory_plan.py``).
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod

import torch

from ..remote.configuration_chatglm import ChatGLMConfig
from .activation_policies import policies_of_layers
from .layer_memory import (
    BF16,
    FP32,
    Batch,
    is_autocast,
    is_input_saved,
    linear_layers,
    multiplies_in_fp8,
    norm_width,
    stacks_with_backward,
)
from .options import (
    ALL_WEIGHTS,
    EngineOptions,
    is_lora,
    trained_parts,
    trains_tower,
    trains_vision,
)

GIB = 2**30
# In the order in which ties in time are broken.
CANDIDATES = ("none", "linear", "every 4", "every 3", "every 2", "selective", "attention", "full")
# Weights that may stay gathered where not all do: some layers, and just enough to gather ahead.
SOME_GATHERED = (1e9, 5e8)
GATHERED_AHEAD = 2e8  # deepspeed_config's prefetch bucket; as many are on their way back
# What a GPU keeps beside torch's own memory: the driver's context and NCCL's buffers.
NON_TORCH_BYTES = 2 * GIB
# Freed memory that gathers of weights still hold, and what the allocator cannot use.
ALLOCATOR_OVERHEAD = 0.05
# Of all weights: smaller adapters take less than the estimate errs.
ADAPTERS_THAT_COUNT = 0.001
# Bytes of a logit at the loss: itself and its gradient in bf16, log-softmax and its
# gradient in fp32.
LOSS = 2 * BF16 + 2 * FP32
# Compiling takes about a minute (docs/benchmarks/loss_curve.json: the first step) and saves from
# 0.2 s of a step on (docs/performance.md: 1.35 s instead of 1.82 s).
STEPS_THAT_PAY_FOR_COMPILING = 300


def min_free_gpu_memory(limit: float | None = None) -> float:
    """Bytes free on this process's GPU, the least of all processes, as they have to choose alike;
    0 without a GPU. ``limit``: GiB that torch may allocate."""
    if not torch.cuda.is_available():
        return 0.0
    free = apply_memory_limit(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved(), limit)
    if not torch.distributed.is_initialized():
        return float(free)
    least = torch.tensor(float(free), dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
    return least.item()


def apply_memory_limit(free: float, limit: float | None) -> float:
    """Of so many free bytes of a GPU, those that are to be used; ``limit`` in GiB, of torch's."""
    return free if limit is None else min(free, limit * GIB + NON_TORCH_BYTES)


def decide(
    config: ChatGLMConfig,
    options: EngineOptions,
    batch: Batch,
    free: float,
    steps: int | None = None,
) -> EngineOptions:
    """The options with a decision for all that is "auto": what fits into ``free`` bytes and is
    fastest, so that least is computed again, then gathered. Where nothing fits, all is recomputed:
    the estimate may err, and an out-of-memory error is no worse than a refusal.

    Args:
        free: Of each GPU (:func:`min_free_gpu_memory`), 0 for none.
        steps: How many will be trained; None for so many that compiling pays.
    """
    room = (free - NON_TORCH_BYTES) * (1 - ALLOCATOR_OVERHEAD)
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
            store_transposed=False,
        )
        without, with_it = (
            estimate(config, replace(smallest, offload=offload), batch) for offload in (False, True)
        )
        options = replace(options, offload=may and without > max(room, with_it))
    choices = list(_choices(config, options))
    sizes = {choice: estimate(config, choice, batch) for choice in choices}
    fitting = [choice for choice in choices if sizes[choice] <= room]
    if not fitting:
        # All is recomputed: estimates of small models, which nothing fits into on a CPU, are too
        # close to each other to choose by.
        return min(
            reversed(choices),
            key=lambda each: (-recomputed_flop(config, each, batch), sizes[each]),
        )

    def cost(choice: EngineOptions) -> tuple[float, bool, float]:
        again = recomputed_flop(config, choice, batch)
        return again, not choice.store_transposed, -_live(choice)

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
        (True, False) if options.stores_transposed else (options.store_transposed,),
    ):
        yield replace(
            options,
            tower=tower,
            language=language,
            stage3_max_live_parameters=live,
            store_transposed=transposed,
        )


def _live(options: EngineOptions) -> float:
    assert options.stage3_max_live_parameters is not None, "decide() comes first"
    return options.stage3_max_live_parameters


def estimate(config: ChatGLMConfig, options: EngineOptions, batch: Batch) -> float:
    """Return the peak of the bytes that torch allocates in a step; ``options`` are decided."""
    kept = activations(config, options, batch) + transient(config, options, batch)
    between = states(config, options, batch)
    if options.zero_stage or batch.accumulates:
        return between + kept
    # Gradients grow while activations are freed: never are both there in full.
    gradients = gradient_bytes(config, options, batch)
    return between - gradients + max(gradients, kept)


def count_parameters(config: ChatGLMConfig) -> tuple[int, int]:
    """Weights of the vision part (tower and projector), and of the language model."""
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
    """Weights of the projector between tower and language model, which the vision part includes."""
    width, inner = config.hidden_size, config.ffn_hidden_size
    # Biases and vectors at its width last.
    return width * (4 * config.vision.hidden_size + width + 3 * inner) + 5 * width


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
        for name in lora.target_names
        if name in sides
    )


def count_trained(config: ChatGLMConfig, options: EngineOptions) -> int:
    """Weights that are trained."""
    of_vision, of_language = count_parameters(config)
    projection = count_projection(config)
    sizes = {"tower": of_vision - projection, "projector": projection, "language_model": of_language}
    parts = trained_parts(options.trained)
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
    gradients = gradient_bytes(config, options, batch)
    if stage == 0:  # trained weights are held in fp32
        return weights + gradients + (FP32 - width + moments) * trained
    if options.offload is True:  # ZeRO-3 keeps gradients here all the same (deepspeed.zero3)
        return weights + (gradients if stage == 3 else 0)
    return weights + gradients + (FP32 + moments) * trained / batch.processes


def gradient_bytes(config: ChatGLMConfig, options: EngineOptions, batch: Batch) -> float:
    """Return the bytes of all gradients on one GPU; those of small adapters are not counted."""
    trained = count_trained(config, options)
    if is_lora(options.trained) and trained < ADAPTERS_THAT_COUNT * sum(count_parameters(config)):
        return 0.0
    if options.zero_stage == 0:
        return FP32 * trained
    return _width(options) * trained / (batch.processes if options.zero_stage >= 2 else 1)


def count_held(config: ChatGLMConfig, options: EngineOptions) -> tuple[int, int]:
    """Weights of tower and language model that are stored in fp8."""
    if not options.stores_fp8:
        return 0, 0
    tower, language = linear_layers(config)
    of_layer = sum(
        prod(sides) for name, sides in tower.items() if multiplies_in_fp8(options, "tower", name)
    )
    of_blocks = config.num_layers * sum(map(prod, language.values()))
    return config.vision.num_hidden_layers * of_layer, of_blocks


def _saved_by_fp8(config: ChatGLMConfig, options: EngineOptions) -> float:
    """Bytes that held weights take less than those in bf16."""
    of_tower, of_language = count_held(config, options)
    transposed = of_language + (of_tower if trains_tower(options.trained) else 0)
    return (BF16 - 1) * (of_tower + of_language) - options.stores_transposed * transposed


def offloaded(config: ChatGLMConfig, options: EngineOptions) -> float:
    """Bytes of the machine's memory, of all processes together, that an offloaded optimizer takes:
    fp32 copies, fp32 gradients and two moments. Adapters are too small to count."""
    if options.offload is not True or is_lora(options.trained):
        return 0.0
    return 4.0 * FP32 * count_trained(config, options)


def activations(config: ChatGLMConfig, options: EngineOptions, batch: Batch) -> float:
    """Return the bytes that forward leaves for backward: activations of layers, of the projector
    and before the final norm, and weights that autograd holds."""
    layers = sum(stack.kept for stack in stacks_with_backward(config, options, batch))
    outside = batch.num_sequences * batch.sequence_length * config.hidden_size
    if trains_vision(options.trained):
        images = batch.num_sequences * batch.images_per_sequence * config.vision.num_image_tokens
        outside += images * _projector_channels(config, options)
    return _width(options) * (layers + outside) + BF16 * _weights_held(config, options)


def _projector_channels(config: ChatGLMConfig, options: EngineOptions) -> float:
    """Of one image token: what the projector, which is never checkpointed, saves."""
    width, inner = config.hidden_size, config.ffn_hidden_size
    inputs = (2 * width + inner) * is_input_saved(options, "projector", "linear_proj")
    return 2 * width * norm_width(options) + 3 * inner + inputs


def _weights_held(config: ChatGLMConfig, options: EngineOptions) -> float:
    """Weights of linear layers that autograd holds from forward to backward, beside the model's:
    autocast's copies of those that are trained in fp32, and under ZeRO-3 what was gathered for
    layers that are neither compiled nor checkpointed. fp8 holds none."""
    is_gathered = options.zero_stage == 3 and options.gathers_whole_layers and not options.compile
    held = 0
    stacks = zip(
        ("tower", "language_model"),
        (options.tower, options.language),
        (config.vision.num_hidden_layers, config.num_layers),
        linear_layers(config),
        strict=True,
    )
    for part, policy, number, linear in stacks:
        if part == "tower" and not trains_tower(options.trained):
            continue
        of_layer = sum(
            prod(sides)
            for name, sides in linear.items()
            if not multiplies_in_fp8(options, part, name)
        )
        if is_autocast(options) and part in trained_parts(options.trained):
            held += number * of_layer  # autocast caches them until forward ends
        elif is_gathered:
            kept = [each.name for each in policies_of_layers(policy, number)]
            held += kept.count("none") * of_layer
    return held


def transient(config: ChatGLMConfig, options: EngineOptions, batch: Batch) -> float:
    """Return the bytes that come and go within a step, above what is kept when its backward pass
    begins: gathered weights, and logits or the inside of a layer's backward pass, whichever is
    more."""
    gathered = 0.0
    if options.zero_stage == 3:
        everything = sum(count_parameters(config))
        gathered = min(_live(options) + 2 * GATHERED_AHEAD, everything)
        # Those in fp8 count half.
        gathered *= 1 - sum(count_held(config, options)) / everything / 2
        gathered = max(gathered, config.padded_vocab_size * config.hidden_size)
    width = _width(options)
    text = batch.sequence_length - batch.images_per_sequence * config.vision.num_image_tokens
    positions = min(options.loss_chunk_size or config.loss_chunk_size, batch.num_sequences * text)
    inside = width * max(each.inside for each in stacks_with_backward(config, options, batch))
    if options.trained == "qlora":  # a layer's weight, in bf16 again
        inside += BF16 * max(map(prod, linear_layers(config)[1].values()))
    return width * gathered + max(inside, LOSS * positions * config.padded_vocab_size)


def recomputed_flop(config: ChatGLMConfig, options: EngineOptions, batch: Batch) -> float:
    """Work of one step that is done a second time."""
    return 2 * sum(
        stack.tokens * policy.work(stack.sizes)
        for stack in stacks_with_backward(config, options, batch)
        for policy in stack
    )


def _width(options: EngineOptions) -> int:
    """Bytes of a number that is computed with."""
    return FP32 if options.precision == "fp32" else BF16
