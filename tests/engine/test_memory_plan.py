"""Estimates of memory against real models and measured peaks, and what is chosen by them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glm4v_patched.bench.rows import read_rows
from glm4v_patched.bench.settings import Settings, settings_of
from glm4v_patched.engine.memory_plan import (
    CANDIDATES,
    GIB,
    OUTSIDE_TORCH,
    Kept,
    Training,
    choose_kept,
    count_parameters,
    estimate,
    free_memory,
    recomputed_flop,
    states,
)
from glm4v_patched.engine.options import ALL_WEIGHTS
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.tiny import tiny_config, tiny_model

RESULTS = Path(__file__).parents[2] / "docs" / "benchmarks"
REAL = ChatGLMConfig()
ANYTHING = Kept("auto", "auto", None)


def measured_rows():
    """Rows of real GPUs, each as what was trained, what was kept, and the measured peak."""
    for path in sorted(RESULTS.glob("bench_*.json")):
        for number, row in enumerate(read_rows(path), 1):
            settings = row["settings"]
            if "error" in row or settings["against"] is not None:
                continue
            if settings.get("attention", "sdpa") == "eager":
                continue  # its scores are not estimated: nobody is to choose it for its memory
            longest = 1602 + row["text_tokens"]
            lengths = [longest] * row["micro_batch"]
            if settings.get("packed"):
                texts = Settings(**settings_of(row)).text_lengths()
                lengths = [sum(1602 + text for text in texts)]
            chosen = row.get("policies") or {
                "tower": settings["tower"],
                "language": settings["language"],
                "gathered": settings["kept_gathered"],
            }
            training = Training(
                trained=row["workload"],
                micro_batch=len(lengths),
                row_length=lengths[0],
                images_per_row=row["micro_batch"] / len(lengths),
                zero_stage=row["zero_stage"],
                processes=row["gpus"],
                optimizer=settings.get("optimizer", "adamw"),
                offload=row["offload"],
                loss_chunk=settings["loss_chunk"],
                compiled=settings["compile"],
            )
            peak = row["peak_allocated_gib"]
            yield pytest.param(training, Kept(**chosen), peak, id=f"{path.stem}-{number}")


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


@pytest.mark.parametrize(("training", "kept", "peak"), list(measured_rows()))
def test_the_estimate_is_near_the_measured_peak(training, kept, peak):
    assert estimate(REAL, training, kept) / GIB == pytest.approx(peak, rel=0.08, abs=1.5)


@pytest.mark.parametrize(
    ("trained", "micro_batch", "tower", "allocated"),
    [("full", 2, "none", 138.0), ("lm", 4, "full", 89.4)],
)
def test_what_ran_out_of_memory_is_estimated_to_need_more(trained, micro_batch, tower, allocated):
    """Two H200s, 8-bit AdamW; GiB that torch had allocated when it could not go on, the second
    under a limit of 90."""
    asked = training(trained, micro_batch=micro_batch, optimizer="adamw_8bit")
    assert estimate(REAL, asked, Kept(tower, "none")) / GIB > allocated


def test_states_by_stage_optimizer_and_offload():
    tower, language = count_parameters(REAL)
    weights = tower + language

    def bytes_a_weight(**options):
        options = {"trained": "full", "micro_batch": 1, "row_length": 9, "processes": 2} | options
        return states(REAL, Training(**options)) / weights

    # bf16 weights and gradients, fp32 weights and two moments: 2 + 2 + 4 + 8.
    assert bytes_a_weight(zero_stage=3) == 16 / 2
    assert bytes_a_weight(zero_stage=2) == 2 + 14 / 2
    assert bytes_a_weight(zero_stage=1) == 4 + 12 / 2
    assert bytes_a_weight(zero_stage=3, optimizer="adamw_8bit") == 10 / 2
    assert bytes_a_weight(zero_stage=3, offload=True) == 2 / 2
    assert bytes_a_weight(zero_stage=3, trained="lora_all") == 2 / 2
    assert bytes_a_weight(zero_stage=0, processes=1) == 2 + 2 + 4  # moments in bf16
    trained = bytes_a_weight(zero_stage=3, trained="lm") - 2 / 2
    assert trained == pytest.approx(14 / 2 * language / weights)


def training(trained="full", **options):
    options = {"micro_batch": 2, "row_length": 2114, "processes": 2} | options
    return Training(trained=trained, **options)


def test_more_memory_never_means_more_work():
    for trained in ("full", "lm", "lora_lm", "lora_all"):
        work = [
            recomputed_flop(
                REAL,
                training(trained),
                choose_kept(REAL, training(trained), free * GIB, ANYTHING),
            )
            for free in (16, 24, 32, 48, 80, 96, 120, 141, 180, 288)
        ]
        assert work == sorted(work, reverse=True), trained
        assert work[-1] == 0 and work[0] > 0


@pytest.mark.parametrize("trained", ["full", "lm", "lora_lm", "lora_all"])
@pytest.mark.parametrize("free", [24.5, 80, 141])
def test_what_is_chosen_fits_or_is_the_smallest_there_is(trained, free):
    chosen = choose_kept(REAL, training(trained), free * GIB, ANYTHING)
    size = estimate(REAL, training(trained), chosen)
    smallest = estimate(REAL, training(trained), Kept("full", "full", 5e8))
    assert size < (free - 2) * GIB or size == smallest


def test_a_policy_that_is_asked_for_stays():
    for free in (0, 60 * GIB, 1000 * GIB):
        chosen = choose_kept(REAL, training(), free, Kept("selective", "auto", 7e8))
        assert (chosen.tower, chosen.gathered) == ("selective", 7e8)
        chosen = choose_kept(REAL, training(), free, Kept("auto", "every 3", None))
        assert chosen.language == "every 3"


def test_all_weights_stay_gathered_where_they_fit():
    chosen = choose_kept(REAL, training("lora_all"), 141 * GIB, ANYTHING)
    assert chosen == Kept("none", "none", ALL_WEIGHTS)
    # Those of a frozen tower are not needed again.
    chosen = choose_kept(REAL, training("lora_lm"), 141 * GIB, ANYTHING)
    assert chosen == Kept("full", "none", 9_399_951_360)


def test_every_policy_computes_more_and_keeps_less_than_the_one_before():
    order = [name for name in CANDIDATES if not name.startswith("every")]
    policies = [Kept(name, name) for name in order]
    work = [recomputed_flop(REAL, training(), kept) for kept in policies]
    sizes = [estimate(REAL, training(), kept) for kept in policies]
    assert work == sorted(set(work)) and sizes == sorted(set(sizes), reverse=True)


def test_every_nth_lies_between_none_and_full():
    work = [
        recomputed_flop(REAL, training(), Kept("none", name))
        for name in ("none", "every 4", "every 2", "full")
    ]
    assert work == sorted(work) and work[2] == pytest.approx(work[3] / 2)


def test_a_row_of_four_samples_keeps_what_four_rows_do():
    four = Training(trained="lora_all", micro_batch=4, row_length=2114)
    packed = replace(four, micro_batch=1, row_length=4 * 2114, images_per_row=4)
    for kept in (Kept("none", "none"), Kept("full", "none"), Kept("attention", "full")):
        assert estimate(REAL, packed, kept) == estimate(REAL, four, kept)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="this machine has a GPU: run with CUDA_VISIBLE_DEVICES="
)
def test_without_a_gpu_nothing_is_known_to_be_free_and_most_is_computed_again():
    assert free_memory() == 0
    chosen = choose_kept(tiny_model().config, training(), free_memory(), ANYTHING)
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
    assert free_memory(limit=5 * GIB) == 5 * GIB + OUTSIDE_TORCH
