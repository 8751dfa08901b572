"""What is measured of a step: its time, and how much of its work is useful."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from glm4v_patched.bench import worker
from glm4v_patched.bench.roofline import PASSES, language_flop, tower_flop, useful_flop
from glm4v_patched.bench.settings import Settings
from glm4v_patched.bench.worker import require_learning
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


def test_steps_to_warm_up_are_not_timed_and_their_losses_are_kept(monkeypatch):
    monkeypatch.setattr(worker, "timer", iter([0, 100, 100, 101, 101, 103]).__next__)
    losses = iter(torch.tensor([3.0, 2.0, 1.0]))
    trainer = SimpleNamespace(step=lambda batch: next(losses))
    assert worker._train(trainer, {}, warm_up=1, steps=2) == ([1, 2], [3, 2, 1])


def test_steps_in_which_nothing_is_learned_are_no_measurement():
    require_learning([2.0, 1.9, 1.9])
    for losses, told in (
        ([2.0, 2.0, 2.0], "stayed 2.0 in 3 steps"),
        ([2.0, math.nan, 1.0], "no finite number"),
    ):
        with pytest.raises(RuntimeError, match=told):
            require_learning(losses)
