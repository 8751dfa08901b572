"""transformers' Trainer for this model: what is saved, which losses count, evaluation."""

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
from ..data.stream import ROW_PROBLEMS, UNREADABLE, StreamDataset
from ..data.workers import BATCHES_AHEAD, workers_that_fit
from ..engine.options import part_of_parameter
from ..remote.configuration_chatglm import TESTED_TRANSFORMERS
from ..remote.loss import IGNORE_INDEX
from ..remote.modeling_chatglm import GLM4VForCausalLM
from .checkpoints import ResumeFingerprint, delete_all_but_newest, find_checkpoint_problems, write_checkpoint_manifest
from .divergence import Diverged, DivergenceMonitor, max_over_processes, require_finite_weights
from .evaluation import EvalGenerations, in_eval_mode, shard_batches
from .bad_rows import BadRowTracker
from .training_arguments import LoopOptions

logger = logging.getLogger(__name__)

# Private names of the Trainer.
PRIVATE = ("_determine_best_metric", "_load_best_model", "_save_checkpoint")


class RecipeTrainer(Trainer):
    """Saves the model with the config it came with, in checkpoints too: they can be loaded.

    Adapters get the code beside them, with which a process without this package loads their base.

    Args:
        model: A glm-4v, or peft's around one.
        loop: What is asked that ``TrainingArguments`` has no field for.
        features: With it, images that they know do not go through the tower.
        eval_collator: Of the rows of ``eval_dataset``, where it is not that of training.
        sample: Rows that are answered at each evaluation.
    """

    def __init__(
        self,
        model: nn.Module,
        loop: LoopOptions,
        features: TowerFeatures | None = None,
        eval_collator: Callable | None = None,
        sample: EvalGenerations | None = None,
        **options,
    ):
        for name in PRIVATE:
            assert hasattr(Trainer, name), (
                f"transformers {transformers.__version__} has no Trainer.{name}; install a tested "
                f"release: {TESTED_TRANSFORMERS}"
            )
        self.rates, self.sample, self.worker_start = loop.rates, sample, loop.worker_start
        self.eval_collator = eval_collator or options["data_collator"]
        self.watch = DivergenceMonitor(loop.max_nonfinite_steps)
        self.faults = BadRowTracker(ends=loop.fail_on_bad_rows)
        self.features = features
        if features is not None:
            options["data_collator"] = features.collator(options["data_collator"])
            self.eval_collator = features.collator(self.eval_collator)
        self.has_adapters = hasattr(model, "get_base_model")
        given: Any = model
        self.inner: GLM4VForCausalLM = given.get_base_model() if self.has_adapters else given
        if self.has_adapters:
            # To see whether embeddings have grown, peft would ask the Hub for its newest config.
            given.save_pretrained = partial(given.save_pretrained, save_embedding_layers=False)
        # The Trainer puts the tokenizer's one end token in place of the model's three.
        self.stop_ids = self.inner.config.eos_token_id
        self._last_step: tuple[nn.Module, dict] | None = None
        self._defaults: dict[str, Any] = {}
        super().__init__(model=model, **options)
        self.add_callback(self.watch)
        if isinstance(self.train_dataset, StreamDataset):
            self.add_callback(self.faults)
        self.inner.config.skip_logits = True

    def create_optimizer(self, *model) -> torch.optim.Optimizer:
        """The Trainer's, with a learning rate for each part and without groups in which nothing is
        trained.

        Of LoRA all weights decay and those that do not are none. DeepSpeed drops such a group, the
        scheduler keeps a rate for it, and the first step ends in "zip() argument 2 is longer".
        """
        optimizer = super().create_optimizer(*model)
        self._defaults = optimizer.defaults
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
        """The Trainer's. Some schedules read ``optimizer.defaults``, which DeepSpeed's lack."""
        assert self.optimizer is not None
        self.optimizer.defaults = self._defaults
        return super().create_scheduler(num_training_steps, optimizer)

    def get_train_dataloader(self):
        if isinstance(self.train_dataset, StreamDataset):
            # accelerate would share its rows out a second time, or send all from one process.
            args, rows = self.args, self.train_dataset
            workers, ahead = args.dataloader_num_workers, args.dataloader_prefetch_factor
            pinned = args.dataloader_pin_memory and torch.cuda.is_available()
            how = {"batch_size": rows.batch_size, "pin_memory": pinned}
            return self._loader(rows, self.data_collator, workers, ahead, **how)
        loader: Any = super().get_train_dataloader()
        if self.worker_start and loader.num_workers:
            # accelerate's loader hands on what its inner one reads.
            loader.base_dataloader.multiprocessing_context = self.worker_start
        return loader

    def _loader(self, rows, collator, workers: int, ahead: int | None, **how) -> DataLoader:
        if workers:
            how |= {"prefetch_factor": ahead, "multiprocessing_context": self.worker_start}
        # Without a generator it draws a seed from everybody's.
        how |= {"collate_fn": collator, "num_workers": workers, "generator": torch.Generator()}
        return DataLoader(rows, **how)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.features is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = self.features.replace_images(inputs)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.features.keep(outputs)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model, inputs, *rest):
        self.faults.see(inputs.pop(ROW_PROBLEMS, []), inputs.pop(UNREADABLE, []))
        self._last_step = model, dict(inputs)
        loss = super().training_step(model, inputs, *rest)
        # Until all batches of a step are there, DeepSpeed has the norm of the step before.
        knows = self.is_deepspeed_enabled and self.accelerator.sync_gradients
        norm = model.get_global_grad_norm() if knows else None
        return self.watch.see(loss, norm)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """The mean loss of all learned tokens of the rows for evaluation, without their logits;
        and of some of them, the share of answers that are the row's own."""
        started = time.monotonic()
        loss, tokens = self._mean_loss(self.eval_dataset if eval_dataset is None else eval_dataset)
        metrics = {f"{metric_key_prefix}_loss": loss, f"{metric_key_prefix}_tokens": tokens}
        if self.sample is not None:
            matches = 0.0  # of a model whose loss is NaN there is no answer
            if math.isfinite(loss):
                with self.compute_loss_context_manager():
                    matches = self.sample.answer(self.model, self.is_world_process_zero())
            # A token may fall otherwise on another GPU, and all have to save and to end together.
            same = torch.tensor(matches, dtype=torch.float64, device=self.args.device)
            if torch.distributed.is_initialized():
                torch.distributed.broadcast(same, 0)
            metrics[f"{metric_key_prefix}_exact_match"] = same.item()
        metrics[f"{metric_key_prefix}_runtime"] = round(time.monotonic() - started, 3)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        if self.state.global_step == 0:
            self._keep_start(metrics)
        return metrics

    def _keep_start(self, metrics: dict[str, float]) -> None:
        """The weights before the first step may stay the best."""
        keeps_best = self.args.load_best_model_at_end or self.args.save_strategy == "best"
        self.control.should_save = keeps_best
        if self._determine_best_metric(metrics, None) and keeps_best:
            self._save_checkpoint(self.model_wrapped, None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    @torch.no_grad()
    def _mean_loss(self, rows: Any) -> tuple[float, int]:
        """The mean loss of all supervised tokens of ``rows``, and their number; the same on all
        processes, of which each computes its share. No random number is drawn."""
        each, workers = self.args.per_device_eval_batch_size, self.args.dataloader_num_workers
        if workers and isinstance(rows, ConversationDataset):
            # Those of training still hold batches in shared memory.
            here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            workers = workers_that_fit(workers, here, rows.max_images * each)
        share, weights = shard_batches(len(rows), each)
        loader = self._loader(rows, self.eval_collator, workers, BATCHES_AHEAD, batch_sampler=share)
        totals = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        with in_eval_mode(self.model_wrapped):
            for batch, weight in zip(loader, weights, strict=True):
                tokens = (batch["labels"][:, 1:] != IGNORE_INDEX).sum().to(totals)
                totals += weight * torch.stack(
                    [self._sum_of_losses(dict(batch)).to(totals), tokens]
                )
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(totals)
        total, number = totals.tolist()
        return total / max(number, 1), int(number)

    def _sum_of_losses(self, inputs: dict) -> torch.Tensor:
        inputs = cast(dict, self._prepare_inputs(inputs))
        if self.features is not None:
            inputs = self.features.replace_images(inputs)
        # In eval mode the model would return logits and a cache unless it is told.
        asked = {"num_items_in_batch": 1, "skip_logits": True, "use_cache": False}
        with self.compute_loss_context_manager():
            outputs = self.model_wrapped(**inputs, **asked)
        if self.features is not None:
            self.features.keep(outputs)
        return outputs.loss

    def _determine_best_metric(self, metrics, trial) -> bool:
        """Whether to save a checkpoint where the best are saved. What is best has one, or is what
        the run ends with."""
        state, stops = self.state, self.control.should_training_stop
        is_over = state.global_step >= state.max_steps or (stops and not self.faults.has_ended)
        if is_over:
            self.control.should_save = False
        saves_best = self.args.save_strategy == "best"
        is_kept = is_over or (not self.watch.is_bad if saves_best else self.control.should_save)
        if self.args.load_best_model_at_end and not is_kept:
            return False
        if not math.isfinite(metrics["eval_loss"]):  # whatever its metric says, it is no model
            return self.faults.has_ended and not is_over
        is_best = super()._determine_best_metric(metrics, trial)
        if is_best and is_kept:
            # transformers 4.57 does not note those of "best", nor any release step 0.
            step, folder = state.global_step, cast(str, self.args.output_dir)
            state.best_global_step = step
            if not is_over:
                state.best_model_checkpoint = str(Path(folder, f"{PREFIX_CHECKPOINT_DIR}-{step}"))
        return (is_best and not self.watch.is_bad or self.faults.has_ended) and not is_over

    def _load_best_model(self) -> None:
        # Of the last step there is no checkpoint, and the best weights are those that are here.
        if self.state.best_global_step != self.state.global_step:
            super()._load_best_model()

    def log(self, logs: dict[str, float], *rest) -> None:
        if "loss" in logs:
            logs["loss"] += self.watch.pop_nonfinite_loss()
        super().log(logs, *rest)

    def _require_finite_loss(self) -> None:
        """Compute the loss of the last batch again: no step has seen the last update's weights."""
        if self._last_step is None:
            return
        model, inputs = self._last_step
        # In training mode, as processes without an image then keep the others' order. Compiled
        # layers would be compiled anew without gradients.
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

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Raises :class:`Diverged`, on all processes, if a weight or the loss is not finite."""
        assert self.model is not None
        trained = ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
        require_finite_weights(trained, "weights have become NaN or infinite")
        self._require_finite_loss()
        config = self.inner.config
        config.eos_token_id = self.stop_ids
        config.skip_logits = False
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            config.skip_logits = True
        if not self.args.should_save:
            return
        folder = Path(output_dir or cast(str, self.args.output_dir))
        if self.has_adapters:
            custom_object_save(self.inner, folder)
        apply_umask(folder)


class CheckpointSchedule(TrainerCallback):
    """Marks each checkpoint of the Trainer complete and keeps the newest ones, holds a continued
    run to what is asked now, and evaluates after the last step.

    All processes must see one file system. The Trainer's own ``save_total_limit`` must stay unset:
    it deletes the old checkpoint before the new one is complete.

    Args:
        origin: What a run that continues from here must have in common with this one.
        keep: How many complete checkpoints to keep, or None for all; others are never deleted, nor
            are those that are links, nor the one with the best evaluation.
    """

    def __init__(self, fingerprint: ResumeFingerprint, keep: int | None = None):
        self.fingerprint, self.keep = fingerprint, keep

    def on_train_begin(self, args, state, control, **kwargs):
        # The Trainer goes by what the checkpoint's run was asked for: how often it saved and
        # logged, and where its folder was.
        state.compute_steps(args, state.max_steps)
        if state.best_global_step is not None and args.load_best_model_at_end:
            best = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
            state.best_model_checkpoint = str(best)
            if find_checkpoint_problems(best, contents=False):
                told = "%s, with the best evaluation, is not complete: the best of those to come is"
                logger.warning(told + " taken", best)
                state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def on_step_end(self, args, state, control, **kwargs):
        """A step is logged, then evaluated, then saved: a checkpoint has what came before it."""
        is_last = state.global_step >= state.max_steps
        if is_last:
            # Before the best weights are loaded; older transformers do not do it by themselves.
            control.should_evaluate |= args.eval_strategy == "steps"
            # The trained model is about to be saved itself, and from a checkpoint of the last step
            # the Trainer would resume into one step more.
            control.should_save = False
        if control.should_evaluate or control.should_save or is_last:
            # A mean loss that spans a checkpoint would be lost in part, or that of the end.
            control.should_log = args.logging_strategy != "no"
        return control

    def on_save(self, args, state, control, **kwargs):
        args.distributed_state.wait_for_everyone()
        if state.is_world_process_zero:
            folder = Path(args.output_dir)
            saved = folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            write_checkpoint_manifest(saved, self.fingerprint)
            if self.keep is not None:
                delete_all_but_newest(folder, self.keep, state.best_model_checkpoint)
