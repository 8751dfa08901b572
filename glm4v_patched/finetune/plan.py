"""What a run will do, decided once.

The launcher makes a :class:`Plan`, says it (:mod:`summary`) and writes it; every process of the
training reads it and decides nothing. What is printed, also by ``--dry-run`` and ``doctor``, is
what runs.
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
from ..data.checked_data import BatchSequences, CheckedData
from ..data.workers import loader_options
from ..engine import memory_check
from ..engine.gpus import free_bytes_per_gpu
from ..engine.memory_plan import (
    GIB,
    NON_TORCH_BYTES,
    Batch,
    decide_options,
    estimate_peak_bytes,
    min_free_gpu_memory,
    apply_memory_limit,
)
from ..engine.options import EngineOptions
from ..models.base import ModelSource, identify, read_report
from ..models.loading import load_model_config, load_processor
from ..models.placement import Placement
from .checkpoints import (
    ResumeFingerprint,
    RowDigests,
    data_changes,
    last_complete_checkpoint,
    read_checkpoint_manifest,
    require_checkpoint,
    require_same_run,
    checkpoint_step,
)
from .disk import DiskSpace, checkpoints_at_once, needed_space, require_disk_space
from .job import Job
from .recipe.trainer import is_longer
from .run_folder import CHECKED_DATA, PLAN
from .schedule import require_schedule
from .steps import require_batches, require_evaluations
from .training_arguments import LoopOptions, loop_options, training_arguments

# How much longer a row of a stream may be than the longest that was looked at before.
LONGER = 1.25


@dataclass(frozen=True)
class Plan:
    """What a run will do.

    Args:
        arguments: Of transformers' ``TrainingArguments``, all that are not its defaults.
        loop: What those have no field for.
        base: The model and the adapters on it, pinned.
        files: Digests of them (:func:`identify`).
        data: Digest of what the check found of the rows.
        placement: On what the processes run.
        options: Of the engine, decided.
        stream_buffer: Of a stream, from how many rows the next is drawn; None of other data.
        reuse_features: What ``data.reuse_features`` says.
        answers: Rows for evaluation that are answered, and tokens of an answer.
        settings: What a continuation must have the same (:meth:`Job.settings`).
        length: How long the run was asked to be.
        shown: Of :class:`Job`.
        batch: The largest of one process.
        rows: That are learned in an epoch; packed ones, if they are packed; of a stream those that
            were looked at.
        steps: All that are trained, those before the checkpoint among them.
        steps_an_epoch: In which all rows are learned once.
        free: Bytes free on each GPU when this was decided, the least of them; 0 on a CPU.
        needed: Bytes of each GPU that a step takes at most, as estimated.
        space: Of the disk.
        checkpoint: What is continued from, in ``out``.
        changes: Of the rows since the checkpoint was written, which were accepted; a line each.
    """

    arguments: dict[str, Any]
    loop: LoopOptions
    base: ModelSource
    files: dict[str, str]
    data: str
    placement: Placement
    options: EngineOptions
    stream_buffer: int | None
    reuse_features: bool | str
    answers: tuple[int, int]
    settings: dict[str, Any]
    length: dict[str, float]
    shown: dict[str, Any]
    batch: Batch
    rows: int
    steps: int
    steps_an_epoch: int
    free: float
    needed: float
    space: DiskSpace
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
        """Rows of an update of the weights, of all processes."""
        each = self.arguments["per_device_train_batch_size"]
        return each * self.arguments["gradient_accumulation_steps"] * self.placement.processes

    @property
    def steps_done(self) -> int:
        """Those before the checkpoint."""
        return 0 if self.checkpoint is None else checkpoint_step(self.checkpoint)

    @property
    def is_tight(self) -> bool:
        """Whether a step may not fit onto a GPU, as estimated."""
        return 0 < self.free < self.needed + NON_TORCH_BYTES

    def write(self) -> None:
        write_atomically(self.path, TypeAdapter(Plan).dump_json(self, indent=2) + b"\n")

    @classmethod
    def read(cls, path: Path) -> "Plan":
        return TypeAdapter(cls).validate_json(path.read_bytes())

    def checked_data(self) -> CheckedData:
        """What the check found. Raises ``ValueError`` if it is of another check."""
        path = self.out / CHECKED_DATA
        checked = CheckedData.read(path)
        if (found := digest_data(checked)) != self.data:
            raise ValueError(
                f"{path} has rows with digest {found}, and the run was planned with {self.data}: "
                "start the training again, so that they are checked"
            )
        return checked

    def fingerprint(self, checked: CheckedData) -> ResumeFingerprint:
        decides = self.arguments["load_best_model_at_end"] or self.loop.patience is not None
        decides = decides or self.arguments["save_strategy"] == "best"
        return ResumeFingerprint(self.settings, self.files, digest_rows(checked, decides))

    def require_memory_and_disk(self) -> None:
        """Raise ``ValueError`` where the training surely does not fit into this machine's memory,
        or onto its disk."""
        config, share = load_model_config(self.base), self.placement.share
        fault = memory_check.find_memory_problem(config, self.options, self.batch, self.free, share)
        if fault:
            raise ValueError(fault)
        require_disk_space(str(self.out), self.space)

    def require_same_conditions(self) -> None:
        """See that this process, which has joined the others, finds what was planned with.

        Raises:
            ValueError: another number of processes, or another model under this path.
            RuntimeError: less free memory on a GPU.
        """
        processes = int(os.environ.get("WORLD_SIZE", 1))
        if processes != self.placement.processes:
            raise ValueError(
                f"the run was planned for {self.placement.processes} processes, and {processes} "
                "take part: start the training again"
            )
        if (files := identify(self.base)) != self.files:
            names = sorted(n for n in files | self.files if files.get(n) != self.files.get(n))
            told = [f"{n}: {self.files.get(n)} planned, {files.get(n)} here" for n in names]
            raise ValueError(f"{self.base.model} is another model here:\n  " + "\n  ".join(told))
        if not self.free:
            return
        # What is outside of torch is there by now: the driver's context, and NCCL's buffers.
        free = min_free_gpu_memory(self.options.memory_limit)
        if free < self.free - NON_TORCH_BYTES:
            raise RuntimeError(
                f"the run was planned with {self.free / GIB:.1f} GiB free on each GPU, and a GPU "
                f"has {free / GIB:.1f} GiB now: something else uses it. Start the training again, "
                "to plan with what is free, or see to it that the GPUs are free"
            )


def make_plan(
    job: Job,
    placement: Placement,
    checked: CheckedData,
    checkpoint: Path | None = None,
    accept_changed_data: bool = False,
) -> Plan:
    """Decide all that is open, for such rows and this machine.

    Args:
        job: Whose model is pinned.
        checkpoint: Of :func:`find_start_checkpoint`.
        accept_changed_data: Whether the checkpoint's rows may have been others.

    Raises:
        ValueError: they were, and may not; or the run would have no batch, no evaluation that it
            needs, or no learning rate that can train.
    """
    config, trainer = load_model_config(job.base), job.trainer
    rows = checked.batch_sequences()
    require_batches(job, len(rows.lengths), placement.processes)
    batch = largest_batch(job, rows, placement.processes)
    steps_an_epoch = trainer.steps_in_epoch(len(rows.lengths), placement.processes)
    steps = trainer.total_steps(steps_an_epoch)
    require_evaluations(trainer, checked, steps, steps_an_epoch)
    here = placement.local_processes or placement.processes
    free = 0.0 if placement.on_cpu else float(min(free_bytes_per_gpu(here)))
    free = apply_memory_limit(free, job.options.memory_limit)
    options = decide_options(config, job.options, batch, free, steps)
    images = int(batch.images_per_sequence) * batch.num_sequences
    arguments = training_arguments(
        job,
        options,
        steps,
        steps_an_epoch,
        on_cpu=placement.on_cpu,
        evaluates=checked.eval is not None,
        continues=checkpoint is not None,
        loading=loader_options(trainer.undeclared_fields, here, images, config.vision.image_size),
    )
    require_schedule(arguments)
    checkpoints = checkpoints_at_once(trainer, job.data.ends_at_bad_row, steps)
    plan = Plan(
        arguments=arguments,
        loop=loop_options(job, options),
        base=job.base,
        files=identify(job.base),
        data=digest_data(checked),
        placement=placement,
        options=options,
        stream_buffer=job.data.shuffle_buffer if job.data.is_streamed else None,
        reuse_features=job.data.reuse_features,
        answers=(job.data.eval_answers, job.data.eval_max_new_tokens),
        settings=job.settings(placement.processes),
        length=trainer.length,
        shown=job.shown,
        batch=batch,
        rows=len(rows.lengths),
        steps=steps,
        steps_an_epoch=steps_an_epoch,
        free=free,
        needed=estimate_peak_bytes(config, options, batch),
        space=needed_space(str(job.out), config, options, checkpoints),
        checkpoint=checkpoint,
    )
    if checkpoint is None:
        return plan
    changes = data_changes(checkpoint, plan.fingerprint(checked).rows, accept_changed_data)
    return replace(plan, changes=tuple(changes))


def digest_data(checked: CheckedData) -> str:
    """sha256 of the rows that are learned and evaluated, their sets and how they are packed."""
    learned = [repr(checked.sources), repr(checked.eval_option), repr(checked.pack_to)]
    learned += checked.row_digests
    evaluated = [] if checked.eval is None else ["evaluated", *checked.eval.row_digests]
    return _sha256_of_lines([*learned, *evaluated])


def find_start_checkpoint(job: Job, processes: int, resume: bool | Path) -> Path | None:
    """The checkpoint in ``out`` to continue from, or None to start from the beginning.

    Args:
        resume: True, for the last complete checkpoint, if there is one; or a checkpoint in ``out``.

    Raises:
        ValueError: that cannot be continued from, or is of a run with other settings or another
            model.
    """
    folder = job.out
    if not resume:
        return None
    if resume is True:
        checkpoint = last_complete_checkpoint(folder)
    else:
        checkpoint = resume
        require_checkpoint(folder, checkpoint)
    if checkpoint is None:
        if read_report(folder).get("finished"):
            raise ValueError(
                f"the training in {folder} is finished and left no checkpoint, so that it cannot "
                "be made longer; to train further, give a new run that folder as model"
            )
        return None
    settings = job.settings(processes)
    there = read_checkpoint_manifest(checkpoint)["settings"]
    length = {f"trainer.{name}": value for name, value in job.trainer.length.items()}
    if is_longer({name: there[name] for name in length if name in there}, length):
        settings |= {name: there[name] for name in length}
    require_same_run(checkpoint, settings, identify(job.base))
    return checkpoint


def check_data(job: Job) -> CheckedData:
    """Check the rows that are asked for, for the model; :func:`check_sources` has more.

    What is returned belongs into ``CHECKED_DATA`` in ``out``, where every process reads it.

    Raises:
        ValueError: rows cannot be used, or their images would have another size than the model's.
    """
    processor, config = load_processor(job.base), load_model_config(job.base)
    places, wanted = processor.num_image_tokens, config.vision.num_image_tokens
    if places != wanted:
        raise ValueError(
            f"{job.base.model}: its images take {places:,} positions, and the model's "
            f"{wanted:,}: image_size was lost when the tokenizer was saved; expected "
            f'"image_size": {config.vision.image_size} in tokenizer_config.json'
        )
    return check_sources(
        job.data.sources(),
        processor,
        config.seq_length,
        evaluate=job.data.evaluated(),
        pack_to=job.data.pack_to,
        on_bad=job.data.on_bad,
        num_precheck=job.data.first,
    )


def largest_batch(job: Job, rows: BatchSequences, processes: int) -> Batch:
    """The largest batch of one of so many processes."""
    longest = int(rows.lengths.max())
    return Batch(
        num_sequences=job.trainer.per_device_train_batch_size,
        sequence_length=int(longest * LONGER) if job.data.is_streamed else longest,
        images_per_sequence=int(rows.images.max()),
        processes=processes,
        accumulates=job.trainer.gradient_accumulation_steps > 1,
    )


def digest_rows(checked: CheckedData, with_evaluated: bool) -> RowDigests:
    """What a run that continues has to have the same.

    Args:
        with_evaluated: Whether rows for evaluation decide what is saved, or when the run ends.
    """
    evaluated = None
    if checked.eval is not None and with_evaluated:
        evaluated = _sha256_of_lines(checked.eval.row_digests)
    return RowDigests(len(checked.row_digests), _sha256_of_lines(checked.row_digests), evaluated)


def _sha256_of_lines(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
