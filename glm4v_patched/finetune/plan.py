"""The class :class:`Plan`: all decisions of a run, made once.

The launcher makes the plan, prints its summary (:mod:`summary`) and writes it. Every training
process reads the plan and makes no decision of its own. So a run does what its summary says.
``train --dry-run`` and ``doctor`` print the same summary.
"""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ..atomic import write_atomically
from ..data.check import check_sources
from ..data.checked_data import CheckedData, EpochSequences
from ..data.workers import loader_options
from ..engine import memory_check
from ..engine.gpus import free_bytes_per_gpu
from ..engine.memory_plan import (
    GIB,
    NON_TORCH_BYTES,
    BatchShape,
    apply_memory_limit,
    decide_options,
    estimate_peak_bytes,
    min_free_gpu_memory,
)
from ..engine.options import EngineOptions, Precision, choose_precision
from ..models.base import ModelSource, identify, read_training_report
from ..models.loading import load_model_config, load_processor
from ..models.placement import Placement
from ..terminal_text import pluralize
from .checkpoints import (
    ResumeFingerprint,
    RowDigests,
    checkpoint_step,
    data_changes,
    last_complete_checkpoint,
    read_checkpoint_manifest,
    require_checkpoint,
    require_same_run,
)
from .disk import DiskSpace, max_checkpoints_on_disk, needed_space, require_disk_space
from .job import Job
from .recipe.trainer import is_longer
from .run_folder import CHECKED_DATA, PLAN
from .schedule import require_schedule
from .steps import require_batches, require_evaluations
from .training_arguments import LoopOptions, loop_options, training_arguments

# For a stream, the memory is planned for rows that are longer than the longest checked row by this
# factor.
STREAM_LENGTH_MARGIN = 1.25


@dataclass(frozen=True)
class Plan:
    """All decisions of a run.

    Args:
        arguments: Fields of transformers' ``TrainingArguments`` that differ from its defaults.
        loop: Options of the training loop that ``TrainingArguments`` has no field for.
        base: The base model, with its Hub commit resolved, and the adapters on it.
        file_digests: Digests of the files of ``base`` (:func:`identify`).
        data_digest: Digest of the checked data (:func:`digest_data`).
        placement: The processes and their devices.
        options: Options of the engine, without "auto".
        precision_reason: Why ``options.precision`` was chosen; "" on GPUs or if the recipe sets it.
        stream_buffer: Size of the shuffle buffer of a stream; None for other data.
        reuse_features: Whether to cache the features of images, or the folder of that cache.
        eval_answers: Number of evaluation rows to answer.
        eval_max_new_tokens: Maximum number of tokens of such an answer.
        settings: Values that must be the same when the run is resumed (:meth:`Job.settings`).
        length: Either ``max_steps`` or ``num_train_epochs`` (:attr:`TrainerFields.run_length`).
        ignored_epochs: The recipe's ``num_train_epochs`` if ``max_steps`` overrides it, else None.
        public_values: Values of the recipe that the model card of adapters shows (:class:`Job`).
        batch: Shape of the largest batch of one process.
        num_rows: Number of rows or packed sequences in an epoch; of a stream, the checked rows.
        steps: Optimizer steps of the run, including the steps up to the checkpoint.
        steps_per_epoch: Optimizer steps of one pass over the rows.
        free_bytes: Usable free memory of the fullest GPU when the plan was made; 0 on a CPU.
        needed_bytes: Estimated peak memory of a step on each GPU.
        disk_space: Disk space that the run needs.
        checkpoint: Checkpoint in ``out`` to resume from; None for a new run.
        changes: A line for each accepted change of the rows since the checkpoint.
    """

    arguments: dict[str, Any]
    loop: LoopOptions
    base: ModelSource
    file_digests: dict[str, str]
    data_digest: str
    placement: Placement
    options: EngineOptions
    precision_reason: str
    stream_buffer: int | None
    reuse_features: bool | str
    eval_answers: int
    eval_max_new_tokens: int
    settings: dict[str, Any]
    length: dict[str, float]
    ignored_epochs: float | None
    public_values: dict[str, Any]
    batch: BatchShape
    num_rows: int
    steps: int
    steps_per_epoch: int
    free_bytes: float
    needed_bytes: float
    disk_space: DiskSpace
    checkpoint: Path | None = None
    changes: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return self.out / PLAN

    @property
    def out(self) -> Path:
        return Path(self.arguments["output_dir"])

    @property
    def is_streamed(self) -> bool:
        return self.stream_buffer is not None

    @property
    def effective_batch(self) -> int:
        """Return the number of rows in an optimizer step of all processes."""
        batch_size = self.arguments["per_device_train_batch_size"]
        accumulation = self.arguments["gradient_accumulation_steps"]
        return batch_size * accumulation * self.placement.processes

    @property
    def steps_done(self) -> int:
        """Return the step of the checkpoint that the run resumes from; 0 for a new run."""
        return 0 if self.checkpoint is None else checkpoint_step(self.checkpoint)

    @property
    def is_tight(self) -> bool:
        """Return whether, by the estimate, a step may exceed a GPU's memory."""
        return 0 < self.free_bytes < self.needed_bytes + NON_TORCH_BYTES

    def write(self) -> None:
        """Write the plan to the run's folder as JSON."""
        write_atomically(self.path, TypeAdapter(Plan).dump_json(self, indent=2) + b"\n")

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """Read a plan."""
        return TypeAdapter(cls).validate_json(path.read_bytes())

    def checked_data(self) -> CheckedData:
        """Read the result of the data check.

        Raises:
            ValueError: The rows have changed since the plan was made.
        """
        path = self.out / CHECKED_DATA
        checked = CheckedData.read(path)
        if (digest := digest_data(checked)) != self.data_digest:
            raise ValueError(
                f"{path} has rows with digest {digest}, and the run was planned with "
                f"{self.data_digest}: start the training again, so that the rows are checked"
            )
        return checked

    def fingerprint(self, checked: CheckedData) -> ResumeFingerprint:
        """Return the settings and digests that must be the same when this run is resumed."""
        evaluations_affect_result = (
            self.arguments["load_best_model_at_end"]
            or self.arguments["save_strategy"] == "best"
            or self.loop.patience is not None
        )
        rows = digest_rows(checked, with_eval=evaluations_affect_result)
        return ResumeFingerprint(self.settings, self.file_digests, rows)

    def require_memory_and_disk(self) -> None:
        """Raise ``ValueError`` if the training surely exceeds this machine's memory or disk."""
        config = load_model_config(self.base)
        if problem := memory_check.find_memory_problem(
            config, self.options, self.batch, self.free_bytes, self.placement.local_process_share
        ):
            raise ValueError(problem)
        require_disk_space(str(self.out), self.disk_space)

    def require_same_conditions(self) -> None:
        """Check in a training process that the conditions of the plan hold.

        Raises:
            ValueError: The number of processes or the model differs.
            RuntimeError: A GPU has less free memory.
        """
        processes = int(os.environ.get("WORLD_SIZE", 1))
        if processes != self.placement.processes:
            planned = pluralize(self.placement.processes, "process")
            raise ValueError(
                f"the run was planned for {planned}, and {processes} take part: start the training "
                "again"
            )
        digests, planned_digests = identify(self.base), self.file_digests
        if digests != planned_digests:
            lines = [
                f"{name}: {planned_digests.get(name)} planned, {digests.get(name)} here"
                for name in sorted(digests.keys() | planned_digests)
                if planned_digests.get(name) != digests.get(name)
            ]
            raise ValueError(f"{self.base.model} is another model here:\n  " + "\n  ".join(lines))
        if not self.free_bytes:
            return
        # Since then, this process has allocated the CUDA context and NCCL's buffers, too.
        free = min_free_gpu_memory(self.options.memory_limit)
        if free < self.free_bytes - NON_TORCH_BYTES:
            raise RuntimeError(
                f"the run was planned with {self.free_bytes / GIB:.1f} GiB free on each GPU, and a "
                f"GPU has {free / GIB:.1f} GiB now: another process uses it. Free the GPUs, or "
                "start the training again, to plan with what is free"
            )


def make_plan(
    job: Job,
    placement: Placement,
    checked: CheckedData,
    checkpoint: Path | None = None,
    accept_changed_data: bool = False,
) -> Plan:
    """Decide all that the job leaves open, for the checked rows and this machine.

    Args:
        job: The job; the Hub commit of its base model must be resolved.
        checkpoint: The checkpoint to resume from, from :func:`find_start_checkpoint`.
        accept_changed_data: Whether the rows may differ from those of the checkpoint.

    Raises:
        ValueError: The rows differ from the checkpoint's without ``accept_changed_data``; or the
            run would have no batch, lack a necessary evaluation, or have an invalid learning rate.
    """
    config, trainer = load_model_config(job.base), job.trainer
    sequences = checked.epoch_sequences()
    require_batches(job, len(sequences.lengths), placement.processes)
    batch = largest_batch(job, sequences, placement.processes)
    steps_per_epoch = trainer.steps_in_epoch(len(sequences.lengths), placement.processes)
    steps = trainer.total_steps(steps_per_epoch)
    require_evaluations(trainer, checked, steps, steps_per_epoch)
    local_world_size = placement.local_world_size
    free_bytes = 0.0 if placement.on_cpu else float(min(free_bytes_per_gpu(local_world_size)))
    free_bytes = apply_memory_limit(free_bytes, job.options.memory_limit)
    precision, reason = _choose_precision(job.options.precision, placement.on_cpu, checkpoint)
    with_precision = replace(job.options, precision=precision)
    options = decide_options(config, with_precision, batch, free_bytes, steps)
    images_per_batch = int(batch.images_per_sequence) * batch.num_sequences
    arguments = training_arguments(
        job,
        options,
        steps,
        steps_per_epoch,
        on_cpu=placement.on_cpu,
        evaluates=checked.eval is not None,
        resumes=checkpoint is not None,
        loading=loader_options(
            trainer.other_training_arguments,
            local_world_size,
            images_per_batch,
            config.vision.image_size,
        ),
    )
    require_schedule(arguments)
    max_checkpoints = max_checkpoints_on_disk(trainer, job.data.saves_at_bad_row, steps)
    plan = Plan(
        arguments=arguments,
        loop=loop_options(job, options),
        base=job.base,
        file_digests=identify(job.base),
        data_digest=digest_data(checked),
        placement=placement,
        options=options,
        precision_reason=reason,
        stream_buffer=job.data.shuffle_buffer if job.data.is_streamed else None,
        reuse_features=job.data.reuse_features,
        eval_answers=job.data.eval_answers,
        eval_max_new_tokens=job.data.eval_max_new_tokens,
        settings=job.settings(placement.processes) | {"engine.precision": precision},
        length=trainer.run_length,
        ignored_epochs=trainer.ignored_epochs,
        public_values=job.public_values,
        batch=batch,
        num_rows=len(sequences.lengths),
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        free_bytes=free_bytes,
        needed_bytes=estimate_peak_bytes(config, options, batch),
        disk_space=needed_space(str(job.out), config, options, max_checkpoints),
        checkpoint=checkpoint,
    )
    if checkpoint is None:
        return plan
    changes = data_changes(checkpoint, plan.fingerprint(checked).rows, accept_changed_data)
    return replace(plan, changes=tuple(changes))


def _choose_precision(
    precision: Precision, on_cpu: bool, checkpoint: Path | None
) -> tuple[Precision, str]:
    """Return the precision of a run, and why it was chosen; "" if the recipe sets it."""
    if precision != "auto":
        return precision, ""
    chosen, reason = choose_precision(on_cpu)
    if checkpoint is None:
        return chosen, reason
    saved = read_checkpoint_manifest(checkpoint)["settings"]["engine.precision"]
    return saved, reason if saved == chosen else f"as in {checkpoint.name}"


def digest_data(checked: CheckedData) -> str:
    """Return the sha256 by which training processes verify that they read the planned data.

    It covers the rows for training and evaluation, their sources, ``data.eval`` and
    ``data.pack_to``.
    """
    train_lines = [repr(checked.sources), repr(checked.eval_option), repr(checked.pack_to)]
    train_lines += checked.sample_digests
    eval_lines = [] if checked.eval is None else ["evaluated", *checked.eval.sample_digests]
    return _sha256_of_lines([*train_lines, *eval_lines])


def find_start_checkpoint(job: Job, processes: int, resume: bool | Path) -> Path | None:
    """Return the checkpoint in ``out`` to resume from, or None to start from the beginning.

    Args:
        resume: False for the beginning; True for the last complete checkpoint, if there is one; or
            a checkpoint in ``out``.

    Raises:
        ValueError: The checkpoint is incomplete, or was saved by a run with other settings or
            another model; or the training in ``out`` is finished and left no checkpoint.
    """
    if not resume:
        return None
    checkpoint: Path | None
    if resume is True:
        checkpoint = last_complete_checkpoint(job.out)
    else:
        checkpoint = resume
        require_checkpoint(job.out, checkpoint)
    if checkpoint is None:
        if read_training_report(job.out).get("finished"):
            raise ValueError(
                f"the training in {job.out} is finished and left no checkpoint, so it cannot be "
                "made longer; to train further, start a new run with that folder as model"
            )
        return None
    settings = job.settings(processes)
    saved = read_checkpoint_manifest(checkpoint)["settings"]
    length = {f"trainer.{name}": value for name, value in job.trainer.run_length.items()}
    # A resumed run may be longer than the run that saved the checkpoint, but not shorter.
    if is_longer(before={name: saved[name] for name in length if name in saved}, now=length):
        settings |= {name: saved[name] for name in length}
    if job.options.precision == "auto":  # then _choose_precision takes the checkpoint's precision
        settings["engine.precision"] = saved.get("engine.precision")
    require_same_run(checkpoint, settings, identify(job.base))
    return checkpoint


def check_data(job: Job) -> CheckedData:
    """Check the job's rows for its model; see :func:`check_sources`.

    The caller writes the result to ``CHECKED_DATA`` in ``out``, where every process reads it.

    Raises:
        ValueError: Rows cannot be used, or processor and model have different image sizes.
    """
    processor, config = load_processor(job.base), load_model_config(job.base)
    num_tokens, expected = processor.num_image_tokens, config.vision.num_image_tokens
    if num_tokens != expected:
        raise ValueError(
            f"{job.base.model}: its processor expands an image to {num_tokens:,} tokens, and the "
            f"model takes {expected:,}: image_size was lost when the tokenizer was saved; expected "
            f'"image_size": {config.vision.image_size} in tokenizer_config.json'
        )
    return check_sources(
        job.data.sources(),
        processor,
        config.seq_length,
        evaluate=job.data.eval_sources(),
        pack_to=job.data.pack_to,
        on_bad=job.data.on_bad,
        num_precheck=job.data.num_checked,
    )


def largest_batch(job: Job, sequences: EpochSequences, processes: int) -> BatchShape:
    """Return the shape of the largest batch of one process."""
    longest = int(sequences.lengths.max())
    return BatchShape(
        num_sequences=job.trainer.per_device_train_batch_size,
        sequence_length=int(longest * STREAM_LENGTH_MARGIN) if job.data.is_streamed else longest,
        images_per_sequence=int(sequences.images.max()),
        processes=processes,
        accumulates_gradients=job.trainer.gradient_accumulation_steps > 1,
    )


def digest_rows(checked: CheckedData, with_eval: bool) -> RowDigests:
    """Return the digests by which a resumed run recognizes the rows of its checkpoint.

    Args:
        with_eval: Whether to include the rows for evaluation. Include them if evaluations decide
            which step is saved or at which step the run ends.
    """
    evaluated = None
    if checked.eval is not None and with_eval:
        evaluated = _sha256_of_lines(checked.eval.sample_digests)
    digests = checked.sample_digests
    return RowDigests(len(digests), _sha256_of_lines(digests), evaluated)


def _sha256_of_lines(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
