"""Assembles a :class:`RecipeTrainer`: of what a recipe asks, or of samples made in memory."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils.logging import disable_progress_bar

from ..data.feature_cache import TowerFeatures
from ..engine.options import EngineOptions
from ..engine.prepare import join_process_group
from ..terminal_text import show_progress
from .progress import quiet_transformers
from .trainer import RecipeTrainer
from .training_arguments import LoopOptions


def init_training(options: EngineOptions, arguments: Mapping[str, Any]) -> TrainingArguments:
    """Make this process one of the run's; its ``TrainingArguments``.

    They come before the model: they make ``from_pretrained`` load straight into ZeRO-3's shards.

    Raises:
        SystemExit: the GPU of this process cannot be used, where others would take the CPU.
    """
    if not arguments.get("use_cpu") and not torch.cuda.is_available():
        sys.exit("torch sees no GPU, although the driver has one: is it too old for this torch?")
    if torch.cuda.is_available():
        join_process_group(options)
    made = TrainingArguments(**arguments)
    join_process_group(options)  # on a CPU after transformers has: else DeepSpeed does, and compiles
    set_seed(made.seed)  # adapters are random
    quiet_transformers()
    return made


def make_feature_cache(reuse: bool | str, model: nn.Module) -> TowerFeatures | None:
    """What keeps the tower's features, if they are to be kept: ``data.reuse_features``."""
    return None if reuse is False else TowerFeatures(model, None if reuse is True else reuse)


def build_trainer(
    build: Callable[[], nn.Module],
    arguments: TrainingArguments,
    loop: LoopOptions,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    reuse_features: bool | str = False,
    **data: Any,
) -> RecipeTrainer:
    """The trainer of a model, which is built here, with nothing of transformers' on the screen.

    Args:
        build: Returns the prepared model (:func:`engine.prepare.prepare_model`).
        arguments: Of :func:`begin`.
        callbacks: Beside those of ``loop``; asked before divergence is looked for.
        reuse_features: Whether images go through a frozen tower once; or the folder that keeps
            what came out.
        data: ``train_dataset``, ``data_collator`` and what else :class:`RecipeTrainer` takes.
    """
    if arguments.process_index:
        disable_progress_bar()
    with show_progress("loading the model", enabled=arguments.process_index == 0):
        model = build()
    disable_progress_bar()
    callbacks = [*callbacks]
    if loop.patience is not None:
        callbacks.append(EarlyStoppingCallback(loop.patience, loop.threshold))
    trainer = RecipeTrainer(
        model,
        loop,
        features=make_feature_cache(reuse_features, model),
        args=arguments,
        callbacks=callbacks,
        **data,
    )
    for theirs in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(theirs)
    return trainer
