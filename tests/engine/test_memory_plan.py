"""Estimates of memory against real models and measured peaks, and what is chosen by them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glm4v_patched.bench.settings import Settings
from glm4v_patched.bench.table import read_rows
from glm4v_patched.engine.activation_policies import POLICIES
from glm4v_patched.engine.memory_plan import (
    CANDIDATES,
    GIB,
    OUTSIDE_TORCH,
    STEPS_THAT_PAY_FOR_COMPILING,
    Batch,
    count_parameters,
    count_trained,
    decide,
    estimate,
    free_memory,
    offloaded,
    recomputed_flop,
    states,
)
from glm4v_patched.engine.options import ALL_WEIGHTS, EngineOptions, LoraOptions
from glm4v_patched.engine.trainable import select_weights
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.tiny import tiny_config, tiny_model

RESULTS = Path(__file__).parents[2] / "docs" / "benchmarks"
REAL = ChatGLMConfig()
TWO_ROWS = Batch(rows=2, row_length=2114, processes=2)


def asked(trained="full", tower="auto", language="auto", live=None, **options) -> EngineOptions:
    """Nothing offloaded and all compiled, where a test does not say otherwise."""
    options = {"compile": True, "offload": False} | options
    return EngineOptions(
        trained=trained,
        tower=tower,
        language=language,
        stage3_max_live_parameters=live,
        **options,
    )


def decided(trained="full", tower="full", language="full", live=1e9, **options) -> EngineOptions:
    return asked(trained, tower, language, live, **options)


def measured_rows():
    """Rows of real GPUs, each as what was trained, what was kept, and the measured peak."""
    for path in sorted(RESULTS.glob("bench_*.json")):
        for number, row in enumerate(read_rows(path), 1):
            settings = row["settings"]
            if "error" in row or settings["against"] is not None:
                continue
            if settings.get("attn_implementation", "sdpa") == "eager":
                continue  # its scores are not estimated: nobody is to choose it for its memory
            longest = 1602 + row["text_tokens"]
            lengths = [longest] * row["micro_batch"]
            if settings.get("packed"):
                texts = Settings(**settings).text_lengths()
                lengths = [sum(1602 + text for text in texts)]
            chosen = row.get("policies") or {
                "tower": settings["tower"],
                "language": settings["language"],
                "gathered": settings["stage3_max_live_parameters"],
            }
            batch = Batch(
                rows=len(lengths),
                row_length=lengths[0],
                images_per_row=row["micro_batch"] / len(lengths),
                processes=row["gpus"],
            )
            options = decided(
                row["workload"],
                chosen["tower"],
                chosen["language"],
                chosen["gathered"],
                zero_stage=row["zero_stage"],
                optimizer=settings.get("optimizer", "adamw"),
                offload=row["offload"],
                loss_chunk_size=settings["loss_chunk_size"],
                compile=settings["compile"],
            )
            peak = row["peak_allocated_gib"]
            if options.offload is True:
                # Since then gradients wait on the GPUs (engine/deepspeed/gradient_buffer.py).
                peak += 2 * count_trained(REAL, options) / batch.processes / GIB
            yield pytest.param(options, batch, peak, id=f"{path.stem}-{number}")


@pytest.mark.parametrize("trained", ["lora_lm", "lora_all"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_are_counted_as_peft_makes_them(trained, use_dora):
    lora = LoraOptions(rank=3, use_dora=use_dora)
    model = select_weights(tiny_model(), trained, lora)
    made = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert count_trained(tiny_config(), asked(trained, lora=lora)) == made


@pytest.mark.parametrize("changes", [{}, {"num_layers": 3, "padded_vocab_size": 999}])
def test_parameters_are_counted_as_the_model_has_them(changes):
    config = tiny_config(**changes)
    model = GLM4VForCausalLM(config)
    tower = sum(p.numel() for p in model.transformer.vision.parameters())
    everything = sum(p.numel() for p in model.parameters())
    assert count_parameters(config) == (tower, everything - tower)


def test_the_real_models_parameters():
    # As many as the published checkpoint has.
    assert sum(count_parameters(REAL)) == 13_906_320_896


@pytest.mark.parametrize(("options", "batch", "peak"), list(measured_rows()))
def test_the_estimate_is_near_the_measured_peak(options, batch, peak):
    assert estimate(REAL, options, batch) / GIB == pytest.approx(peak, rel=0.08, abs=1.5)


@pytest.mark.parametrize(
    ("trained", "micro_batch", "tower", "allocated"),
    [("full", 2, "none", 138.0), ("lm", 4, "full", 89.4)],
)
def test_what_ran_out_of_memory_is_estimated_to_need_more(trained, micro_batch, tower, allocated):
    """Two H200s, 8-bit AdamW; GiB that torch had allocated when it could not go on, the second
    under a limit of 90."""
    options = decided(trained, tower, "none", optimizer="adamw_8bit")
    assert estimate(REAL, options, replace(TWO_ROWS, rows=micro_batch)) / GIB > allocated


def test_states_by_stage_optimizer_and_offload():
    tower, language = count_parameters(REAL)
    weights = tower + language

    def bytes_a_weight(**options):
        batch = Batch(rows=1, row_length=9, processes=options.pop("processes", 2))
        return states(REAL, decided(**options), batch) / weights

    # bf16 weights and gradients, fp32 weights and two moments: 2 + 2 + 4 + 8.
    assert bytes_a_weight(zero_stage=3) == 16 / 2
    assert bytes_a_weight(zero_stage=2) == 2 + 14 / 2
    assert bytes_a_weight(zero_stage=1) == 4 + 12 / 2
    assert bytes_a_weight(zero_stage=3, optimizer="adamw_8bit") == 10 / 2
    assert bytes_a_weight(zero_stage=3, offload=True) == 4 / 2
    assert bytes_a_weight(zero_stage=2, offload=True) == 2
    # What waits on the CPU: fp32 weights, gradients and moments, and at first bf16 gradients.
    for trained, number in (("full", weights), ("lm", language), ("lora_all", 0)):
        assert offloaded(REAL, decided(trained, offload=True)) == 16 * number
    assert offloaded(REAL, decided("full")) == 0
    assert bytes_a_weight(zero_stage=3, trained="lora_all") == 2 / 2
    # In fp32 all of it takes 4 bytes, and DeepSpeed keeps its own copies all the same.
    assert bytes_a_weight(zero_stage=3, precision="fp32") == 20 / 2
    # Without ZeRO all in fp32.
    assert bytes_a_weight(zero_stage=0, processes=1) == 4 + 4 + 8
    trained = bytes_a_weight(zero_stage=3, trained="lm") - 2 / 2
    assert trained == pytest.approx(14 / 2 * language / weights)


def test_more_memory_never_means_more_work():
    for trained in ("full", "lm", "lora_lm", "lora_all"):
        work = [
            recomputed_flop(REAL, decide(REAL, asked(trained), TWO_ROWS, free * GIB), TWO_ROWS)
            for free in (16, 24, 32, 48, 80, 96, 120, 141, 180, 288)
        ]
        assert work == sorted(work, reverse=True), trained
        assert work[-1] == 0 and work[0] > 0


@pytest.mark.parametrize("trained", ["full", "lm", "lora_lm", "lora_all"])
@pytest.mark.parametrize("free", [24.5, 80, 141])
def test_what_is_chosen_fits_or_is_the_smallest_there_is(trained, free):
    chosen = decide(REAL, asked(trained), TWO_ROWS, free * GIB)
    size = estimate(REAL, chosen, TWO_ROWS)
    smallest = estimate(REAL, decided(trained, live=5e8), TWO_ROWS)
    assert size < (free - 2) * GIB or size == smallest


def test_a_policy_that_is_asked_for_stays():
    for free in (0, 60 * GIB, 1000 * GIB):
        chosen = decide(REAL, asked(tower="selective", live=7e8), TWO_ROWS, free)
        assert (chosen.tower, chosen.stage3_max_live_parameters) == ("selective", 7e8)
        assert decide(REAL, asked(language="every 3"), TWO_ROWS, free).language == "every 3"


def test_all_weights_stay_gathered_where_they_fit():
    chosen = decide(REAL, asked("lora_all"), TWO_ROWS, 141 * GIB)
    assert chosen == decided("lora_all", "none", "none", ALL_WEIGHTS)
    # Those of a frozen tower are not needed again.
    chosen = decide(REAL, asked("lora_lm"), TWO_ROWS, 141 * GIB)
    assert chosen == decided("lora_lm", "full", "none", 9_399_951_360)


@pytest.mark.parametrize(
    ("steps", "free", "trained", "compiled"),
    [
        (STEPS_THAT_PAY_FOR_COMPILING, 141, "lora_lm", True),
        (None, 141, "full", True),
        (STEPS_THAT_PAY_FOR_COMPILING - 1, 141, "lora_lm", False),
        (10_000, 0, "lora_lm", False),  # no GPU
        (10_000, 141, "qlora", False),
    ],
)
def test_layers_are_compiled_where_that_pays(steps, free, trained, compiled):
    stage = 0 if trained == "qlora" else 3
    options = asked(trained, compile="auto", zero_stage=stage)
    assert decide(REAL, options, TWO_ROWS, free * GIB, steps).compile == compiled
    for said in (True, False):
        options = replace(options, compile=said)
        assert decide(REAL, options, TWO_ROWS, free * GIB, steps).compile == said


def test_every_policy_computes_more_and_keeps_less_than_the_one_before():
    assert [name for name in CANDIDATES if not name.startswith("every")] == list(POLICIES)
    policies = [decided(tower=name, language=name) for name in POLICIES]
    work = [recomputed_flop(REAL, options, TWO_ROWS) for options in policies]
    sizes = [estimate(REAL, options, TWO_ROWS) for options in policies]
    assert work == sorted(set(work)) and sizes == sorted(set(sizes), reverse=True)


def test_every_nth_lies_between_none_and_full():
    work = [
        recomputed_flop(REAL, decided(tower="none", language=name), TWO_ROWS)
        for name in ("none", "every 4", "every 2", "full")
    ]
    assert work == sorted(work) and work[2] == pytest.approx(work[3] / 2)


def test_a_row_of_four_samples_keeps_what_four_rows_do():
    four = Batch(rows=4, row_length=2114)
    packed = Batch(rows=1, row_length=4 * 2114, images_per_row=4)
    for policies in (("none", "none"), ("full", "none"), ("attention", "full")):
        options = decided("lora_all", *policies)
        assert estimate(REAL, options, packed) == estimate(REAL, options, four)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="this machine has a GPU: run with CUDA_VISIBLE_DEVICES="
)
def test_without_a_gpu_nothing_is_known_to_be_free_and_most_is_computed_again():
    assert free_memory() == 0
    chosen = decide(tiny_model().config, asked(), TWO_ROWS, free_memory())
    assert (chosen.tower, chosen.language) == ("full", "full")


@pytest.mark.parametrize("mine", [10 * GIB, 50 * GIB])
def test_free_memory_is_the_least_of_all_processes(mine, monkeypatch):
    """Else they would choose unlike policies, and wait for each other in unlike collectives."""
    other = 30 * GIB
    tensor = torch.tensor

    def all_reduce(value: torch.Tensor, op) -> None:
        assert op == torch.distributed.ReduceOp.MIN
        value.copy_(torch.minimum(value, tensor(float(other), dtype=value.dtype)))

    # The second process, and a GPU whose tensors lie on the CPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (mine - GIB, 141 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: GIB)
    monkeypatch.setattr(torch, "tensor", lambda value, dtype, device: tensor(value, dtype=dtype))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    assert free_memory() == min(mine, other)
    # A limit of this process is the others', too.
    assert free_memory(limit=5) == 5 * GIB + OUTSIDE_TORCH
    assert free_memory(limit=100) == min(mine, other)
