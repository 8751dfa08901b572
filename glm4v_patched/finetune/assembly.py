"""Assemble a :class:`RecipeTrainer`, for a recipe or for the samples of a benchmark."""

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
    """Join the process group, and return the ``TrainingArguments``.

    Call this before the model is built: while the arguments exist, ``from_pretrained`` loads
    straight into ZeRO-3's shards.

    Raises:
        SystemExit: torch sees no GPU, although the run needs one. transformers would silently use
            the CPU.
    """
    if not arguments.get("use_cpu") and not torch.cuda.is_available():
        sys.exit("torch sees no GPU, although the driver has one: is it too old for this torch?")
    if torch.cuda.is_available():
        join_process_group(options)
    training_args = TrainingArguments(**arguments)
    # On a CPU, TrainingArguments must join the process group first, because DeepSpeed would compile
    # an extension for it.
    join_process_group(options)
    set_seed(training_args.seed)  # for the initialization of adapters
    quiet_transformers()
    return training_args


def make_feature_cache(reuse: bool | str, model: nn.Module) -> TowerFeatures | None:
    """Return the cache of the vision tower's features, or None if ``data.reuse_features`` is false.

    Args:
        reuse: The value of ``data.reuse_features``: whether to cache features in memory, or the
            folder to cache them in.
    """
    return None if reuse is False else TowerFeatures(model, None if reuse is True else reuse)


def build_trainer(
    build_model: Callable[[], nn.Module],
    arguments: TrainingArguments,
    loop: LoopOptions,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    reuse_features: bool | str = False,
    **data: Any,
) -> RecipeTrainer:
    """Build the model, and return its trainer, without transformers' progress bars.

    Args:
        build_model: Returns the prepared model (:func:`engine.prepare.prepare_model`).
        arguments: From :func:`init_training`.
        callbacks: Further callbacks. They run before the one that detects divergence.
        reuse_features: As ``reuse`` of :func:`make_feature_cache`.
        data: ``train_dataset``, ``data_collator`` and further arguments of
            :class:`RecipeTrainer`.
    """
    if arguments.process_index:
        disable_progress_bar()
    with show_progress("loading the model", enabled=arguments.process_index == 0):
        model = build_model()
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
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    return trainer
