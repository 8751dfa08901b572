"""What is measured of a step: its time, and how much of its work is useful."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from glm4v_patched.bench import worker
from glm4v_patched.bench.roofline import PASSES, language_flop, vision_flop, useful_flop
from glm4v_patched.bench.settings import TrainingSettings
from glm4v_patched.bench.worker import require_learning
from glm4v_patched.engine.options import TRAINED
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from tests.helpers.tiny import random_pixels, tiny_model


def test_useful_work_is_what_torch_counts():
    model = tiny_model(attn_implementation="eager")  # of sdpa torch counts nothing on a CPU
    config, vision, length = model.config, model.config.vision, 20
    with FlopCounterMode(display=False) as of_tower, torch.no_grad():
        model.transformer.get_image_features(random_pixels(1))
    patches = 2 * vision.num_patches * vision.hidden_size * vision.in_channels
    patches *= vision.patch_size**2  # the only part that is not counted as useful
    assert of_tower.get_total_flops() - patches == vision_flop(config)
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
    work = [useful_flop(config, TrainingSettings(trained=name)) / 1e12 for name in names]
    # By hand: 74 for an image, 37 for a row of 2,114 positions, each to the nearest.
    assert work == pytest.approx([333, 185, 148, 222], rel=0.02)
    reused = TrainingSettings(trained="lora_lm", reuse_features=True)
    assert useful_flop(config, reused) / 1e12 == pytest.approx(74, rel=0.02)
    assert set(PASSES) == set(TRAINED)


def test_a_step_is_timed_with_its_batch_and_without_what_is_logged(monkeypatch):
    times = iter([0, 100, 110, 111, 120, 123, 130])
    monkeypatch.setattr(worker, "timer", times.__next__)
    timed = worker.StepTimer(warm_up=1)
    timed.on_train_begin(None, None, None)
    for step in (1, 2, 3):
        timed.on_step_end(None, SimpleNamespace(global_step=step), None)
        timed.on_log(None, None, None)
    assert timed.seconds == [1, 3]


def test_steps_in_which_nothing_is_learned_are_no_measurement():
    def ended(norms, verdict=None):
        history = [{"loss": 2.0, "grad_norm": norm} for norm in norms]
        state = SimpleNamespace(log_history=[*history, {"train_runtime": 1.0}])
        return SimpleNamespace(state=state, watch=SimpleNamespace(verdict=verdict))

    require_learning(ended([0.0, 0.1]))
    for trainer, told in ((ended([0.0, 0.0]), "gradients of all"), (ended([1.0], "NaN"), "NaN")):
        with pytest.raises(RuntimeError, match=told):
            require_learning(trainer)
