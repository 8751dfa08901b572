"""Fine-tune a glm-4v folder on a file of conversations: what every training process runs."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.utils.logging import disable_progress_bar

from ..atomic import write_atomically
from ..data.collate import ConversationCollator
from ..data.feature_cache import TowerFeatures
from ..data.packing import PackedRows, PackingCollator
from ..data.stream import Stream, StreamCollator
from ..data.workers import loader_options, worker_start
from ..engine.deepspeed.config import deepspeed_config
from ..engine.fp8 import require_fp8
from ..engine.memory_plan import GIB
from ..engine.options import EngineOptions, is_lora
from ..engine.prepare import DTYPES, join_processes, prepare_model
from ..models.base import REPORT, Base, identify
from ..models.loading import config_of, load_processor
from ..remote.modeling_chatglm import GLM4VForCausalLM
from ..terminal_text import doing
from .adapter_card import write_card
from .checkpoints import last_complete_checkpoint, step_of
from .divergence import Diverged, NoResult, as_json
from .evaluation import Sample
from .plan import Plan
from .progress import Progress, quiet_transformers
from .run_folder import remove_weights
from .safe_unpickling import loading_safely
from .trainer import CheckpointSchedule, RecipeTrainer

# The Trainer's names.
OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit"}
# Fields of ``trainer`` that it is not given: they are of callbacks, or are in the plan's steps.
OF_CALLBACKS = {"early_stopping_patience", "early_stopping_threshold", "save_total_limit"}
OF_CALLBACKS |= {"num_train_epochs"}


def features_of(reuse: bool | str, model: nn.Module) -> TowerFeatures | None:
    """What keeps the tower's features, if they are to be kept: ``data.reuse_features``."""
    return None if reuse is False else TowerFeatures(model, None if reuse is True else reuse)


def arguments_of(plan: Plan, evaluates: bool, loading: Mapping[str, Any]) -> TrainingArguments:
    """The Trainer's arguments: the recipe's, with what was decided.

    Args:
        evaluates: Whether there is data to evaluate on.
        loading: Of :func:`loader_options`.
    """
    recipe, asked = plan.recipe, plan.recipe.trainer
    eval_every = asked.eval_every(plan.steps_an_epoch)
    given = {k: v for k, v in asked.model_dump().items() if k not in OF_CALLBACKS and v is not None}
    decided: dict[str, Any] = {
        "output_dir": recipe.out,
        # Of epochs, too: schedule, log and estimates agree on them before the first step.
        "max_steps": plan.steps,
        "per_device_eval_batch_size": asked.eval_batch_size,
        "learning_rate": asked.highest_rate,
        "warmup_steps": asked.warmup(plan.steps),
        "optim": OPTIMIZERS[recipe.engine.optimizer],
        "bf16": recipe.engine.precision == "bf16",
        "use_cpu": not torch.cuda.is_available(),
        "deepspeed": deepspeed_config(plan.options),
        "remove_unused_columns": False,
        "prediction_loss_only": True,
        # By steps, also where it is asked for at the end of an epoch: there the Trainer evaluates
        # after it has saved, and a run that continues from that checkpoint would not.
        "save_strategy": "steps" if asked.saving == "epoch" else asked.saving,
        "save_steps": asked.save_every(plan.steps_an_epoch),
        "eval_strategy": "steps" if evaluates and eval_every else "no",
        "eval_steps": eval_every,
        "eval_delay": asked.eval_delay(plan.steps_an_epoch),
        # A checkpoint has the evaluation of the start.
        "eval_on_start": bool(asked.others.get("eval_on_start")) and plan.checkpoint is None,
        "metric_for_best_model": asked.metric_for_best_model if evaluates else None,
        "restore_callback_states_from_checkpoint": asked.early_stopping_patience is not None,
        "logging_strategy": "no" if asked.others.get("logging_strategy") == "no" else "steps",
        "logging_steps": asked.log_every(plan.steps, plan.steps_an_epoch),
        "ignore_data_skip": recipe.data.is_streamed,  # which begins where it is to go on
        # It logs the mean of earlier losses for NaN, and waits for the GPU in every step to know.
        "logging_nan_inf_filter": False,
    }
    return TrainingArguments(**{**given, **decided, **loading})


def train(plan: Plan) -> None:
    """Train what was planned; save the model, or the adapters, to ``out``.

    Also writes ``training.json`` there, last: whether the training came to its end, the history of
    loss and gradient norm, speed and memory, how many processes took part, and what is known of the
    model below. In fp32 on a CPU, the losses and weights of a run that was continued are those of
    one that was never stopped, to the bit.

    Raises:
        ValueError, RuntimeError: what was planned with is not true here
            (:meth:`Plan.require_true`), or the data has changed since.
        Diverged: loss, gradients or weights have become NaN or infinite; no model is left in
            ``out``. On all processes, as is the next.
        BadRow: a row of a stream cannot be used; a checkpoint is in ``out``.
        NoResult: no step was made, or fewer than planned without a reason; no model is left.
        SystemExit: the GPU of this process cannot be used, where others would take the CPU.
    """
    if not plan.placement.on_cpu and not torch.cuda.is_available():
        sys.exit("torch sees no GPU, although the driver has one: is it too old for this torch?")
    recipe = plan.recipe
    error: NoResult | None = None
    trainer, progress = _trainer_of(plan)
    try:
        with loading_safely() if recipe.engine.zero_stage else nullcontext():
            checkpoint = None if plan.checkpoint is None else str(plan.checkpoint)
            trainer.train(resume_from_checkpoint=checkpoint)
        if trainer.watch.verdict is not None:
            raise Diverged(trainer.watch.verdict)
        if recipe.data.is_streamed:
            trainer.faults.conclude(trainer.state.global_step)
        _require_result(plan, trainer.state)
        if recipe.engine.zero_stage == 0:
            _round_trained(trainer.inner, DTYPES[recipe.engine.precision])
        trainer.save_model()
    except Diverged as diverged:
        error = Diverged(f"training diverged: {diverged}{_how_to_go_on(plan)}")
    except NoResult as nothing:
        error = nothing
    if trainer.is_world_process_zero():
        if error is not None:
            remove_weights(Path(recipe.out))
        report = _report(plan, trainer, progress.found(), error)
        if error is None and is_lora(recipe.trained):
            write_card(recipe, plan.base, report, plan.rows)
        write_atomically(Path(recipe.out, REPORT), json.dumps(report, indent=2, allow_nan=False))
    if error is not None:
        # No process may leave, and have torch end the others, before the report is there.
        trainer.args.distributed_state.wait_for_everyone()
        raise error


def _trainer_of(plan: Plan) -> tuple[RecipeTrainer, Progress]:
    """The planned model, rows and callbacks, in processes that have joined."""
    recipe, options, base = plan.recipe, plan.options, plan.base
    asked, config = recipe.trainer, config_of(base)
    processor, checked = load_processor(base), plan.checked_data()
    stamps, evaluated, sample = checked.stamps, None, None
    if checked.eval is not None:
        stamps, evaluated = stamps | checked.eval.stamps, checked.eval.conversations()
        if recipe.data.eval_answers:
            sample = Sample(checked.eval, processor, recipe, config.seq_length)
    require_fp8(options, config)
    if torch.cuda.is_available():
        join_processes(options)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    pictures = int(plan.batch.images_per_row) * asked.per_device_train_batch_size
    side = processor.image_processor.size["height"]
    loading = loader_options(asked.others, here, pictures, side)
    # Before the model: it makes from_pretrained load straight into the shards of ZeRO-3.
    arguments = arguments_of(plan, evaluated is not None, loading)
    join_processes(options)  # on a CPU after transformers has: else DeepSpeed does, and compiles
    plan.require_true()
    set_seed(asked.seed)  # adapters are random
    quiet_transformers()
    if arguments.process_index:
        disable_progress_bar()
    with doing("loading the model", tells=arguments.process_index == 0):
        model = build_model(options, base)
    eval_collator = ConversationCollator(processor, stamps)
    collator: Callable = eval_collator
    rows: Any = checked.conversations()
    rows_of_batches = checked.batch_rows()
    if rows_of_batches.shares is not None:
        rows = PackedRows(rows, rows_of_batches.shares)
        collator = PackingCollator(processor, stamps)
    if recipe.data.is_streamed:
        of_process = arguments.train_batch_size * arguments.gradient_accumulation_steps
        rows = Stream(
            recipe.data.sources(),
            arguments.train_batch_size,
            (arguments.process_index, arguments.world_size),
            arguments.seed if arguments.data_seed is None else arguments.data_seed,
            recipe.data.shuffle_buffer,
            of_process * (0 if plan.checkpoint is None else step_of(plan.checkpoint)),
        )
        collator = StreamCollator(eval_collator, plan.batch.row_length, config.seq_length)
    progress = Progress(
        plan.effective_batch * rows_of_batches.samples_per_row,
        compiles=options.compile is True,
        shows_bar=not arguments.disable_tqdm,
        has_epochs=not recipe.data.is_streamed,
    )
    callbacks: list[TrainerCallback] = [
        CheckpointSchedule(plan.origin(checked), asked.save_total_limit)
    ]
    if (patience := asked.early_stopping_patience) is not None:
        callbacks.append(EarlyStoppingCallback(patience, asked.early_stopping_threshold))
    trainer = RecipeTrainer(
        model,
        recipe,
        features=features_of(recipe.data.reuse_features, model),
        eval_collator=eval_collator,
        sample=sample,
        worker_start=worker_start(options.offload, asked.others),
        args=arguments,
        train_dataset=rows,
        eval_dataset=evaluated,
        data_collator=collator,
        processing_class=processor,
        callbacks=callbacks,
    )
    for theirs in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(theirs)
    trainer.add_callback(progress)
    disable_progress_bar()
    return trainer, progress


def _require_result(plan: Plan, state: TrainerState) -> None:
    """Raise :class:`NoResult`, on all processes, if a training has ended that has not learned."""
    done, may_end_early = state.global_step, plan.recipe.trainer.early_stopping_patience is not None
    if done == 0 or (done < plan.steps and not may_end_early):
        raise NoResult(
            f"training ended after step {done:,} of {plan.steps:,}, and nothing asked it to: no "
            f"model is saved; {plan.rows:,} rows in batches of {plan.effective_batch:,} were "
            "planned with"
        )
    logged = [entry for entry in state.log_history if "loss" in entry]
    if logged and not any(entry["loss"] or entry.get("grad_norm") for entry in logged):
        raise NoResult(
            f"the loss and the gradients of all {done:,} steps were 0: no row could be learned "
            "from, and no model is saved; expected rows that can be used (data.train), or "
            "data.on_bad: fail, which says what is wrong with them"
        )


def _how_to_go_on(plan: Plan) -> str:
    checkpoint = last_complete_checkpoint(plan.path.parent)
    lower = f"a lower trainer.learning_rate than {plan.recipe.trainer.highest_rate:g}"
    if checkpoint is None:
        return f"\nno checkpoint is complete: start again with {lower}, or check model and data"
    return (
        f"\nthe last complete checkpoint is {checkpoint}: to go on from its weights, start a run "
        f"with that folder as model, another out, and {lower}"
    )


def _report(
    plan: Plan, trainer: RecipeTrainer, measured: dict[str, float | None], error: Exception | None
) -> dict[str, Any]:
    def entries(kind: str, *names: str) -> list[dict[str, Any]]:
        found = [entry for entry in trainer.state.log_history if kind in entry]
        return [{n: as_json(e[n]) for n in ("step", kind, *names) if n in e} for e in found]

    if "peak_allocated_gib" in measured:
        measured = measured | {"predicted_gib": plan.needed / GIB}
    report: dict[str, Any] = {
        "finished": error is None,
        "error": None if error is None else str(error),
        "history": entries("loss", "grad_norm"),
        "steps": {"asked": trainer.args.max_steps, "done": trainer.state.global_step},
        "world_size": trainer.args.world_size,
        "measured": measured,
        "policies": plan.options.policies,
        "base": identify(replace(plan.base, adapters=None)),
        "length": plan.recipe.trainer.length,
    }
    if found := entries("eval_loss", "eval_tokens", "eval_exact_match", "eval_runtime"):
        report["evaluations"] = found
    if trainer.args.load_best_model_at_end:
        report["best_step"] = trainer.state.best_global_step
    if plan.recipe.data.is_streamed:
        report["left_out"] = trainer.faults.number
    return report


def build_model(options: EngineOptions, base: Base) -> nn.Module:
    """The model, loaded and prepared (:func:`prepare_model`)."""
    load = partial(GLM4VForCausalLM.from_pretrained, base.model, revision=base.revision or "main")
    model = prepare_model(options, load, base.adapters)
    adapters: Any = getattr(model, "peft_config", None)
    if base.revision is not None and adapters is not None:
        adapters["default"].revision = base.revision
    if adapters is not None and os.path.isdir(base.model):  # else they load from here alone
        adapters["default"].base_model_name_or_path = os.path.abspath(base.model)
    return model


def _round_trained(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
