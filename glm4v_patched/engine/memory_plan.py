"""Estimate the GPU memory of a training from the model's sizes, and choose settings that fit.

The estimates are computed from a config; no model is built. They count what autograd saves in each
layer, compiled or not (:mod:`activation_policies` lists the saved activations of each policy).
``tests/engine/test_memory_plan.py`` compares them with measured peaks at the real size.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod

import torch

from ..remote.configuration_chatglm import ChatGLMConfig
from .activation_policies import policies_of_layers
from .layer_memory import (
    BF16_BYTES,
    FP32_BYTES,
    BatchShape,
    is_input_saved,
    linear_layer_shapes,
    multiplies_in_fp8,
    norm_dtype_factor,
    stacks_with_backward,
    uses_autocast,
)
from .options import (
    UNLIMITED_PARAMETERS,
    EngineOptions,
    choose_precision,
    is_lora,
    trained_parts,
    trains_tower,
    trains_tower_or_projector,
)

GIB = 2**30
# Policies that "auto" may choose. Among policies that take equally long, the first is chosen.
POLICY_CANDIDATES = (
    "none",
    "linear",
    "every 4",
    "every 3",
    "every 2",
    "selective",
    "attention",
    "full",
)
# Candidates for stage3_max_live_parameters where not all weights can stay gathered: the first keeps
# some layers gathered, the second just enough to prefetch.
PARTIAL_LIVE_PARAMETERS = (1e9, 5e8)
# Number of weights that DeepSpeed prefetches (deepspeed/config.py). As many again are used already
# but not released yet.
PREFETCHED_PARAMETERS = 2e8
# GPU memory outside torch's allocator: the CUDA context and NCCL's buffers.
NON_TORCH_BYTES = 2 * GIB
# Fraction of memory that the allocator cannot use: fragmentation, and blocks freed by gathers.
ALLOCATOR_OVERHEAD = 0.05
# LoRA adapters below this fraction of all weights count as 0: the estimate's error is larger.
MIN_ADAPTER_FRACTION = 0.001
# A logit and its gradient are in bf16, its log-softmax and the gradient of that in fp32.
BYTES_PER_LOGIT = 2 * BF16_BYTES + 2 * FP32_BYTES
# Compiling takes about a minute (the first step in docs/benchmarks/loss_curve.json) and saves at
# least 0.2 s per step (docs/performance.md: 1.35 s instead of 1.82 s).
MIN_STEPS_TO_COMPILE = 300


def min_free_gpu_memory(limit: float | None = None) -> float:
    """Return the free bytes of the GPU that has the least, among all processes; 0 without a GPU.

    All processes get the same number, because they must choose the same settings.

    Args:
        limit: GiB that torch may allocate, or None for all.
    """
    if not torch.cuda.is_available():
        return 0.0
    free = apply_memory_limit(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved(), limit)
    if not torch.distributed.is_initialized():
        return float(free)
    minimum = torch.tensor(float(free), dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(minimum, op=torch.distributed.ReduceOp.MIN)
    return minimum.item()


def apply_memory_limit(free: float, limit: float | None) -> float:
    """Return how many of the free bytes are usable, given a limit in GiB for torch's allocator."""
    return free if limit is None else min(free, limit * GIB + NON_TORCH_BYTES)


def decide_options(
    config: ChatGLMConfig,
    options: EngineOptions,
    batch: BatchShape,
    free: float,
    steps: int | None = None,
) -> EngineOptions:
    """Replace each "auto" by the fastest setting whose estimate fits into free memory.

    The fastest setting recomputes the least. Among settings that recompute equally much, those that
    store transposed copies of fp8 weights come first, and then those that keep more weights
    gathered. If nothing fits, the chosen setting recomputes everything: the estimate may be wrong,
    and running out of memory is no worse than a refusal.

    Args:
        free: Free bytes of each GPU (:func:`min_free_gpu_memory`); 0 on a CPU.
        steps: Number of training steps, which decides whether to compile; None counts as enough.
    """
    usable = (free - NON_TORCH_BYTES) * (1 - ALLOCATOR_OVERHEAD)
    if options.precision == "auto":
        options = replace(options, precision=choose_precision(on_cpu=not free)[0])
    if options.compile == "auto":
        pays = steps is None or steps >= MIN_STEPS_TO_COMPILE
        # bitsandbytes's 4-bit layers are not compiled.
        options = replace(options, compile=free > 0 and pays and options.trained != "qlora")
    if options.offload == "auto":
        can_offload = free > 0 and options.zero_stage > 0 and options.optimizer != "adamw_8bit"
        smallest = replace(
            options,
            tower="full",
            language="full",
            stage3_max_live_parameters=min(PARTIAL_LIVE_PARAMETERS),
            may_store_transposed_fp8=False,
        )
        peak = estimate_peak_bytes(config, replace(smallest, offload=False), batch)
        offloaded_peak = estimate_peak_bytes(config, replace(smallest, offload=True), batch)
        offload = can_offload and peak > max(usable, offloaded_peak)
        options = replace(options, offload=offload)
    candidates = list(_candidate_options(config, options))
    peaks = {candidate: estimate_peak_bytes(config, candidate, batch) for candidate in candidates}
    fitting = [candidate for candidate in candidates if peaks[candidate] <= usable]
    if not fitting:
        # Take the setting that recomputes the most, not the one with the smallest estimate: for
        # small models these can differ, and on a CPU (0 free bytes) nothing fits.
        return min(
            reversed(candidates),
            key=lambda candidate: (
                -recomputed_flops(config, candidate, batch),
                peaks[candidate],
            ),
        )

    def cost(candidate: EngineOptions) -> tuple[float, bool, float]:
        recomputed = recomputed_flops(config, candidate, batch)
        return recomputed, not candidate.may_store_transposed_fp8, -_max_live_parameters(candidate)

    return min(fitting, key=cost)


def _candidate_options(config: ChatGLMConfig, options: EngineOptions) -> Iterator[EngineOptions]:
    """Yield the options with every combination of values for the settings that are "auto"."""
    tower_candidates = POLICY_CANDIDATES if trains_tower(options.trained) else ("full",)
    live_candidates: tuple[float, ...] = (1e9,)  # DeepSpeed's default
    if options.compile:
        # The first candidate keeps all weights gathered that the backward pass needs again. If only
        # the language model has a backward pass, these are the weights of the language model. With
        # a larger limit, DeepSpeed would also keep the frozen tower gathered until the step ends.
        lm_params = float(count_parameters(config)[1])
        needed_again = UNLIMITED_PARAMETERS if trains_tower(options.trained) else lm_params
        live_candidates = (needed_again, *PARTIAL_LIVE_PARAMETERS)
    max_live = options.stage3_max_live_parameters
    for tower, language, live, transposed in product(
        tower_candidates if options.tower == "auto" else (options.tower,),
        POLICY_CANDIDATES if options.language == "auto" else (options.language,),
        live_candidates if max_live is None else (max_live,),
        (True, False) if options.stores_transposed_fp8 else (options.may_store_transposed_fp8,),
    ):
        yield replace(
            options,
            tower=tower,
            language=language,
            stage3_max_live_parameters=live,
            may_store_transposed_fp8=transposed,
        )


def _max_live_parameters(options: EngineOptions) -> float:
    assert options.stage3_max_live_parameters is not None, "decide_options() comes first"
    return options.stage3_max_live_parameters


def estimate_peak_bytes(config: ChatGLMConfig, options: EngineOptions, batch: BatchShape) -> float:
    """Return the peak bytes that torch allocates in a step; ``options`` must be decided."""
    saved = activation_bytes(config, options, batch) + temporary_bytes(config, options, batch)
    persistent = model_state_bytes(config, options, batch)
    if options.zero_stage or batch.accumulates_gradients:
        return persistent + saved
    # Without ZeRO, gradients are allocated while activations are freed.
    gradients = gradient_bytes(config, options, batch)
    return persistent - gradients + max(gradients, saved)


def count_parameters(config: ChatGLMConfig) -> tuple[int, int]:
    """Return the numbers of weights of the vision part (tower and projector) and of the language
    model."""
    vision, hidden = config.vision, config.hidden_size
    tower, language = linear_layer_shapes(config)
    biases_and_norms = 9 * vision.hidden_size + vision.intermediate_size
    tower_layer = sum(map(prod, tower.values())) + biases_and_norms
    block = sum(map(prod, language.values())) + language["query_key_value"][1] + 2 * hidden
    # Position embedding, patch embedding with its bias, class token.
    embedding_rows = vision.num_positions + vision.in_channels * vision.patch_size**2 + 2
    tower_params = vision.num_hidden_layers * tower_layer + embedding_rows * vision.hidden_size
    embedding_params = (2 * config.padded_vocab_size + 1) * hidden
    return tower_params + count_projector(config), config.num_layers * block + embedding_params


def count_projector(config: ChatGLMConfig) -> int:
    """Return the number of weights of the projector."""
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    # The last term: biases and vectors.
    return hidden * (4 * config.vision.hidden_size + hidden + 3 * ffn) + 5 * hidden


def count_lora(config: ChatGLMConfig, options: EngineOptions) -> int:
    """Return the number of weights of all LoRA adapters."""
    if not is_lora(options.trained):
        return 0
    tower, language = linear_layer_shapes(config)
    layers_and_shapes = [(config.num_layers, language)]
    if options.trained == "lora_all":
        layers_and_shapes.append((config.vision.num_hidden_layers, tower))
    lora = options.lora
    return sum(
        layers * (lora.rank * sum(in_out[name]) + in_out[name][1] * bool(lora.use_dora))
        for layers, in_out in layers_and_shapes
        for name in lora.target_names
        if name in in_out
    )


def count_trained(config: ChatGLMConfig, options: EngineOptions) -> int:
    """Return the number of trained weights."""
    vision_params, lm_params = count_parameters(config)
    projector_params = count_projector(config)
    sizes = {
        "tower": vision_params - projector_params,
        "projector": projector_params,
        "language_model": lm_params,
    }
    parts = trained_parts(options.trained)
    return count_lora(config, options) + sum(sizes[part] for part in parts)


def model_state_bytes(config: ChatGLMConfig, options: EngineOptions, batch: BatchShape) -> float:
    """Return the bytes of weights, gradients and optimizer states on one GPU between two steps.

    LoRA adapters count only if they are large.
    """
    all_params = sum(count_parameters(config))
    stage, element_bytes = options.zero_stage, _bytes_per_element(options)
    num_shards = batch.processes if stage == 3 else 1
    weights = (element_bytes * all_params - _fp8_savings_bytes(config, options)) / num_shards
    if stage == 3 and options.zero_hpz_partition_size > 1:  # a second copy, within a machine
        weights += element_bytes * all_params / options.zero_hpz_partition_size
    if options.trained == "qlora":
        embeddings = 2 * config.padded_vocab_size * config.hidden_size
        # A weight in NF4 takes 4 bits, and its share of the scales.
        weights = BF16_BYTES * embeddings + (all_params - embeddings) * 0.55
    trained = count_trained(config, options)
    if is_lora(options.trained):
        if trained < MIN_ADAPTER_FRACTION * all_params:
            trained = 0
        weights += element_bytes * trained / num_shards
    moments = 2 * (1 if options.optimizer == "adamw_8bit" else FP32_BYTES)
    gradients = gradient_bytes(config, options, batch)
    if stage == 0:  # trained weights are fp32
        return weights + gradients + (FP32_BYTES - element_bytes + moments) * trained
    if options.offload is True:  # ZeRO-3 leaves gradients on the GPU (our deepspeed/zero3.py)
        return weights + (gradients if stage == 3 else 0)
    return weights + gradients + (FP32_BYTES + moments) * trained / batch.processes


def gradient_bytes(config: ChatGLMConfig, options: EngineOptions, batch: BatchShape) -> float:
    """Return the bytes of all gradients on one GPU; those of small adapters count as 0."""
    trained = count_trained(config, options)
    is_small = trained < MIN_ADAPTER_FRACTION * sum(count_parameters(config))
    if is_lora(options.trained) and is_small:
        return 0.0
    if options.zero_stage == 0:
        return FP32_BYTES * trained
    num_shards = batch.processes if options.zero_stage >= 2 else 1
    return _bytes_per_element(options) * trained / num_shards


def count_fp8_weights(config: ChatGLMConfig, options: EngineOptions) -> tuple[int, int]:
    """Return how many weights of the tower and of the language model are stored in fp8."""
    if not options.stores_fp8:
        return 0, 0
    tower, language = linear_layer_shapes(config)
    tower_layer = sum(
        prod(in_out) for name, in_out in tower.items() if multiplies_in_fp8(options, "tower", name)
    )
    lm_params = config.num_layers * sum(map(prod, language.values()))
    return config.vision.num_hidden_layers * tower_layer, lm_params


def _fp8_savings_bytes(config: ChatGLMConfig, options: EngineOptions) -> float:
    """Return how many bytes fp8 storage, with its transposed copies, saves compared to bf16."""
    tower_params, lm_params = count_fp8_weights(config, options)
    transposed = lm_params + (tower_params if trains_tower(options.trained) else 0)
    saved = (BF16_BYTES - 1) * (tower_params + lm_params)
    return saved - options.stores_transposed_fp8 * transposed


def offloaded_bytes(config: ChatGLMConfig, options: EngineOptions) -> float:
    """Return the bytes of RAM that an offloaded optimizer needs, for all processes together.

    Each weight has an fp32 copy, an fp32 gradient and two moments. Adapters are too small to count.
    """
    if options.offload is not True or is_lora(options.trained):
        return 0.0
    return 4.0 * FP32_BYTES * count_trained(config, options)


def activation_bytes(config: ChatGLMConfig, options: EngineOptions, batch: BatchShape) -> float:
    """Return the bytes that forward saves for backward.

    They are the activations of the layers and of the projector, the input of the final norm, and
    the weights that autograd saves.
    """
    # A stack is all layers of the tower or of the language model, with one policy for each layer.
    layers = sum(stack.saved_elements for stack in stacks_with_backward(config, options, batch))
    # Elements saved outside the layers: the final norm's input and, below, the projector's.
    outside = batch.num_sequences * batch.sequence_length * config.hidden_size
    if trains_tower_or_projector(options.trained):
        images = batch.num_sequences * batch.images_per_sequence * config.vision.num_image_tokens
        outside += images * _projector_channels(config, options)
    weights = BF16_BYTES * _weights_saved_for_backward(config, options)
    return _bytes_per_element(options) * (layers + outside) + weights


def _projector_channels(config: ChatGLMConfig, options: EngineOptions) -> float:
    """Return the channels per image token that the projector saves; it is never checkpointed."""
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    inputs = (2 * hidden + ffn) * is_input_saved(options, "projector", "linear_proj")
    # Under autocast, a norm's output is fp32.
    return 2 * hidden * norm_dtype_factor(options) + 3 * ffn + inputs


def _weights_saved_for_backward(config: ChatGLMConfig, options: EngineOptions) -> float:
    """Return the elements of weights of linear layers that autograd keeps in memory for backward.

    They are autocast's bf16 copies of weights that are trained in fp32 and, under ZeRO-3, gathered
    weights of layers that are neither compiled nor checkpointed. Products in fp8 save none.
    """
    is_gathered = options.gathers_whole_layers and not options.compile
    elements = 0
    stacks = zip(
        ("tower", "language_model"),
        (options.tower, options.language),
        (config.vision.num_hidden_layers, config.num_layers),
        linear_layer_shapes(config),
        strict=True,
    )
    for part, policy_name, num_layers, shapes in stacks:
        if part == "tower" and not trains_tower(options.trained):
            continue
        layer_elements = sum(
            prod(in_out)
            for name, in_out in shapes.items()
            if not multiplies_in_fp8(options, part, name)
        )
        if uses_autocast(options) and part in trained_parts(options.trained):
            elements += num_layers * layer_elements  # autocast caches them until forward ends
        elif is_gathered:
            names = [policy.name for policy in policies_of_layers(policy_name, num_layers)]
            elements += names.count("none") * layer_elements
    return elements


def temporary_bytes(config: ChatGLMConfig, options: EngineOptions, batch: BatchShape) -> float:
    """Return the bytes that a step needs temporarily, beside saved activations.

    They are the gathered weights, plus the larger of two: the logits, or what the backward pass of
    a layer needs.
    """
    gathered = 0.0
    if options.zero_stage == 3:
        all_params = sum(count_parameters(config))
        gathered = min(_max_live_parameters(options) + 2 * PREFETCHED_PARAMETERS, all_params)
        fp8_fraction = sum(count_fp8_weights(config, options)) / all_params
        gathered *= 1 - fp8_fraction / 2  # weights in fp8 have half the bytes
        # The output layer is one weight, and is gathered as a whole.
        gathered = max(gathered, config.padded_vocab_size * config.hidden_size)
    element_bytes = _bytes_per_element(options)
    text_tokens = batch.sequence_length - batch.images_per_sequence * config.vision.num_image_tokens
    logit_positions = min(config.loss_chunk_size, batch.num_sequences * text_tokens)
    stacks = stacks_with_backward(config, options, batch)
    backward = element_bytes * max(stack.layer_backward_elements for stack in stacks)
    if options.trained == "qlora":  # a layer's weight, dequantized to bf16
        backward += BF16_BYTES * max(map(prod, linear_layer_shapes(config)[1].values()))
    logits = BYTES_PER_LOGIT * logit_positions * config.padded_vocab_size
    return element_bytes * gathered + max(backward, logits)


def recomputed_flops(config: ChatGLMConfig, options: EngineOptions, batch: BatchShape) -> float:
    """Return the floating-point operations of one step that are recomputed in backward."""
    return 2 * sum(
        stack.tokens * policy.recomputed_macs(stack.sizes)
        for stack in stacks_with_backward(config, options, batch)
        for policy in stack.policies
    )


def _bytes_per_element(options: EngineOptions) -> int:
    """Return the bytes of an element in the dtype of the computation."""
    return FP32_BYTES if options.precision == "fp32" else BF16_BYTES
