"""What a measured step is taken apart into: useful work, memory, kernels."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from glm4v_patched.bench import breakdown, worker
from glm4v_patched.bench.breakdown import time_by_kind
from glm4v_patched.bench.roofline import PASSES, language_flop, tower_flop, useful_flop
from glm4v_patched.bench.settings import Settings
from glm4v_patched.bench.worker import require_learning
from glm4v_patched.engine.memory_plan import GIB
from glm4v_patched.engine.options import TRAINED
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from tests.helpers.tiny import pictures, tiny_model


def test_useful_work_is_what_torch_counts():
    model = tiny_model(attn_implementation="eager")  # of sdpa torch counts nothing on a CPU
    config, vision, length = model.config, model.config.vision, 20
    with FlopCounterMode(display=False) as of_tower, torch.no_grad():
        model.transformer.get_image_features(pictures(1))
    patches = 2 * vision.num_patches * vision.hidden_size * vision.in_channels
    patches *= vision.patch_size**2  # the only part that is not counted as useful
    assert of_tower.get_total_flops() - patches == tower_flop(config)
    with FlopCounterMode(display=False) as of_language, torch.no_grad():
        model(input_ids=torch.arange(length)[None])
    # torch counts attention as if it were not causal, and here every position has logits.
    heads_width = config.num_attention_heads * config.kv_channels
    unseen = config.num_layers * 2 * length**2 * heads_width
    text = length - vision.num_image_tokens - 2
    assert of_language.get_total_flops() - unseen == language_flop(config, text, length)


def test_a_sample_of_the_real_size():
    config = ChatGLMConfig()
    names = ("full", "lm", "lora_lm", "lora_all")
    work = [useful_flop(config, Settings(trained=name)) / 1e12 for name in names]
    # By hand: 74 for an image, 37 for a row of 2,114 positions, each to the nearest.
    assert work == pytest.approx([333, 185, 148, 222], rel=0.02)
    reused = Settings(trained="lora_lm", reuse_features=True)
    assert useful_flop(config, reused) / 1e12 == pytest.approx(74, rel=0.02)
    assert set(PASSES) == set(TRAINED)


def test_the_parts_of_the_memory_add_up_to_its_peak(monkeypatch):
    now = {"allocated": 11 * GIB}  # weights, optimizer and a buffer of gradients

    def goes_to(size, given=None):
        return lambda *_: now.update(allocated=size * GIB) or given

    def tensor(size, device="cuda"):
        return SimpleNamespace(device=torch.device(device), nbytes=size * GIB)

    trainer = SimpleNamespace(
        model=nn.ModuleDict({"output_layer": nn.Linear(2, 2)}),
        forward=goes_to(16, torch.zeros(())),
        backward=goes_to(14),
        update=goes_to(11),
        optimizer_tensors=lambda: [tensor(4), tensor(100, "cpu")],
        gradient_buffers=lambda: [tensor(5)],
    )
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: now["allocated"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 24 * GIB)
    monkeypatch.setattr(nn.ModuleDict, "buffers", lambda model: [tensor(2)])
    parts = breakdown.memory_parts(trainer, {})
    assert parts["gradients"] == 3 + 5  # made in a step, and kept from one to the next
    assert parts["activations"] == 5 and parts["weights"] == 2 and parts["optimizer"] == 4
    peak = parts.pop("peak")
    assert peak == 24 == sum(parts.values()) and parts["rest"] == 24 - 2 - 4 - 8 - 5


def test_idle_is_when_nothing_but_communication_runs():
    kernels = [
        ("nvjet_a", 1000.0, 2000.0),
        ("nccl_a", 2500.0, 4000.0),  # 500 us beside a product, then alone
        ("triton_a", 5000.0, 1000.0),
        ("triton_b", 5500.0, 1000.0),  # on another stream, half of it beside the one before
        ("nccl_b", 7000.0, 1000.0),
    ]
    assert time_by_kind(kernels) == {
        "matrix products": 2.0,
        "communication": 5.0,
        "compiled element-wise": 2.0,
        "idle": 2.0 + 1.5,
        "step": 7.0,
    }


def test_a_kernel_that_ends_within_a_longer_one_takes_none_of_its_time_away():
    kernels = [
        ("nvjet_a", 0.0, 3000.0),
        ("triton_a", 1000.0, 500.0),  # on another stream, beside the first
        ("triton_b", 2000.0, 2000.0),  # half of it beside the first
    ]
    assert time_by_kind(kernels)["idle"] == 0


def test_steps_to_warm_up_are_not_timed_and_their_losses_are_kept(monkeypatch):
    monkeypatch.setattr(worker, "timer", iter([0, 100, 100, 101, 101, 103]).__next__)
    losses = iter(torch.tensor([3.0, 2.0, 1.0]))
    trainer = SimpleNamespace(step=lambda batch: next(losses))
    assert worker._train(trainer, {}, warm_up=1, steps=2) == ([1, 2], [3, 2, 1])


def test_steps_in_which_nothing_is_learned_are_no_measurement():
    require_learning([2.0, 1.9, 1.9], rounded=False)
    # The published code's loss of 6 in bf16 has steps of 1/32.
    require_learning([6.1875, 6.1875], rounded=True)
    for losses, rounded, told in (
        ([2.0, 2.0, 2.0], False, "stayed 2.0 in 3 steps"),
        ([2.0, math.nan, 1.0], False, "no finite number"),
        ([6.1875, math.inf], True, "no finite number"),
    ):
        with pytest.raises(RuntimeError, match=told):
            require_learning(losses, rounded)
