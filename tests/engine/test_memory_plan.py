"""Memory estimates against real models and measured peaks, and decisions made by them."""

import gc
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from glm4v_patched.bench.roofline import benchmark_batch
from glm4v_patched.bench.settings import TrainingSettings
from glm4v_patched.bench.table import read_measurements
from glm4v_patched.engine import memory_check
from glm4v_patched.engine.activation_checkpointing import transformer_layers
from glm4v_patched.engine.layer_memory import language_sizes, tower_sizes
from glm4v_patched.engine.memory_check import find_memory_problem
from glm4v_patched.engine.memory_plan import (
    GIB,
    MIN_STEPS_TO_COMPILE,
    NON_TORCH_BYTES,
    BatchShape,
    activation_bytes,
    count_parameters,
    count_trained,
    decide_options,
    estimate_peak_bytes,
    min_free_gpu_memory,
    model_state_bytes,
    offloaded_bytes,
    recomputed_flops,
    temporary_bytes,
)
from glm4v_patched.engine.options import (
    LANGUAGE_TARGETS,
    TOWER_TARGETS,
    TRAINED_CHOICES,
    UNLIMITED_PARAMETERS,
    EngineOptions,
    EngineSection,
    LoraOptions,
    trains_tower,
)
from glm4v_patched.engine.trainable import select_weights
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM, GLMBlock, RotaryEmbedding
from glm4v_patched.remote.visual import TransformerLayer
from tests.helpers.tiny import tiny_config

RESULTS = Path(__file__).parents[2] / "docs" / "benchmarks"
REAL = ChatGLMConfig()
TWO_SEQUENCES = BatchShape(num_sequences=2, sequence_length=2114, processes=2)
ONE_SEQUENCE = replace(TWO_SEQUENCES, num_sequences=1)


def make_options(trained="full", **options) -> EngineOptions:
    """Options with compiled layers and without offloading by default."""
    return EngineOptions(
        trained=trained, **{"compile": True, "offload": False, "precision": "bf16"} | options
    )


def make_decided(
    trained="full", tower="full", language="full", live=1e9, **options
) -> EngineOptions:
    policies = {"tower": tower, "language": language, "stage3_max_live_parameters": live}
    return make_options(trained, **policies, **options)


def decide_for(options: EngineOptions, free: float, steps: int | None = None) -> EngineOptions:
    """Decide options for the real model and so many free GiB."""
    return decide_options(REAL, options, TWO_SEQUENCES, free * GIB, steps)


def test_parameters_are_counted_as_the_model_has_them():
    config = tiny_config(num_layers=3, padded_vocab_size=999)
    model = GLM4VForCausalLM(config)
    tower = sum(p.numel() for p in model.transformer.vision.parameters())
    everything = sum(p.numel() for p in model.parameters())
    assert count_parameters(config) == (tower, everything - tower)
    # The published checkpoint has as many.
    assert sum(count_parameters(REAL)) == 13_906_320_896


def measured_rows():
    """Yield options, batch and peak of each row that was measured on real GPUs."""
    for path in sorted([*RESULTS.glob("bench_*.json"), RESULTS / "again_h200_x2.json"]):
        for number, row in enumerate(read_measurements(path), 1):
            settings = row["settings"]
            # Eager attention's scores are not estimated: nobody chooses it to save memory.
            is_eager = settings.get("attn_implementation", "sdpa") == "eager"
            if "error" in row or is_eager or settings.get("all_logits"):
                continue
            lengths = [1602 + row["text_tokens"]] * row["micro_batch"]
            if settings.get("packed"):
                shortest, samples = settings["shortest_text"], row["micro_batch"]
                texts = {"text_tokens": row["text_tokens"], "shortest_text": shortest}
                text_lengths = TrainingSettings(micro_batch=samples, **texts).text_lengths()
                lengths = [sum(1602 + text for text in text_lengths)]
            policies = settings | {"gathered": settings.get("stage3_max_live_parameters")}
            policies |= row.get("policies") or {}
            images = row["micro_batch"] / len(lengths)
            batch = BatchShape(
                num_sequences=len(lengths),
                sequence_length=lengths[0],
                images_per_sequence=images,
                processes=row["gpus"],
            )
            names = ("compile", "optimizer", "fp8")
            kwargs = {name: settings[name] for name in names if name in settings}
            kwargs |= {name: row[name] for name in ("zero_stage", "offload")}
            chosen = [policies[name] for name in ("tower", "language", "gathered")]
            options = make_decided(row["workload"], *chosen, **kwargs)
            peak = row["peak_allocated_gib"]
            if options.offload is True:
                # Later versions leave gradients on the GPUs (engine/deepspeed/zero3.py).
                peak += 2 * count_trained(REAL, options) / batch.processes / GIB
            chunk = settings.get("loss_chunk_size", REAL.loss_chunk_size)
            yield pytest.param(options, batch, peak, chunk, id=f"{path.stem}-{number}")


@pytest.mark.parametrize(("options", "batch", "peak", "chunk"), list(measured_rows()))
def test_the_estimate_is_near_the_measured_peak(options, batch, peak, chunk):
    config = ChatGLMConfig(loss_chunk_size=chunk)
    assert estimate_peak_bytes(config, options, batch) / GIB == pytest.approx(
        peak, rel=0.08, abs=1.5
    )


# Peaks of a step on one H200 (torch 2.11) in GiB, measured by the GPU test below: by trained
# weights, samples, and policies of tower and language model. Each row has those of layers that are
# not compiled, in bf16 and in fp8, and then of compiled ones; None is not measured.
MEASURED_PEAKS = {
    ("lora_lm", 4, "full", "none"): (69.74, 67.57, 61.11, 57.33),
    ("lora_lm", 1, "full", "none"): (36.94, 34.77, 34.78, 31.00),
    ("lora_lm", 4, "full", "linear"): (58.36, 56.25, None, None),
    ("lora_lm", 4, "full", "selective"): (41.11, 39.42, None, None),
    ("lora_lm", 4, "full", "attention"): (33.04, 31.55, None, None),
    ("lora_lm", 4, "full", "full"): (30.42, 29.00, 30.42, 26.63),
    ("lora_all", 1, "none", "none"): (60.89, 60.90, 56.04, 56.05),
    ("lora_all", 2, "none", "none"): (95.73, None, 86.03, 86.04),
    ("lora_all", 2, "linear", "linear"): (87.24, None, None, None),
    ("lora_all", 2, "selective", "selective"): (47.46, 47.71, None, None),
    ("lora_all", 1, "selective", "selective"): (None, None, 36.10, 36.11),
    ("lora_all", 2, "attention", "attention"): (38.03, None, None, None),
    ("lora_all", 2, "full", "full"): (33.98, 34.36, None, None),
    ("lora_all", 2, "every 2", "every 3"): (67.42, 67.81, None, None),
    ("lm", 1, "full", "none"): (96.32, 96.32, 96.31, None),
    ("lm", 1, "full", "full"): (96.32, None, None, None),
    ("qlora", 1, "full", "none"): (19.75, None, None, None),
    ("qlora", 2, "full", "none"): (30.69, None, None, None),
}
PEAKS = [
    (*settings, *compiled_and_fp8, peak)
    for settings, peaks in MEASURED_PEAKS.items()
    for compiled_and_fp8, peak in zip(product((False, True), repeat=2), peaks, strict=True)
    if peak is not None
]


def on_one_gpu(trained, samples, tower, language, compiled, fp8) -> TrainingSettings:
    optimizer = "adamw_8bit" if trained == "lm" else "adamw"
    policies = {"tower": tower, "language": language}
    engine = EngineSection(
        zero_stage=0, fp8=fp8, compile=compiled, optimizer=optimizer, offload=False, **policies
    )
    return TrainingSettings(trained=trained, micro_batch=samples, engine=engine, warm_up=2, steps=2)


def estimated(settings: TrainingSettings) -> float:
    """Estimate the GiB of one process, with enough memory to store fp8 weights twice."""
    batch = benchmark_batch(settings, REAL, processes=1)
    options = decide_options(REAL, settings.engine_options(), batch, free=141 * GIB)
    return estimate_peak_bytes(REAL, options, batch) / GIB


@pytest.mark.parametrize("case", PEAKS, ids=lambda case: "-".join(map(str, case[:6])))
def test_the_estimate_for_one_gpu_errs_by_less_than_5_percent(case):
    assert estimated(on_one_gpu(*case[:6])) == pytest.approx(case[6], rel=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("case", PEAKS, ids=lambda case: "-".join(map(str, case[:6])))
def test_the_estimate_for_one_gpu_is_near_the_peak_on_this_gpu(case):
    from glm4v_patched.bench.worker import measure_steps

    if case[0] in ("lm", "qlora"):
        optimizers = pytest.importorskip("bitsandbytes").optim
        # The Trainer registers the embeddings of each model there, so that they stay in memory.
        optimizers.GlobalOptimManager.get_instance().initialize()
    if (free := torch.cuda.mem_get_info()[0] / GIB) < case[6] + 4:
        pytest.skip(f"needs a GPU with {case[6] + 4:.0f} GiB free, and this has {free:.0f}")
    torch.compiler.reset()
    settings = on_one_gpu(*case[:6])
    row = measure_steps(settings)
    gc.collect()
    torch.cuda.empty_cache()
    assert estimated(settings) == pytest.approx(row["peak_allocated_gib"], rel=0.05)


@pytest.mark.parametrize(
    ("language", "compiled", "fp8", "measured"),
    [
        ("none", False, False, 29.80),
        ("none", False, True, 14.60),
        ("none", True, False, 27.00),
        ("none", True, True, 11.80),
        ("full", False, True, 1.33),
    ],
)
def test_weights_trained_in_fp32_add_autocast_copies_and_fp32_activations(
    language, compiled, fp8, measured
):
    """The measured bytes are those that one sample's forward saves on an H200."""
    settings = on_one_gpu("lm", 1, "full", language, compiled, fp8)
    batch = benchmark_batch(settings, REAL, processes=1)
    options = settings.engine_options()
    saved = activation_bytes(REAL, options, batch)
    assert saved / GIB == pytest.approx(measured, rel=0.02)
    # Gradients take their memory in backward, unless earlier micro-batches have gradients already.
    persistent = model_state_bytes(REAL, options, batch)
    assert saved / GIB < 32 < persistent / GIB
    assert estimate_peak_bytes(REAL, options, batch) == persistent
    accumulating = estimate_peak_bytes(REAL, options, replace(batch, accumulates_gradients=True))
    assert accumulating == persistent + saved + temporary_bytes(REAL, options, batch)


ALL_TARGETS = tuple({*LANGUAGE_TARGETS, *TOWER_TARGETS})


@pytest.mark.parametrize(
    ("trained", "targets"),
    [
        ("lora_all", ("query_key_value",)),
        ("lora_all", ("dense", "dense_h_to_4h", "fc2")),
        ("lora_all", ("dense_4h_to_h", "fc1")),
        ("lora_all", ALL_TARGETS),
        ("lora_lm", ALL_TARGETS),
        ("tower", None),
    ],
)
def test_the_estimated_activations_of_a_layer_are_those_that_autograd_saves(trained, targets):
    """Eager, in fp32, under ZeRO-2."""
    config, tokens = tiny_config(num_layers=1, ffn_hidden_size=96, kv_channels=20), 64
    lora = LoraOptions(rank=1, targets=targets)
    options = EngineOptions(
        trained=trained, lora=lora, precision="fp32", zero_stage=2, compile=False
    )
    model = select_weights(GLM4VForCausalLM(config), trained, lora).train()
    block, tower, *_ = transformer_layers(model)
    assert isinstance(block, GLMBlock) and isinstance(tower, TransformerLayer)
    width, side = config.hidden_size, config.vision.hidden_size
    rotation = RotaryEmbedding(config)(torch.arange(tokens)[None], torch.float32)
    batch = BatchShape(num_sequences=1, sequence_length=tokens)
    expected = language_sizes(config, options, batch).saved_by_autograd
    inputs = torch.randn(1, tokens, width, requires_grad=True), *rotation
    assert saved_channels(block, *inputs, None, None, None, {}) == expected
    if trains_tower(trained):
        image = torch.randn(1, tokens, side, requires_grad=True)
        assert saved_channels(tower, image) == tower_sizes(config, options).saved_by_autograd


def saved_channels(layer, x, *rest) -> float:
    """Return the channels per token that autograd saves.

    Weights and rotary angles do not count, nor tensors with fewer channels than a head: statistics
    and outputs of LoRA's first factor.
    """
    tensors = [tensor for tensor in rest if isinstance(tensor, torch.Tensor)]
    seen = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *tensors)}
    storages: list[torch.UntypedStorage] = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            storages.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x, *rest).sum()
    channels = [storage.nbytes() / 4 / x.shape[1] for storage in storages]
    return sum(number for number in channels if number > 4)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("trained", ["lora_lm", "lora_all"])
@pytest.mark.parametrize(("stage", "processes"), [(0, 1), (2, 2), (3, 1), (3, 2), (3, 4)])
def test_frozen_weights_in_fp8_take_a_byte_and_are_sharded_by_stage_3(
    trained, compiled, stage, processes
):
    """The expected number is counted on a model, by the names of its weights."""
    config = tiny_config(num_layers=3, padded_vocab_size=999)
    in_tower = "query_key_value|mlp.fc1" + "|mlp.fc2" * compiled
    patterns = rf"vision.transformer.layers.*({in_tower}).weight", r"encoder.layers.*\.weight"
    tower_params, lm_params = (
        sum(
            weight.numel()
            for name, weight in GLM4VForCausalLM(config).named_parameters()
            if re.search(pattern, name) and weight.ndim == 2
        )
        for pattern in patterns
    )
    batch = BatchShape(num_sequences=1, sequence_length=64, processes=processes)
    options = make_options(trained, zero_stage=stage, compile=compiled)
    in_bf16 = model_state_bytes(config, options, batch)
    saved = tower_params + lm_params
    for transposed in (False, True):
        in_fp8 = model_state_bytes(
            config, replace(options, fp8=True, may_store_transposed_fp8=transposed), batch
        )
        if transposed and stage < 3:  # for layers that have a backward pass
            saved -= lm_params + tower_params * (trained == "lora_all")
        assert in_bf16 - in_fp8 == saved / (processes if stage == 3 else 1)


@pytest.mark.parametrize("trained", ["full", "projector", "lora_all"])
def test_each_image_of_a_packed_sequence_has_activations(trained):
    options = make_decided(trained)
    separate = BatchShape(num_sequences=3, sequence_length=2000)
    packed = BatchShape(num_sequences=1, sequence_length=6000, images_per_sequence=3)
    assert activation_bytes(REAL, options, packed) == activation_bytes(REAL, options, separate)


TOWER, LANGUAGE = count_parameters(REAL)
# In bf16: weights and gradients, fp32 weights and two moments: 2 + 2 + 4 + 8.
STATE_BYTES: dict[str, tuple[dict, float]] = {
    "stage 3": ({}, 16 / 2),
    "stage 2": ({"zero_stage": 2}, 2 + 14 / 2),
    "stage 1": ({"zero_stage": 1}, 4 + 12 / 2),
    "no ZeRO, all in fp32": ({"zero_stage": 0, "processes": 1}, 4 + 4 + 8),
    "moments in 8 bits": ({"optimizer": "adamw_8bit"}, 10 / 2),
    "stage 3, offloaded": ({"offload": True}, 4 / 2),
    "stage 2, offloaded": ({"zero_stage": 2, "offload": True}, 2),
    "hpZ, a second copy": ({"processes": 16, "zero_hpz_partition_size": 8}, 16 / 16 + 2 / 8),
    # Everything has 4 bytes, and DeepSpeed keeps its fp32 copies all the same.
    "fp32": ({"precision": "fp32"}, 20 / 2),
    "lm": ({"trained": "lm"}, 2 / 2 + 14 / 2 * LANGUAGE / (TOWER + LANGUAGE)),
    "vision": ({"trained": "tower+projector"}, 2 / 2 + 14 / 2 * TOWER / (TOWER + LANGUAGE)),
}


@pytest.mark.parametrize(("options", "expected"), STATE_BYTES.values(), ids=STATE_BYTES)
def test_model_state_bytes_per_weight_on_each_gpu(options, expected):
    options = {"trained": "full", "zero_stage": 3, "processes": 2} | options
    batch = replace(ONE_SEQUENCE, processes=options.pop("processes"))
    state_bytes = model_state_bytes(REAL, make_decided(**options), batch)
    assert state_bytes / (TOWER + LANGUAGE) == pytest.approx(expected)


def test_an_offloaded_optimizer_takes_16_bytes_of_ram_for_each_trained_weight():
    # fp32 weights, fp32 gradients and two moments.
    for trained, number in (("full", TOWER + LANGUAGE), ("lm", LANGUAGE), ("lora_all", 0)):
        assert offloaded_bytes(REAL, make_decided(trained, offload=True)) == 16 * number
    assert offloaded_bytes(REAL, make_decided("full")) == 0


@pytest.mark.parametrize("trained", ["full", "lm", "lora_lm", "lora_all"])
def test_more_memory_never_means_more_recomputation_and_the_decision_fits_if_any_does(trained):
    flops = []
    smallest = estimate_peak_bytes(REAL, make_decided(trained, live=5e8), TWO_SEQUENCES)
    for free in (16, 48, 288):
        options = decide_for(make_options(trained), free)
        size = estimate_peak_bytes(REAL, options, TWO_SEQUENCES)
        assert size < (free - 2) * GIB or size == smallest
        flops.append(recomputed_flops(REAL, options, TWO_SEQUENCES))
    assert flops == sorted(flops, reverse=True) and flops[-1] == 0 and flops[0] > 0


def test_explicit_policies_are_kept_and_all_weights_stay_gathered_if_they_fit():
    for free in (0, 60, 1000):
        decided = decide_for(make_options(tower="selective", language="every 3"), free)
        assert (decided.tower, decided.language) == ("selective", "every 3")
    assert decide_for(make_options("lora_all"), 141) == make_decided(
        "lora_all", "none", "none", UNLIMITED_PARAMETERS
    )
    # The weights of a frozen tower are not needed again in a step.
    assert decide_for(make_options("lora_lm"), 141) == make_decided(
        "lora_lm", "full", "none", 9_399_951_360
    )


@pytest.mark.parametrize("trained", TRAINED_CHOICES)
@pytest.mark.parametrize("layers", [1, 3])
def test_everything_is_recomputed_and_nothing_compiled_without_a_gpu(trained, layers):
    """Also with a single layer, where all policies have about the same peak."""
    options = EngineOptions(trained=trained, zero_stage=0 if trained == "qlora" else 3)
    batch = BatchShape(num_sequences=2, sequence_length=21, processes=2)
    decided = decide_options(tiny_config(num_layers=layers), options, batch, free=0, steps=1000)
    assert (decided.tower, decided.language, decided.compile) == ("full", "full", False)


@pytest.mark.parametrize(
    ("steps", "free", "trained", "compiled"),
    [
        (MIN_STEPS_TO_COMPILE, 141, "lora_lm", True),
        (MIN_STEPS_TO_COMPILE - 1, 141, "lora_lm", False),
        (10_000, 0, "lora_lm", False),  # no GPU
        (10_000, 141, "qlora", False),
    ],
)
def test_layers_are_compiled_if_that_pays(steps, free, trained, compiled):
    stage = 0 if trained == "qlora" else 3
    for setting, decision in (("auto", compiled), (True, True), (False, False)):
        options = make_decided(trained, compile=setting, zero_stage=stage)
        assert decide_for(options, free, steps).compile == decision


@pytest.mark.parametrize(
    ("free", "options", "offloads"),
    [
        (60, {}, True),
        (288, {}, False),  # it fits
        (0, {}, False),  # no GPU
        (60, {"optimizer": "adamw_8bit"}, False),  # runs on GPUs only
        (60, {"zero_stage": 0}, False),
        (16, {"trained": "lora_lm"}, False),  # adapters are too small for it to help
    ],
)
def test_the_optimizer_is_offloaded_if_possible_and_necessary(free, options, offloads):
    assert decide_for(make_decided(offload="auto", **options), free).offload is offloads


def test_free_gpu_memory_is_the_minimum_over_processes(monkeypatch):
    """Otherwise processes would choose different policies, and their collectives would hang."""
    mine, other, tensor = 50 * GIB, 30 * GIB, torch.tensor

    def all_reduce(value: torch.Tensor, op) -> None:
        assert op == torch.distributed.ReduceOp.MIN
        value.copy_(torch.minimum(value, tensor(float(other), dtype=value.dtype)))

    # Simulate a second process, and a GPU whose tensors are on the CPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (mine - GIB, 141 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: GIB)
    monkeypatch.setattr(torch, "tensor", lambda value, dtype, device: tensor(value, dtype=dtype))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    assert min_free_gpu_memory() == min_free_gpu_memory(limit=100) == other
    # Other processes have the same limit.
    assert min_free_gpu_memory(limit=5) == 5 * GIB + NON_TORCH_BYTES


def test_persistent_state_must_fit_into_memory(words, monkeypatch):
    options = make_decided(compile=False)
    needed = model_state_bytes(REAL, options, ONE_SEQUENCE) + NON_TORCH_BYTES
    problem = find_memory_problem(REAL, options, ONE_SEQUENCE, free=needed - 1e9)
    assert "111.3 GB" in problem and "110.3 GB" in problem
    words(problem)
    # The peak of a step is not compared: it is only an estimate.
    assert find_memory_problem(REAL, options, ONE_SEQUENCE, free=needed + 1) == ""
    # An offloaded optimizer must fit into its machine's RAM.
    monkeypatch.setattr(memory_check, "free_ram", lambda: 100e9)
    problem = find_memory_problem(
        REAL, make_decided(offload=True), ONE_SEQUENCE, 80e9, local_process_share=1.0
    )
    assert "222.5 GB" in problem
    words(problem)
    assert not find_memory_problem(
        REAL, make_decided(offload=True), ONE_SEQUENCE, 80e9, local_process_share=0.25
    )


@pytest.mark.parametrize(
    ("share", "steps", "fits"),
    [(1, 1.5, False), (0.5, 1, True), (1, 1.8, True)],
    ids=["too large", "half of the processes are on another machine", "within the error"],
)
def test_on_a_cpu_the_steps_of_all_processes_of_the_machine_must_fit(
    share, steps, fits, monkeypatch
):
    """Beyond the error of estimates they are refused."""
    config, options = tiny_config(), make_options("lm", compile=False)
    needed = estimate_peak_bytes(
        config, decide_options(config, options, ONE_SEQUENCE, free=0), ONE_SEQUENCE
    )
    monkeypatch.setattr(memory_check, "free_ram", lambda: steps * needed)
    problem = find_memory_problem(config, options, ONE_SEQUENCE, 0, share)
    assert problem == "" if fits else "a step takes" in problem
