"""Step times and useful FLOP of a measured training."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from glm4v_patched.bench import worker
from glm4v_patched.bench.roofline import PASSES_PER_STEP, language_flop, useful_flop, vision_flop
from glm4v_patched.bench.settings import TrainingSettings
from glm4v_patched.bench.worker import require_learning
from glm4v_patched.engine.options import TRAINED_CHOICES
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from tests.helpers.tiny import random_pixels, tiny_model


def test_useful_flop_are_what_torch_counts():
    model = tiny_model(attn_implementation="eager")  # torch does not count sdpa on a CPU
    config, vision, length = model.config, model.config.vision, 20
    with FlopCounterMode(display=False) as tower_counter, torch.no_grad():
        model.transformer.get_image_features(random_pixels(1))
    patches = 2 * vision.num_patches * vision.hidden_size * vision.in_channels
    patches *= vision.patch_size**2  # the patch embedding is not in vision_flop
    assert tower_counter.get_total_flops() - patches == vision_flop(config)
    with FlopCounterMode(display=False) as language_counter, torch.no_grad():
        model(input_ids=torch.arange(length)[None])
    # torch counts attention as if it were not causal. All positions have logits here.
    attention_width = config.num_attention_heads * config.kv_channels
    masked = config.num_layers * 2 * length**2 * attention_width
    text = length - vision.num_image_tokens - 2
    assert language_counter.get_total_flops() - masked == language_flop(config, text, length)


def test_flop_of_a_full_size_sample():
    config = ChatGLMConfig()
    names = ("full", "lm", "lora_lm", "lora_all")
    work = [useful_flop(config, TrainingSettings(trained=name)) / 1e12 for name in names]
    # By hand: 74 TFLOP for an image, 37 for a sequence of 2,114 tokens, both rounded.
    assert work == pytest.approx([333, 185, 148, 222], rel=0.02)
    reused = TrainingSettings(trained="lora_lm", reuse_features=True)
    assert useful_flop(config, reused) / 1e12 == pytest.approx(74, rel=0.02)
    assert set(PASSES_PER_STEP) == set(TRAINED_CHOICES)


def test_a_step_s_time_includes_reading_its_batch_and_excludes_logging(monkeypatch):
    times = iter([0, 100, 110, 111, 120, 123, 130])
    monkeypatch.setattr(worker, "timer", times.__next__)
    step_timer = worker.StepTimer(warm_up=1)
    step_timer.on_train_begin(None, None, None)
    for step in (1, 2, 3):
        step_timer.on_step_end(None, SimpleNamespace(global_step=step), None)
        step_timer.on_log(None, None, None)
    assert step_timer.seconds == [1, 3]


def test_a_training_with_zero_gradients_or_nan_is_an_error():
    def ended(norms, verdict=None):
        history = [{"loss": 2.0, "grad_norm": norm} for norm in norms]
        state = SimpleNamespace(log_history=[*history, {"train_runtime": 1.0}])
        return SimpleNamespace(state=state, divergence=SimpleNamespace(verdict=verdict))

    require_learning(ended([0.0, 0.1]))
    for trainer, message in ((ended([0.0, 0.0]), "gradients of all"), (ended([1.0], "NaN"), "NaN")):
        with pytest.raises(RuntimeError, match=message):
            require_learning(trainer)
