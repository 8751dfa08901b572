"""Train by a plan: the code that every training process runs."""

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import TrainerState, TrainingArguments

from ..atomic import write_atomically
from ..data.checked_data import CheckedData
from ..data.collate import ConversationCollator
from ..data.image_files import FileStamp
from ..data.packing import PackedDataset, PackingCollator
from ..data.stream import StreamDataset, StreamingCollator
from ..engine.fp8 import require_fp8
from ..engine.memory_plan import GIB
from ..engine.options import EngineOptions, is_lora
from ..engine.prepare import PRECISION_DTYPES, prepare_model
from ..models.base import TRAINING_REPORT, ModelSource, identify
from ..models.loading import load_model_config, load_processor
from ..remote.modeling_chatglm import GLM4VForCausalLM
from ..terminal_text import Activity, show_progress
from .adapter_card import write_card
from .assembly import build_trainer, init_training
from .checkpoints import last_complete_checkpoint
from .divergence import Diverged, NoResult, json_number
from .evaluation import EvalGenerations
from .plan import Plan
from .progress import Progress
from .run_folder import CONTACT_SHEET, remove_weights
from .safe_unpickling import loading_safely
from .trainer import CheckpointCallback, RecipeTrainer


def train(plan: Plan) -> None:
    """Train by a plan, and save the model or the adapters to ``out``.

    Process 0 then writes ``training.json`` there: whether the training has finished, the history of
    loss and gradient norm, speed and memory, the number of processes, and digests of the base
    model's files. In fp32 on a CPU, the losses and weights of a resumed run equal those of an
    uninterrupted run bit for bit.

    Raises:
        ValueError, RuntimeError: The conditions of the plan do not hold here
            (:meth:`Plan.require_same_conditions`), or the data has changed.
        Diverged: Loss, gradients or weights have become NaN or infinite; ``out`` has no model.
        BadRow: A row of a stream cannot be used; ``out`` has a checkpoint.
        NoResult: The run ended before its last step for an unknown reason, or all losses and
            gradients were 0; ``out`` has no model. All processes raise this class and its
            subclasses ``Diverged`` and ``BadRow``.
        SystemExit: The GPU of this process cannot be used (:func:`assembly.init_training`).
    """
    is_printed = os.environ.get("RANK", "0") == "0" and not plan.arguments.get("disable_tqdm")
    done = plan.steps_done
    with show_progress("training", is_printed, plan.steps, "step", done) as activity:
        _train(plan, activity)


def _train(plan: Plan, activity: Activity) -> None:
    """Train by a plan; see :func:`train`. ``activity`` counts the steps."""
    error: NoResult | None = None
    trainer, progress = _make_trainer(plan, activity)
    try:
        # Only DeepSpeed's checkpoints need this: transformers itself loads with weights_only.
        with loading_safely() if plan.options.zero_stage else nullcontext():
            checkpoint = None if plan.checkpoint is None else str(plan.checkpoint)
            trainer.train(resume_from_checkpoint=checkpoint)
        if trainer.divergence.verdict is not None:
            raise Diverged(trainer.divergence.verdict)
        if plan.is_streamed:
            trainer.bad_rows.conclude(trainer.state.global_step)
        _require_result(plan, trainer.state)
        if plan.options.zero_stage == 0:
            _round_trained(trainer.glm4v, PRECISION_DTYPES[plan.options.precision])
        trainer.save_model()
    except Diverged as diverged:
        error = Diverged(f"training diverged: {diverged}{_how_to_retry(plan)}")
    except NoResult as no_result:
        error = no_result
    if trainer.is_world_process_zero():
        if error is not None:
            remove_weights(plan.out)
        report = _report(plan, trainer, progress.measurements(), error)
        if error is None and is_lora(plan.options.trained):
            write_card(plan.out, plan.base, plan.public_values, report, plan.num_rows)
        write_atomically(plan.out / TRAINING_REPORT, json.dumps(report, indent=2, allow_nan=False))
    if error is not None:
        # The launcher kills all processes when one fails, so wait until the report is written.
        trainer.args.distributed_state.wait_for_everyone()
        raise error


def _make_trainer(plan: Plan, activity: Activity) -> tuple[RecipeTrainer, Progress]:
    """Join the process group, and build the trainer with the plan's model, rows and callbacks."""
    checked, processor = plan.checked_data(), load_processor(plan.base)
    require_fp8(plan.options, load_model_config(plan.base))
    arguments = init_training(plan.options, plan.arguments)
    plan.require_same_conditions()
    trainer = build_trainer(
        partial(build_model, plan.options, plan.base),
        arguments,
        plan.loop,
        callbacks=[CheckpointCallback(plan.fingerprint(checked), plan.loop.keep_checkpoints)],
        reuse_features=plan.reuse_features,
        processing_class=processor,
        **_training_data(plan, checked, processor, arguments),
        **_eval_data(plan, checked, processor),
    )
    progress = Progress(
        plan.effective_batch * checked.epoch_sequences().samples_per_sequence,
        activity,
        compiles=plan.options.compile is True,
        has_epochs=not plan.is_streamed,
    )
    trainer.add_callback(progress)
    return trainer, progress


def _training_data(
    plan: Plan, checked: CheckedData, processor: Any, arguments: TrainingArguments
) -> dict[str, Any]:
    """Return the training data set (conversations, packs or a stream) and its collator."""
    collator = ConversationCollator(processor, _stamps(checked))
    if plan.stream_buffer is not None:
        batch_size = arguments.train_batch_size
        shard = arguments.process_index, arguments.world_size
        seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
        rows_per_step = batch_size * arguments.gradient_accumulation_steps  # of this process
        num_done = plan.steps_done * rows_per_step
        stream = StreamDataset(
            checked.sources, batch_size, shard, seed, plan.stream_buffer, num_done
        )
        max_positions = load_model_config(plan.base).seq_length
        return {
            "train_dataset": stream,
            "data_collator": StreamingCollator(collator, plan.batch.sequence_length, max_positions),
        }
    conversations, packs = checked.conversations(), checked.epoch_sequences().packs
    if packs is not None:
        return {
            "train_dataset": PackedDataset(conversations, packs),
            "data_collator": PackingCollator(processor, _stamps(checked)),
        }
    return {"train_dataset": conversations, "data_collator": collator}


def _eval_data(plan: Plan, checked: CheckedData, processor: Any) -> dict[str, Any]:
    """Return the evaluation data set, its collator, and the generations, if there are any."""
    if checked.eval is None:
        return {}
    eval_generations = EvalGenerations(
        checked.eval,
        processor,
        sheet=plan.out / CONTACT_SHEET,
        max_rows=plan.eval_answers,
        max_new_tokens=plan.eval_max_new_tokens,
        batch_size=plan.arguments["per_device_eval_batch_size"],
        max_positions=load_model_config(plan.base).seq_length,
    )
    return {
        "eval_dataset": checked.eval.conversations(),
        "eval_collator": ConversationCollator(processor, _stamps(checked)),
        "eval_generations": eval_generations if plan.eval_answers else None,
    }


def _stamps(checked: CheckedData) -> dict[str, FileStamp]:
    """Return the stamp of each image file when it was checked, by path."""
    return checked.stamps | ({} if checked.eval is None else checked.eval.stamps)


def _require_result(plan: Plan, state: TrainerState) -> None:
    """Raise :class:`NoResult` on all processes if the run ended too early or trained nothing."""
    done, may_end_early = state.global_step, plan.loop.patience is not None
    if done == 0 or (done < plan.steps and not may_end_early):
        raise NoResult(
            f"training ended after step {done:,} of {plan.steps:,} for an unknown reason, and no "
            f"model is saved; the plan was for {plan.num_rows:,} rows in batches of "
            f"{plan.effective_batch:,}"
        )
    logged = [entry for entry in state.log_history if "loss" in entry]
    if logged and not any(entry["loss"] or entry.get("grad_norm") for entry in logged):
        raise NoResult(
            f"the loss and the gradients of all {done:,} steps were 0: no row has supervised "
            "tokens, and no model is saved; expected rows that can be used (data.train), or "
            "data.on_bad: fail, which says what is wrong with them"
        )


def _how_to_retry(plan: Plan) -> str:
    """Return what to do after a divergence, for the end of a message."""
    checkpoint = last_complete_checkpoint(plan.path.parent)
    lower = f"a lower trainer.learning_rate than {plan.arguments['learning_rate']:g}"
    if checkpoint is None:
        return f"\nno checkpoint is complete: start again with {lower}, or check model and data"
    return (
        f"\nthe last complete checkpoint is {checkpoint}: to train on from its weights, start a "
        f"run with that folder as model, another out, and {lower}"
    )


def _report(
    plan: Plan, trainer: RecipeTrainer, measured: dict[str, float | None], error: Exception | None
) -> dict[str, Any]:
    """Return the contents of ``training.json``."""

    def logged(key: str, *names: str) -> list[dict[str, Any]]:
        """Return the log entries that have ``key``: their step, ``key``, and values by name."""
        return [
            {name: json_number(entry[name]) for name in ("step", key, *names) if name in entry}
            for entry in trainer.state.log_history
            if key in entry
        ]

    if "peak_allocated_gib" in measured:
        measured = measured | {"predicted_gib": plan.needed_bytes / GIB}
    report: dict[str, Any] = {
        "finished": error is None,
        "error": None if error is None else str(error),
        "history": logged("loss", "grad_norm"),
        "steps": {"asked": trainer.args.max_steps, "done": trainer.state.global_step},
        "world_size": trainer.args.world_size,
        "measured": measured,
        "policies": plan.options.policies,
        "base": identify(replace(plan.base, adapters=None)),
        "length": plan.length,
    }
    if evaluations := logged("eval_loss", "eval_tokens", "eval_exact_match", "eval_runtime"):
        report["evaluations"] = evaluations
    if trainer.args.load_best_model_at_end:
        report["best_step"] = trainer.state.best_global_step
    if plan.is_streamed:
        report["left_out"] = trainer.bad_rows.num_skipped
    return report


def build_model(options: EngineOptions, base: ModelSource) -> nn.Module:
    """Load the model, and prepare it for training (:func:`prepare_model`)."""
    load = partial(GLM4VForCausalLM.from_pretrained, base.model, revision=base.revision or "main")
    model = prepare_model(options, load, base.adapters)
    adapters: Any = getattr(model, "peft_config", None)
    if base.revision is not None and adapters is not None:
        adapters["default"].revision = base.revision
    # With a relative path, the saved adapters would find their base only from this folder.
    if adapters is not None and os.path.isdir(base.model):
        adapters["default"].base_model_name_or_path = os.path.abspath(base.model)
    return model


def _round_trained(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the trained weights, which are fp32 without ZeRO, to the dtype of the saved model."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
