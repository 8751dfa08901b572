"""Prepare a run, start its processes on this machine, and wait for them."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.rows import require_first_rows
from ..engine.environment import (
    python_module_command,
    rank_environments,
    single_process_environment,
    training_environment,
)
from ..models.base import pin_revision, read_training_report, require_unchanged_base
from ..models.check_weights import require_complete_model
from ..models.find import remind_about_cogagent
from ..models.placement import Placement
from ..terminal_text import (
    no_progress,
    own_command,
    pluralize,
    printable,
    show_progress,
    write_line,
)
from .checkpoints import last_complete_checkpoint, rename_incomplete_checkpoints
from .job import Job
from .run_folder import (
    CHECKED_DATA,
    RECIPE,
    check_run_folder,
    close_record,
    locked,
    require_lockable,
    start_record,
)

if TYPE_CHECKING:
    from ..data.checked_data import CheckedData
    from .plan import Plan


class TrainingStopped(KeyboardInterrupt):
    """Ctrl-C or a signal ended the training; the message says how to resume it.

    ``signum`` is the signal.
    """

    def __init__(self, message: str, signum: signal.Signals):
        super().__init__(message)
        self.signum = signum


def launch(
    job: Job,
    placement: Placement,
    resume: bool | Path = False,
    overwrite: bool = False,
    accept_changed_data: bool = False,
    dry_run: bool = False,
) -> None:
    """Train a job in processes of this machine.

    The processes use DeepSpeed, with NCCL on GPUs and gloo on the CPU. With ``engine.zero_stage`` 0
    there is one process, without DeepSpeed, NCCL and gloo. All training processes end when this
    call ends or this process is killed. Until then, no other run can write to ``job.out``.

    Args:
        job: From :func:`job.resolve_recipe`.
        placement: From :func:`preflight.validate_recipe`.
        resume: The checkpoint to resume from; or True for the last complete checkpoint in
            ``job.out`` (the beginning if there is none). Incomplete checkpoints of later steps are
            renamed.
        overwrite: Whether to remove the files of earlier runs in ``job.out``, once the data has
            been checked; see :mod:`run_folder`.
        accept_changed_data: Whether the rows may differ from those of the checkpoint.
        dry_run: Run all checks and print the summary (:mod:`summary`), but do not train.

    Raises:
        RuntimeError: The training failed or diverged.
        ValueError: The data cannot be used; the disk or the memory is too small; ``job.out`` has
            files that may not be replaced, or another run writes to it; the checkpoint is
            incomplete, or was saved with other settings, another model or other data.
        TrainingStopped: Ctrl-C, SIGTERM or SIGHUP.
    """
    with prepared(job, placement, resume, overwrite, accept_changed_data, dry_run) as plan:
        if dry_run:
            write_line("nothing was trained, and nothing written (--dry-run)")
        else:
            _run_training(plan)


@contextmanager
def prepared(
    job: Job,
    placement: Placement,
    resume: bool | Path = False,
    overwrite: bool = False,
    accept_changed_data: bool = False,
    dry_run: bool = False,
) -> Iterator["Plan"]:
    """Check the job, plan it, print the summary, and write the plan to ``job.out``.

    This runs once, before the training processes. ``job.out`` stays locked until the block ends; a
    dry run neither creates nor locks it. Arguments and errors are those of :func:`launch`.
    """
    folder = job.out
    if dry_run:
        require_lockable(folder)
        plan, _, _ = _check_and_plan(job, placement, resume, overwrite, accept_changed_data)
        yield plan
        return
    with locked(folder):
        plan, checked, old_names = _check_and_plan(
            job, placement, resume, overwrite, accept_changed_data
        )
        with _recorded(folder, old_names, job.has_adapters):
            if resume:
                rename_incomplete_checkpoints(folder, after_step=plan.steps_done)
            job.with_base(plan.base).write(folder / RECIPE)
            checked.write(folder / CHECKED_DATA)
            plan.write()
            yield plan


def _check_and_plan(
    job: Job, placement: Placement, resume: bool | Path, overwrite: bool, accept_changed_data: bool
) -> tuple["Plan", "CheckedData", list[str]]:
    """Run all checks, the cheapest first, and print the summary.

    Returns:
        The plan, the checked data, and the names of earlier runs' files to remove from ``job.out``.
    """
    old_names = check_run_folder(
        job.out,
        job.inputs,
        job.trainer.run_length,
        job.has_adapters,
        resume=bool(resume),
        overwrite=overwrite,
    )
    if job.data.on_bad == "fail":
        require_first_rows(job.data.all_sources())
    with show_progress("checking the model"):  # imports transformers
        job = require_model(job)
    # torch is imported here, so that the problems above are reported at once.
    with show_progress("loading torch and transformers"):
        from ..models.loading import load_model_config
        from .disk import max_checkpoints_on_disk, needed_space, require_disk_space
        from .plan import check_data, find_start_checkpoint, make_plan
        from .summary import describe_plan
    out, config = str(job.out), load_model_config(job.base)
    max_checkpoints = max_checkpoints_on_disk(job.trainer, job.data.saves_at_bad_row)
    require_disk_space(out, needed_space(out, config, job.options, max_checkpoints))
    # If files are to be removed, there is nothing to resume.
    checkpoint = None if old_names else find_start_checkpoint(job, placement.processes, resume)
    with show_progress("reading rows and images"):
        checked = check_data(job)
    plan = make_plan(job, placement, checked, checkpoint, accept_changed_data)
    write_line(printable(describe_plan(plan, checked), allow="\n\t"))
    plan.require_memory_and_disk()
    if checkpoint is not None:
        write_line(f"training resumes from {checkpoint}, after step {plan.steps_done}")
    elif resume:
        write_line(f"no complete checkpoint in {job.out}: training starts from the beginning")
    return plan, checked, old_names


@contextmanager
def _recorded(folder: Path, old_names: list[str], adapters: bool) -> Iterator[None]:
    """Remove files of earlier runs, and list this run's files in ``run.json``, however it ends."""
    start_record(folder, old_names)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # if the disk is full, the first error is the one to report
            close_record(folder, adapters)
        raise
    close_record(folder, adapters)


def require_model(job: Job) -> Job:
    """Check the base model, and return the job with the model's commit on the Hub.

    Raises:
        ValueError: The model is missing or incomplete, or not the one that its adapters were
            trained on.
    """
    base = pin_revision(job.base)
    require_unchanged_base(base)
    require_complete_model(base.model, base.revision, job.from_scratch, job.options.trained)
    if base.adapters is not None:
        from ..models.limits import (
            require_valid_adapters,
        )  # late: transformers and peft are imported

        require_valid_adapters(base)
    else:
        remind_about_cogagent(base)
    return job.with_base(base)


def _run_training(plan: "Plan") -> None:
    """Start the training processes, and raise if one fails or the training is stopped."""
    recipe = plan.path.with_name(RECIPE)
    processes, on_cpu = plan.placement.processes, plan.placement.on_cpu
    environments = [single_process_environment(on_cpu)]
    if plan.options.zero_stage:
        common = training_environment(processes, on_cpu)
        environments = [common | variables for variables in rank_environments(processes)]
    command = python_module_command("glm4v_patched.finetune.process", str(plan.path))
    try:
        failure = _run_processes(command, environments)
    except KeyboardInterrupt as stop:
        signum = stop.signum if isinstance(stop, TrainingStopped) else signal.SIGINT
        message = f"training was stopped by {signum.name}{_how_to_resume(plan)}"
        raise TrainingStopped(message, signum) from None
    if not failure:
        return
    settings = f" (settings: {recipe})"
    if error := read_training_report(recipe.parent).get("error"):
        # The cause may be a bad row of a stream, which the user can correct before resuming.
        hint = _how_to_resume(plan) if plan.is_streamed else ""
        raise RuntimeError(f"{error}{settings}{hint}")
    raise RuntimeError(
        f"training on {pluralize(processes, 'process')} failed: {failure}{settings}"
        f"{_how_to_resume(plan)}"
    )


def _how_to_resume(plan: "Plan") -> str:
    """Return the command that resumes a run, for the end of a message."""
    checkpoint = last_complete_checkpoint(plan.path.parent)
    if checkpoint is None and plan.arguments["save_strategy"] == "no":
        return "\nno weights were saved: set trainer.save_steps to save checkpoints"
    start = checkpoint or "the beginning, because no checkpoint is complete"
    options = ["--processes", str(plan.placement.processes)]
    if plan.placement.on_cpu:
        options += ["--device", "cpu"]
    command = own_command("train", str(plan.path.with_name(RECIPE)), *options, "--resume")
    return f"\nto resume from {start}:\n  {command}"


def _run_processes(command: list[str], environments: list[dict[str, str]]) -> str:
    """Run a command once in each environment; all processes end with this one.

    If one fails, the others are killed.

    Returns:
        How a process failed; "" if none failed.
    """
    with _signals_as_exceptions(), no_progress():  # the training processes print their progress
        # A training process ends when its stdin closes; only this process holds the other end. Each
        # training process has its own session, so Ctrl-C does not reach it or its children.
        processes = [
            subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, start_new_session=True)
            for variables in environments
        ]
        try:
            while True:
                statuses = [process.poll() for process in processes]
                if any(statuses) or None not in statuses:
                    return _describe_statuses(statuses, processes)
                time.sleep(0.05)
        finally:
            for process in processes:
                with suppress(ProcessLookupError):  # the whole group has ended
                    os.killpg(process.pid, signal.SIGKILL)
            for process in processes:
                process.communicate()


def _describe_statuses(statuses: list[int | None], processes: list[subprocess.Popen]) -> str:
    """Describe how a process failed; return "" if none failed.

    Args:
        statuses: Exit status of each process, or None if it still runs.
    """
    failed = [(status, rank) for rank, status in enumerate(statuses) if status]
    if not failed:
        return ""
    # If several failed, describe one that a signal ended (its status is negative): the others may
    # have failed because of it.
    status, rank = min(failed)
    name = f"process {rank} (PID {processes[rank].pid})"
    if status == -signal.SIGKILL:
        return (
            f"{name} was killed (SIGKILL), as the system does when memory runs out: free some "
            "memory, or lower trainer.per_device_train_batch_size or "
            "trainer.dataloader_num_workers"
        )
    if status < 0:
        return f"{name} was ended by {signal.Signals(-status).name}"
    return f"{name} ended with status {status}; the first error above says why"


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Raise ``TrainingStopped`` on SIGTERM, and on SIGHUP unless SIGHUP is ignored (nohup)."""

    def stop(signum: int, frame) -> None:
        raise TrainingStopped("", signal.Signals(signum))

    signals = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    old_handlers = {signum: signal.signal(signum, stop) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in old_handlers.items():
            signal.signal(signum, handler)
