"""Measures one training: what every process of a group runs.

``python -m glm4v_patched.bench.worker SETTINGS OUT``, with ZeRO under ``torch.distributed.run``.
The loop is that of a recipe (:mod:`finetune.assembly`); here are only a model with random weights,
samples, and a callback that looks at the clock.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import timer
from transformers import TrainerCallback

from ..data.collate import ConversationCollator
from ..data.workers import loader_options, worker_start
from ..engine.fp8 import require_fp8
from ..engine.memory_plan import GIB, decide_options, min_free_gpu_memory
from ..engine.options import EngineOptions
from ..engine.prepare import join_process_group, local_device, prepare_model
from ..engine.trainable import build_random_model
from ..finetune.assembly import init_training, build_trainer
from ..finetune.process import exit_process
from ..finetune.trainer import RecipeTrainer
from ..finetune.training_arguments import LoopOptions, engine_arguments
from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.modeling_chatglm import GLM4VForCausalLM
from .roofline import benchmark_batch, measured_ceiling, useful_flop
from .samples import ConstantBatchCollator, config_and_processor, conversations
from .settings import TrainingSettings

LEARNING_RATE = 1e-5


class StepTimer(TrainerCallback):
    """Seconds of each step after those to warm up: reading its batch is in them, logging is not."""

    def __init__(self, warm_up: int):
        self.warm_up = warm_up
        self.seconds: list[float] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self._began = timer()  # once the GPU is done

    def on_step_end(self, args, state, control, **kwargs):
        ended = timer()
        if state.global_step > self.warm_up:
            self.seconds.append(ended - self._began)
        elif state.global_step == self.warm_up and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._began = ended

    def on_log(self, args, state, control, **kwargs):
        self._began = timer()


def measure_steps(settings: TrainingSettings) -> dict:
    """Train a model with random weights, and return what was seen."""
    on_gpu = local_device().type == "cuda"
    ceiling = measured_ceiling(*(8192, 20) if on_gpu else (512, 3))
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        timed = StepTimer(settings.warm_up)
        trainer, options, config = _build_benchmark_trainer(settings, Path(folder), timed)
        trainer.train()
    require_learning(trainer)
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    allocated, reserved = (peak / GIB if on_gpu else None for peak in peaks)
    median, work = statistics.median(timed.seconds), useful_flop(config, settings)
    rate = settings.micro_batch / median
    positions = config.vision.num_image_tokens + 2 + statistics.mean(settings.text_lengths())
    fastest, slowest = min(timed.seconds), max(timed.seconds)
    return {
        "samples_per_s_per_gpu": rate,
        "tokens_per_s_per_gpu": rate * positions,
        "roofline_share": rate * work / ceiling,
        "step_s": {"median": median, "fastest": fastest, "slowest": slowest},
        "useful_tflop_per_sample": work / 1e12,
        "ceiling_tflops": ceiling / 1e12,
        "peak_allocated_gib": allocated,
        "peak_reserved_gib": reserved,
        "policies": options.policies,
        "offload": options.offload,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


def _build_benchmark_trainer(
    settings: TrainingSettings, folder: Path, timed: StepTimer
) -> tuple[RecipeTrainer, EngineOptions, ChatGLMConfig]:
    """The recipe's trainer of the model and the samples, in processes that have joined."""
    config, processor = config_and_processor(settings)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    batch, asked = benchmark_batch(settings, config, processes), settings.engine_options()
    require_fp8(asked, config)
    if torch.cuda.is_available():
        join_process_group(asked)  # all of them decide by the least of what is free
    options = decide_options(config, asked, batch, min_free_gpu_memory(asked.memory_limit))
    steps = settings.warm_up + settings.steps
    arguments = init_training(
        options,
        engine_arguments(options, on_cpu=not torch.cuda.is_available())
        | loader_options({}, processes, settings.micro_batch, config.vision.image_size)
        | {
            "output_dir": str(folder),
            "max_steps": steps,
            "per_device_train_batch_size": settings.micro_batch,
            "learning_rate": LEARNING_RATE,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        },
    )
    samples: Any = range(settings.micro_batch * processes * steps)  # each once
    collator: Any = ConstantBatchCollator(config, settings, seed=arguments.process_index)
    if processor is not None:
        samples = conversations(processor, settings, folder, len(samples))
        collator = ConversationCollator(processor)
    trainer = build_trainer(
        partial(prepare_model, options, _model_builder(settings, config, options)),
        arguments,
        LoopOptions(max_nonfinite_steps=1, worker_start=worker_start(options.offload)),
        callbacks=[timed],
        reuse_features=settings.reuse_features,
        train_dataset=samples,
        data_collator=collator,
    )
    return trainer, options, config


def _model_builder(
    settings: TrainingSettings, config: ChatGLMConfig, options: EngineOptions
) -> Callable[..., GLM4VForCausalLM]:
    """What is given what ``from_pretrained`` is: that of a folder, or random weights."""
    if settings.model is not None:
        return partial(GLM4VForCausalLM.from_pretrained, settings.model)

    def build(**given: Any) -> GLM4VForCausalLM:
        # Under ZeRO-3 DeepSpeed itself puts every new weight on the GPU, sharded.
        with nullcontext() if options.zero_stage == 3 else local_device():
            return build_random_model(config, **given)

    return build


def require_learning(trainer: RecipeTrainer) -> None:
    """Raise ``RuntimeError`` for a training in which nothing can have been learned."""
    if trainer.divergence.verdict is not None:
        raise RuntimeError(trainer.divergence.verdict)
    if not any(entry.get("grad_norm") for entry in trainer.state.log_history):
        raise RuntimeError("the gradients of all steps were 0: nothing was learned")


if __name__ == "__main__":
    row = measure_steps(TrainingSettings.read(sys.argv[1]))
    if int(os.environ.get("RANK", 0)) == 0:
        Path(sys.argv[2]).write_text(json.dumps(row))
    exit_process()
