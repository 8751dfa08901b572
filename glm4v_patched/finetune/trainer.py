"""transformers' Trainer adapted to this model: saving, evaluation, divergence, learning rates."""

import logging
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.dynamic_module_utils import custom_object_save
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..atomic import apply_umask
from ..data.feature_cache import TowerFeatures
from ..data.stored_rows import ConversationDataset
from ..data.stream import BAD_ROWS_KEY, UNREADABLE_KEY, StreamDataset
from ..data.workers import BATCHES_AHEAD, workers_that_fit
from ..engine.options import part_of_parameter
from ..remote.configuration_chatglm import TESTED_TRANSFORMERS
from ..remote.loss import IGNORE_INDEX
from ..remote.modeling_chatglm import GLM4VForCausalLM
from ..terminal_text import show_progress
from .bad_rows import BadRowTracker
from .checkpoints import (
    ResumeFingerprint,
    delete_all_but_newest,
    find_checkpoint_problems,
    write_checkpoint_manifest,
)
from .divergence import Diverged, DivergenceMonitor, max_over_processes, require_finite_weights
from .evaluation import EvalGenerations, in_eval_mode, shard_batches
from .training_arguments import LoopOptions

logger = logging.getLogger(__name__)

# Private methods of transformers' Trainer that this module overrides or calls.
PRIVATE_METHODS = ("_determine_best_metric", "_load_best_model", "_save_checkpoint")


class RecipeTrainer(Trainer):
    """Trainer of a glm-4v or of LoRA adapters on one.

    During training, the Trainer and this class change ``eos_token_id`` and ``skip_logits`` of the
    model's config; a model or checkpoint is saved with the original values. The model's code is
    saved beside adapters, so that a process without this package can load the base model.

    Args:
        model: A glm-4v, or peft's model around one.
        loop: Options that ``TrainingArguments`` has no field for.
        features: Cache of the vision tower's features; cached images skip the tower.
        eval_collator: Collator for ``eval_dataset``, if it differs from ``data_collator``.
        eval_generations: Generates answers at each evaluation.
        options: Arguments of transformers' Trainer.

    Attributes:
        glm4v: ``model``, or the glm-4v inside of peft's model.
        divergence: The callback that ends a diverged run.
        bad_rows: The callback that ends the run of a stream at a row that cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        loop: LoopOptions,
        features: TowerFeatures | None = None,
        eval_collator: Callable | None = None,
        eval_generations: EvalGenerations | None = None,
        **options,
    ):
        for name in PRIVATE_METHODS:
            assert hasattr(Trainer, name), (
                f"transformers {transformers.__version__} has no Trainer.{name}; install a tested "
                f"release: {TESTED_TRANSFORMERS}"
            )
        self.rates, self.worker_start_method = loop.rates, loop.worker_start_method
        self.eval_generations = eval_generations
        self.eval_collator = eval_collator or options["data_collator"]
        self.divergence = DivergenceMonitor(loop.max_nonfinite_steps)
        self.bad_rows = BadRowTracker(ends_run=loop.fail_on_bad_rows)
        self.features = features
        if features is not None:
            options["data_collator"] = features.collator(options["data_collator"])
            self.eval_collator = features.collator(self.eval_collator)
        self.has_adapters = hasattr(model, "get_base_model")
        untyped: Any = model
        self.glm4v: GLM4VForCausalLM = untyped.get_base_model() if self.has_adapters else untyped
        if self.has_adapters:
            # By default, peft asks the Hub for the base's config, to detect resized embeddings.
            untyped.save_pretrained = partial(untyped.save_pretrained, save_embedding_layers=False)
        # The model has three end tokens. The Trainer replaces them by the tokenizer's single one,
        # and save_model restores them.
        self.eos_token_ids = self.glm4v.config.eos_token_id
        # The model as the Trainer calls it, and the inputs of its last training step.
        self._last_call: tuple[nn.Module, dict] | None = None
        self._optimizer_defaults: dict[str, Any] = {}
        super().__init__(model=model, **options)
        self.add_callback(self.divergence)
        if isinstance(self.train_dataset, StreamDataset):
            self.add_callback(self.bad_rows)
        self.glm4v.config.skip_logits = True

    def create_optimizer(self, *model) -> torch.optim.Optimizer:
        """Create the Trainer's optimizer, with a learning rate for each part if ``rates`` is set.

        Empty parameter groups, such as LoRA's group without weight decay, are dropped. DeepSpeed
        would drop them, but the scheduler would not, and the first step would fail with "zip()
        argument 2 is longer".
        """
        optimizer = super().create_optimizer(*model)
        self._optimizer_defaults = optimizer.defaults
        groups = optimizer.param_groups
        if self.rates is not None:
            assert self.model is not None
            parts = {id(p): part_of_parameter(name) for name, p in self.model.named_parameters()}
            groups = [
                {
                    **group,
                    "params": [p for p in group["params"] if parts[id(p)] == part],
                    "lr": rate,
                }
                for group in groups
                for part, rate in self.rates.items()
            ]
        optimizer.param_groups[:] = [group for group in groups if group["params"]]
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """Create the Trainer's scheduler.

        Some schedules read ``optimizer.defaults``, which DeepSpeed's optimizers lack.
        """
        assert self.optimizer is not None
        self.optimizer.defaults = self._optimizer_defaults
        return super().create_scheduler(num_training_steps, optimizer)

    def get_train_dataloader(self):
        if isinstance(self.train_dataset, StreamDataset):
            # A stream yields only the rows of this process. accelerate's loader would shard them
            # again, or let process 0 read the rows of all processes.
            args, rows = self.args, self.train_dataset
            workers, prefetch = args.dataloader_num_workers, args.dataloader_prefetch_factor
            pin_memory = args.dataloader_pin_memory and torch.cuda.is_available()
            options = {"batch_size": rows.batch_size, "pin_memory": pin_memory}
            return self._make_loader(rows, self.data_collator, workers, prefetch, **options)
        loader: Any = super().get_train_dataloader()
        if self.worker_start_method and loader.num_workers:
            # accelerate's loader wraps torch's loader, which starts the workers.
            loader.base_dataloader.multiprocessing_context = self.worker_start_method
        return loader

    def _make_loader(
        self, rows, collator, workers: int, prefetch: int | None, **options
    ) -> DataLoader:
        if workers:
            options |= {
                "prefetch_factor": prefetch,
                "multiprocessing_context": self.worker_start_method,
            }
        # Without a generator of its own, the loader would advance torch's global generator.
        generator = torch.Generator()
        options |= {"collate_fn": collator, "num_workers": workers, "generator": generator}
        return DataLoader(rows, **options)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.features is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = self.features.replace_images(inputs)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.features.cache_new(outputs)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model, inputs, *rest):
        self.bad_rows.record(inputs.pop(BAD_ROWS_KEY, []), inputs.pop(UNREADABLE_KEY, []))
        self._last_call = model, dict(inputs)
        loss = super().training_step(model, inputs, *rest)
        # DeepSpeed has the norm of this step only after the last of its accumulated batches.
        has_norm = self.is_deepspeed_enabled and self.accelerator.sync_gradients
        norm = model.get_global_grad_norm() if has_norm else None
        return self.divergence.record(loss, norm)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """Return the metrics of an evaluation, after logging them and calling the callbacks.

        The metrics are the mean loss of all supervised tokens, the number of these tokens, the
        share of generated answers that match exactly, and the seconds that the evaluation took.
        """
        started = time.monotonic()
        loss, tokens = self._mean_loss(self.eval_dataset if eval_dataset is None else eval_dataset)
        metrics = {f"{metric_key_prefix}_loss": loss, f"{metric_key_prefix}_tokens": tokens}
        if self.eval_generations is not None:
            exact_match = 0.0  # a model with a loss of NaN generates no answers
            if math.isfinite(loss):
                with self.compute_loss_context_manager():
                    is_main_process = self.is_world_process_zero()
                    exact_match = self.eval_generations.answer(self.model, is_main_process)
            # The processes may generate different answers. All of them use the score of process 0,
            # because all must agree on the best step.
            score = torch.tensor(exact_match, dtype=torch.float64, device=self.args.device)
            if torch.distributed.is_initialized():
                torch.distributed.broadcast(score, 0)
            metrics[f"{metric_key_prefix}_exact_match"] = score.item()
        metrics[f"{metric_key_prefix}_runtime"] = round(time.monotonic() - started, 3)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        if self.state.global_step == 0:
            self._save_initial_checkpoint(metrics)
        return metrics

    def _save_initial_checkpoint(self, metrics: dict[str, float]) -> None:
        """If the best weights are kept, save the initial ones as a checkpoint: they may be best."""
        keeps_best = self.args.load_best_model_at_end or self.args.save_strategy == "best"
        self.control.should_save = keeps_best
        if self._determine_best_metric(metrics, None) and keeps_best:
            self._save_checkpoint(self.model_wrapped, None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    @torch.no_grad()
    def _mean_loss(self, rows: Any) -> tuple[float, int]:
        """Return the mean loss of all supervised tokens of ``rows``, and their number.

        The rows are sharded over the processes; the result is the same on all of them. torch's
        random state does not change.
        """
        batch_size, workers = self.args.per_device_eval_batch_size, self.args.dataloader_num_workers
        if workers and isinstance(rows, ConversationDataset):
            # The workers of the training loader still occupy shared memory with their batches.
            local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            max_images = rows.max_images * batch_size
            workers = workers_that_fit(workers, local_world_size, max_images)
        batches, batch_weights = shard_batches(len(rows), batch_size)
        loader = self._make_loader(
            rows, self.eval_collator, workers, BATCHES_AHEAD, batch_sampler=batches
        )
        totals = torch.zeros(2, dtype=torch.float64, device=self.args.device)  # loss sum, tokens
        is_printed, num_batches = self.is_world_process_zero(), len(batches)
        with (
            in_eval_mode(self.model_wrapped),
            show_progress("evaluating", is_printed, num_batches, "batch") as progress,
        ):
            for batch, weight in zip(loader, batch_weights, strict=True):
                num_tokens = (batch["labels"][:, 1:] != IGNORE_INDEX).sum().to(totals)
                loss_sum = self._sum_of_losses(dict(batch)).to(totals)
                totals += weight * torch.stack([loss_sum, num_tokens])
                progress.update()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(totals)
        loss_sum, num_tokens = totals.tolist()
        return loss_sum / max(num_tokens, 1), int(num_tokens)

    def _sum_of_losses(self, inputs: dict) -> torch.Tensor:
        """Return the sum of the losses of all supervised tokens of a batch."""
        inputs = cast(dict, self._prepare_inputs(inputs))
        if self.features is not None:
            inputs = self.features.replace_images(inputs)
        # In eval mode the model returns logits and a cache by default.
        options = {"num_items_in_batch": 1, "skip_logits": True, "use_cache": False}
        with self.compute_loss_context_manager():
            outputs = self.model_wrapped(**inputs, **options)
        if self.features is not None:
            self.features.cache_new(outputs)
        return outputs.loss

    def _determine_best_metric(self, metrics, trial) -> bool:
        """Update the best metric, and return whether ``save_strategy: best`` saves a checkpoint.

        With ``load_best_model_at_end``, a step can be the best only if its weights are saved, in a
        checkpoint or at the end of the run.
        """
        state, stops = self.state, self.control.should_training_stop
        # A run that a bad row ends saves a checkpoint, from which it can be resumed.
        ends_by_bad_row = self.bad_rows.has_ended_run
        # After the last step, the model itself is saved instead of a checkpoint.
        is_over = state.global_step >= state.max_steps or (stops and not ends_by_bad_row)
        if is_over:
            self.control.should_save = False
        saves_best = self.args.save_strategy == "best"
        is_finite = not self.divergence.is_nonfinite
        is_saved = is_over or (is_finite if saves_best else self.control.should_save)
        if self.args.load_best_model_at_end and not is_saved:
            return False
        is_best = False
        if math.isfinite(metrics["eval_loss"]):
            is_best = super()._determine_best_metric(metrics, trial)
        if is_best and is_saved:
            # With save_strategy: best, transformers 4.57 does not record best_global_step. No
            # release records step 0.
            step, folder = state.global_step, cast(str, self.args.output_dir)
            state.best_global_step = step
            if not is_over:
                state.best_model_checkpoint = str(Path(folder, f"{PREFIX_CHECKPOINT_DIR}-{step}"))
        return not is_over and (ends_by_bad_row or (is_best and is_finite))

    def _load_best_model(self) -> None:
        # The last step has no checkpoint. If it is the best step, the model has its weights.
        if self.state.best_global_step != self.state.global_step:
            super()._load_best_model()

    def log(self, logs: dict[str, float], *rest) -> None:
        if "loss" in logs:
            # self.divergence has replaced nonfinite losses by 0. Add them, so that the logged mean
            # is NaN or infinite, too.
            logs["loss"] += self.divergence.pop_nonfinite_loss()
        super().log(logs, *rest)

    def _require_finite_loss(self) -> None:
        """Raise ``Diverged`` if the loss of the last batch is not finite with the final weights.

        The loss of the last training step was computed before its optimizer step.
        """
        if self._last_call is None:
            return
        model, inputs = self._last_call
        # Stay in training mode, in which a process without an image takes part in the same
        # collectives as the others. Use eager mode, because compiled layers would be recompiled for
        # a call without gradients.
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices),
            torch.compiler.set_stance("force_eager"),
            self.compute_loss_context_manager(),
        ):
            loss = self.compute_loss(model, self._prepare_inputs(dict(inputs)))
        if max_over_processes((~torch.isfinite(loss)).long().reshape(1))[0]:
            raise Diverged(
                "the loss of the last batch is NaN or infinite with the weights of step "
                f"{self.state.global_step}, which are not saved"
            )

    def _save_checkpoint(self, model, trial) -> None:
        with show_progress("saving a checkpoint", enabled=self.is_world_process_zero()):
            super()._save_checkpoint(model, trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model or the adapters.

        Raises:
            Diverged: A weight or the loss is not finite; on all processes.
        """
        assert self.model is not None
        trained = ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
        require_finite_weights(trained, "weights have become NaN or infinite")
        self._require_finite_loss()
        config = self.glm4v.config
        config.eos_token_id = self.eos_token_ids
        config.skip_logits = False
        try:
            with show_progress("saving the weights", enabled=self.is_world_process_zero()):
                super().save_model(output_dir, _internal_call)
        finally:
            config.skip_logits = True
        if not self.args.should_save:
            return
        folder = Path(output_dir or cast(str, self.args.output_dir))
        if self.has_adapters:
            custom_object_save(self.glm4v, folder)
        apply_umask(folder)


class CheckpointCallback(TrainerCallback):
    """Marks checkpoints as complete, deletes old ones, and evaluates after the last step.

    A resumed run logs, saves and evaluates at its own intervals instead of those in the
    checkpoint. All processes must see one file system. The Trainer's own ``save_total_limit`` must
    stay unset: it deletes the old checkpoint before the new one is complete.

    Args:
        fingerprint: Settings and digests that a run must share to resume from these checkpoints.
        num_kept: How many of the newest complete checkpoints to keep, or None for all. Incomplete
            checkpoints, links, and the checkpoint with the best evaluation are never deleted.
    """

    def __init__(self, fingerprint: ResumeFingerprint, num_kept: int | None = None):
        self.fingerprint, self.num_kept = fingerprint, num_kept

    def on_train_begin(self, args, state, control, **kwargs):
        # The state of a checkpoint has the intervals and the folder of the run that wrote it.
        state.compute_steps(args, state.max_steps)
        if state.best_global_step is not None and args.load_best_model_at_end:
            best = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
            state.best_model_checkpoint = str(best)
            if find_checkpoint_problems(best, contents=False):
                logger.warning(
                    "%s, which has the best evaluation so far, is incomplete: only evaluations of "
                    "this run count",
                    best,
                )
                state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def on_step_end(self, args, state, control, **kwargs):
        """Log before each evaluation and checkpoint, so that a checkpoint has the whole history."""
        is_last = state.global_step >= state.max_steps
        if is_last:
            # Older releases of transformers do not evaluate before they load the best weights.
            control.should_evaluate |= args.eval_strategy == "steps"
            # The model itself is saved after the last step. A run resumed from a checkpoint of that
            # step would make one step too many.
            control.should_save = False
        if control.should_evaluate or control.should_save or is_last:
            # Otherwise the losses since the last log entry would be missing from the history, at
            # the end or in a resumed run.
            control.should_log = args.logging_strategy != "no"
        return control

    def on_save(self, args, state, control, **kwargs):
        args.distributed_state.wait_for_everyone()
        if state.is_world_process_zero:
            folder = Path(args.output_dir)
            saved = folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            write_checkpoint_manifest(saved, self.fingerprint)
            if self.num_kept is not None:
                delete_all_but_newest(folder, self.num_kept, state.best_model_checkpoint)
