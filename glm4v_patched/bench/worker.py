"""Process that measures training; each GPU runs one.

``python -m glm4v_patched.bench.worker SETTINGS OUT``, with ZeRO under ``torch.distributed.run``.
The training loop is that of a recipe (:mod:`finetune.assembly`). The samples are generated, a
callback times the steps and, unless the settings name a model, the weights are random.
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
from ..data.workers import loader_options, start_method
from ..engine.fp8 import require_fp8
from ..engine.memory_plan import GIB, decide_options, min_free_gpu_memory
from ..engine.options import EngineOptions
from ..engine.prepare import join_process_group, local_device, prepare_model
from ..engine.trainable import build_random_model
from ..finetune.assembly import build_trainer, init_training
from ..finetune.process import exit_process
from ..finetune.trainer import RecipeTrainer
from ..finetune.training_arguments import LoopOptions, engine_arguments
from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.modeling_chatglm import GLM4VForCausalLM
from .roofline import benchmark_batch, measured_ceiling, useful_flop
from .samples import ConstantBatchCollator, config_and_processor, make_conversations
from .settings import TrainingSettings

LEARNING_RATE = 1e-5


class StepTimer(TrainerCallback):
    """Callback that times each step after the warm-up.

    A step's time includes reading its samples, and excludes logging.
    """

    def __init__(self, warm_up: int):
        self.warm_up = warm_up
        self.seconds: list[float] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self._began = timer()  # this timer waits for the GPU

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
    """Train the model that the settings describe, and return speed, memory and losses."""
    on_gpu = local_device().type == "cuda"
    side, products = (8192, 20) if on_gpu else (512, 3)
    ceiling = measured_ceiling(side, products)
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        step_timer = StepTimer(settings.warm_up)
        trainer, options, config = _build_benchmark_trainer(settings, Path(folder), step_timer)
        trainer.train()
    require_learning(trainer)
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    allocated, reserved = (peak / GIB if on_gpu else None for peak in peaks)
    median, flop = statistics.median(step_timer.seconds), useful_flop(config, settings)
    samples_per_s = settings.micro_batch / median
    tokens = config.vision.num_image_tokens + 2 + statistics.mean(settings.text_lengths())
    fastest, slowest = min(step_timer.seconds), max(step_timer.seconds)
    return {
        "samples_per_s_per_gpu": samples_per_s,
        "tokens_per_s_per_gpu": samples_per_s * tokens,
        "roofline_share": samples_per_s * flop / ceiling,
        "step_s": {"median": median, "fastest": fastest, "slowest": slowest},
        "useful_tflop_per_sample": flop / 1e12,
        "ceiling_tflops": ceiling / 1e12,
        "peak_allocated_gib": allocated,
        "peak_reserved_gib": reserved,
        "policies": options.policies,
        "offload": options.offload,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


def _build_benchmark_trainer(
    settings: TrainingSettings, folder: Path, step_timer: StepTimer
) -> tuple[RecipeTrainer, EngineOptions, ChatGLMConfig]:
    """Join the process group, and build the recipe's trainer with model and samples.

    Returns:
        The trainer, the engine options with "auto" resolved, and the model's config.
    """
    config, processor = config_and_processor(settings)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    batch = benchmark_batch(settings, config, processes)
    requested = settings.engine_options()
    require_fp8(requested, config)
    if torch.cuda.is_available():
        join_process_group(requested)  # min_free_gpu_memory takes the minimum over all processes
    options = decide_options(config, requested, batch, min_free_gpu_memory(requested.memory_limit))
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
    samples: Any = range(settings.micro_batch * processes * steps)  # one epoch
    collator: Any = ConstantBatchCollator(config, settings, seed=arguments.process_index)
    if processor is not None:
        samples = make_conversations(processor, settings, folder, len(samples))
        collator = ConversationCollator(processor)
    trainer = build_trainer(
        partial(prepare_model, options, _model_builder(settings, config, options)),
        arguments,
        LoopOptions(max_nonfinite_steps=1, worker_start_method=start_method(options.offload)),
        callbacks=[step_timer],
        reuse_features=settings.reuse_features,
        train_dataset=samples,
        data_collator=collator,
    )
    return trainer, options, config


def _model_builder(
    settings: TrainingSettings, config: ChatGLMConfig, options: EngineOptions
) -> Callable[..., GLM4VForCausalLM]:
    """Return a function that builds the model from the keyword arguments of from_pretrained.

    It loads the weights of ``settings.model``, or makes random ones.
    """
    if settings.model is not None:
        return partial(GLM4VForCausalLM.from_pretrained, settings.model)

    def build(**kwargs: Any) -> GLM4VForCausalLM:
        # Under ZeRO-3, DeepSpeed itself moves every new weight to the GPU and shards it.
        with nullcontext() if options.zero_stage == 3 else local_device():
            return build_random_model(config, **kwargs)

    return build


def require_learning(trainer: RecipeTrainer) -> None:
    """Raise ``RuntimeError`` if the training diverged or all gradients were 0."""
    if trainer.divergence.verdict is not None:
        raise RuntimeError(trainer.divergence.verdict)
    if not any(entry.get("grad_norm") for entry in trainer.state.log_history):
        raise RuntimeError("the gradients of all steps were 0, so no weight was trained")


if __name__ == "__main__":
    row = measure_steps(TrainingSettings.from_json(sys.argv[1]))
    if int(os.environ.get("RANK", 0)) == 0:
        Path(sys.argv[2]).write_text(json.dumps(row))
    exit_process()
