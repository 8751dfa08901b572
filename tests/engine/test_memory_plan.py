"""Estimates of memory against real models and measured peaks, what is chosen by them, and what is
refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glm4v_patched.bench.settings import Settings
from glm4v_patched.bench.table import read_rows
from glm4v_patched.engine import memory_check
from glm4v_patched.engine.memory_check import fault_of_memory
from glm4v_patched.engine.memory_plan import (
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
from glm4v_patched.engine.options import ALL_WEIGHTS, EngineOptions
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.tiny import tiny_config

RESULTS = Path(__file__).parents[2] / "docs" / "benchmarks"
REAL = ChatGLMConfig()
TWO_ROWS = Batch(rows=2, row_length=2114, processes=2)
ONE_ROW = replace(TWO_ROWS, rows=1)


def asked(trained="full", **options) -> EngineOptions:
    """Nothing offloaded and all compiled, where a test does not say otherwise."""
    return EngineOptions(trained=trained, **{"compile": True, "offload": False} | options)


def decided(trained="full", tower="full", language="full", live=1e9, **options) -> EngineOptions:
    policies = {"tower": tower, "language": language, "stage3_max_live_parameters": live}
    return asked(trained, **policies, **options)


def chosen(options: EngineOptions, free: float, steps: int | None = None) -> EngineOptions:
    """For the real model and so many GiB."""
    return decide(REAL, options, TWO_ROWS, free * GIB, steps)


def test_parameters_are_counted_as_the_model_has_them():
    config = tiny_config(num_layers=3, padded_vocab_size=999)
    model = GLM4VForCausalLM(config)
    tower = sum(p.numel() for p in model.transformer.vision.parameters())
    everything = sum(p.numel() for p in model.parameters())
    assert count_parameters(config) == (tower, everything - tower)
    # As many as the published checkpoint has.
    assert sum(count_parameters(REAL)) == 13_906_320_896


def measured_rows():
    """Rows of real GPUs, each as what was trained, what was kept, and the measured peak."""
    for path in sorted(RESULTS.glob("bench_*.json")):
        for number, row in enumerate(read_rows(path), 1):
            settings = row["settings"]
            # Eager attention's scores are not estimated: nobody is to choose it for its memory.
            is_eager = settings.get("attn_implementation", "sdpa") == "eager"
            if "error" in row or settings["against"] is not None or is_eager:
                continue
            lengths = [1602 + row["text_tokens"]] * row["micro_batch"]
            if settings.get("packed"):
                lengths = [sum(1602 + text for text in Settings(**settings).text_lengths())]
            policies = settings | {"gathered": settings["stage3_max_live_parameters"]}
            policies |= row.get("policies") or {}
            images = row["micro_batch"] / len(lengths)
            shape = {"rows": len(lengths), "row_length": lengths[0], "images_per_row": images}
            batch = Batch(**shape, processes=row["gpus"])
            names = ("compile", "loss_chunk_size", "optimizer")
            asked_for = {name: settings[name] for name in names if name in settings}
            asked_for |= {name: row[name] for name in ("zero_stage", "offload")}
            kept = [policies[name] for name in ("tower", "language", "gathered")]
            options = decided(row["workload"], *kept, **asked_for)
            peak = row["peak_allocated_gib"]
            if options.offload is True:
                # Since then gradients wait on the GPUs (engine/deepspeed/zero3.py).
                peak += 2 * count_trained(REAL, options) / batch.processes / GIB
            yield pytest.param(options, batch, peak, id=f"{path.stem}-{number}")


@pytest.mark.parametrize(("options", "batch", "peak"), list(measured_rows()))
def test_the_estimate_is_near_the_measured_peak(options, batch, peak):
    assert estimate(REAL, options, batch) / GIB == pytest.approx(peak, rel=0.08, abs=1.5)


def test_states_take_so_many_bytes_a_weight_by_stage_optimizer_and_offload():
    tower, language = count_parameters(REAL)
    weights = tower + language

    def bytes_a_weight(trained="full", processes=2, **options):
        batch = replace(ONE_ROW, processes=processes)
        return states(REAL, decided(trained, **options), batch) / weights

    # bf16 weights and gradients, fp32 weights and two moments: 2 + 2 + 4 + 8.
    assert bytes_a_weight(zero_stage=3) == 16 / 2
    assert bytes_a_weight(zero_stage=2) == 2 + 14 / 2
    assert bytes_a_weight(zero_stage=1) == 4 + 12 / 2
    assert bytes_a_weight(zero_stage=3, optimizer="adamw_8bit") == 10 / 2
    assert bytes_a_weight(zero_stage=3, offload=True) == 4 / 2
    assert bytes_a_weight(zero_stage=2, offload=True) == 2
    # A second copy of the weights (hpZ); in fp32 all takes 4 bytes, and DeepSpeed keeps its copies.
    assert bytes_a_weight(zero_stage=3, processes=16, zero_hpz_partition_size=8) == 1 + 2 / 8
    assert bytes_a_weight(zero_stage=3, precision="fp32") == 20 / 2
    # What waits on the CPU: fp32 weights, gradients and moments, and at first bf16 gradients.
    for trained, number in (("full", weights), ("lm", language), ("lora_all", 0)):
        assert offloaded(REAL, decided(trained, offload=True)) == 16 * number
    assert offloaded(REAL, decided("full")) == 0
    # Without ZeRO all in fp32.
    assert bytes_a_weight(zero_stage=0, processes=1) == 4 + 4 + 8
    for trained, number in (("lm", language), ("tower+adapter", tower)):
        found = bytes_a_weight(trained, zero_stage=3) - 2 / 2
        assert found == pytest.approx(14 / 2 * number / weights)


@pytest.mark.parametrize("trained", ["full", "lm", "lora_lm", "lora_all"])
def test_more_memory_never_means_more_work_and_what_is_chosen_fits_if_anything_does(trained):
    work = []
    smallest = estimate(REAL, decided(trained, live=5e8), TWO_ROWS)
    for free in (16, 24.5, 48, 80, 141, 288):
        options = chosen(asked(trained), free)
        size = estimate(REAL, options, TWO_ROWS)
        assert size < (free - 2) * GIB or size == smallest
        work.append(recomputed_flop(REAL, options, TWO_ROWS))
    assert work == sorted(work, reverse=True) and work[-1] == 0 and work[0] > 0


def test_what_is_asked_for_stays_and_all_weights_stay_gathered_where_they_fit():
    for free in (0, 60, 1000):
        found = chosen(asked(tower="selective", language="every 3"), free)
        assert (found.tower, found.language) == ("selective", "every 3")
    assert chosen(asked("lora_all"), 141) == decided("lora_all", "none", "none", ALL_WEIGHTS)
    # Those of a frozen tower are not needed again.
    assert chosen(asked("lora_lm"), 141) == decided("lora_lm", "full", "none", 9_399_951_360)


@pytest.mark.parametrize(
    ("steps", "free", "trained", "compiled"),
    [
        (STEPS_THAT_PAY_FOR_COMPILING, 141, "lora_lm", True),
        (STEPS_THAT_PAY_FOR_COMPILING - 1, 141, "lora_lm", False),
        (10_000, 0, "lora_lm", False),  # no GPU
        (10_000, 141, "qlora", False),
    ],
)
def test_layers_are_compiled_where_that_pays(steps, free, trained, compiled):
    options = asked(trained, compile="auto", zero_stage=0 if trained == "qlora" else 3)
    assert chosen(options, free, steps).compile == compiled
    for said in (True, False):
        assert chosen(replace(options, compile=said), free, steps).compile == said


@pytest.mark.parametrize(
    ("free", "options", "offloaded"),
    [
        (60, {}, True),
        (288, {}, False),  # it fits
        (0, {}, False),  # no GPU
        (60, {"optimizer": "adamw_8bit"}, False),  # which runs on GPUs alone
        (60, {"zero_stage": 0}, False),
    ],
)
def test_the_optimizer_is_offloaded_where_it_can_and_has_to_be(free, options, offloaded):
    assert chosen(asked(offload="auto", **options), free).offload is offloaded


def test_free_memory_is_the_least_of_all_processes(monkeypatch):
    """Else they would choose unlike policies, and wait for each other in unlike collectives."""
    mine, other, tensor = 50 * GIB, 30 * GIB, torch.tensor

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
    assert free_memory() == free_memory(limit=100) == other
    # A limit of this process is the others', too.
    assert free_memory(limit=5) == 5 * GIB + OUTSIDE_TORCH


def test_what_lies_on_a_gpu_between_two_steps_has_to_fit(words, monkeypatch):
    options = decided(compile=False)
    needed = states(REAL, options, ONE_ROW) + OUTSIDE_TORCH
    told = fault_of_memory(REAL, options, ONE_ROW, free=needed - 1e9)
    assert "111.3 GB" in told and "110.3 GB" in told
    words(told)
    # The rest of a step is only estimated.
    assert fault_of_memory(REAL, options, ONE_ROW, free=needed + 1) == ""
    # An offloaded optimizer has to fit into its machine's memory.
    monkeypatch.setattr(memory_check, "free_ram", lambda: 100e9)
    told = fault_of_memory(REAL, decided(offload=True), ONE_ROW, 80e9, share=1.0)
    assert "222.5 GB" in told
    words(told)
    assert fault_of_memory(REAL, decided(offload=True), ONE_ROW, 80e9, share=0.25) == ""


@pytest.mark.parametrize(
    ("share", "steps", "fits"), [(1, 1.5, False), (0.5, 1, True), (1, 1.8, True)]
)
def test_on_a_cpu_steps_of_all_processes_have_to_fit(share, steps, fits, monkeypatch):
    """Within the error of estimates."""
    config, options = tiny_config(), asked("lm", compile=False)
    needed = estimate(config, decide(config, options, ONE_ROW, free=0), ONE_ROW)
    monkeypatch.setattr(memory_check, "free_ram", lambda: steps * needed)
    told = fault_of_memory(config, options, ONE_ROW, 0, share)
    assert told == "" if fits else "a step takes" in told
