"""Start a recipe on several processes of this machine and wait for it."""

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
    single_process_environment,
    rank_environments,
    python_module_command,
    training_environment,
)
from ..models.base import pin_revision, read_report, require_recorded_base
from ..models.check_weights import require_complete_model
from ..models.placement import Placement
from ..terminal_text import show_progress, own_command, printable
from .checkpoints import last_complete_checkpoint, set_incomplete_aside
from .job import Job
from .run_folder import (
    CHECKED_DATA,
    RECIPE,
    start_record,
    close_record,
    locked,
    require_lockable,
    require_usable,
)

if TYPE_CHECKING:
    from ..data.checked_data import CheckedData
    from .plan import Plan


class TrainingStopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM ended the training; the message says how to continue it."""

    def __init__(self, message: str, number: signal.Signals):
        super().__init__(message)
        self.number = number


def launch(
    job: Job,
    placement: Placement,
    resume: bool | Path = False,
    overwrite: bool = False,
    accept_changed_data: bool = False,
    dry_run: bool = False,
) -> None:
    """Train with NCCL on GPUs, or with gloo on the CPU; with ``engine.zero_stage`` 0 a single
    process trains without either, and without DeepSpeed.

    No training process outlives this call, nor this process, however it ends. Meanwhile no other
    run can write to ``job.out``.

    Args:
        job: Of :func:`job.resolve_recipe`.
        placement: Of :func:`preflight.validate_recipe`.
        resume: True, to continue from the last complete checkpoint in ``job.out``, or from the
            beginning if there is none; or the checkpoint there to continue from. Incomplete
            checkpoints in the way are renamed.
        overwrite: Whether to remove what earlier runs wrote to ``job.out``, once the data has
            been checked; :mod:`run_folder` has more.
        accept_changed_data: Whether the checkpoint's rows may have been others.
        dry_run: Check all that is checked before the first step, say what would be done
            (:mod:`summary`), and do none of it.

    Raises:
        RuntimeError: the training failed or diverged.
        ValueError: the data cannot be used, the disk or the memory does not suffice,
            ``job.out`` holds what may not be replaced or another run writes to it, the
            checkpoint is incomplete, or of a run with other settings, another model or other data.
        TrainingStopped: Ctrl-C, SIGTERM or SIGHUP.
    """
    start = resume, overwrite, accept_changed_data
    with prepared(job, placement, *start, writes=not dry_run) as plan:
        if dry_run:
            print("nothing was trained, and nothing written (--dry-run)", flush=True)
        else:
            _run_training(plan)


@contextmanager
def prepared(
    job: Job,
    placement: Placement,
    resume: bool | Path = False,
    overwrite: bool = False,
    accept_changed_data: bool = False,
    writes: bool = True,
) -> Iterator["Plan"]:
    """All that comes before the first training process, once for all of them: check all that can be
    checked, decide, say what is about to be done, and write it. ``job.out`` stays locked until
    they have ended; without ``writes`` it is neither made nor locked. Takes and raises what
    :func:`launch` does."""
    folder, start = job.out, (resume, overwrite, accept_changed_data)
    if not writes:
        require_lockable(folder)
        yield _decide(job, placement, *start)[0]
        return
    with locked(folder):
        plan, checked, remove = _decide(job, placement, *start)
        with _recorded(folder, remove, job.has_adapters):
            if resume:
                set_incomplete_aside(folder, after_step=plan.steps_done)
            job.with_base(plan.base).write(folder / RECIPE)
            checked.write(folder / CHECKED_DATA)
            plan.write()
            yield plan


def _decide(
    job: Job, placement: Placement, resume: bool | Path, overwrite: bool, accept: bool
) -> tuple["Plan", "CheckedData", list[str]]:
    """Check all that can be checked, the cheapest first, and say what is about to be done; the
    plan, its rows, and what is to be removed from the run's folder."""
    length, starts = job.trainer.length, (bool(resume), overwrite)
    remove = require_usable(job.out, job.inputs, length, job.has_adapters, *starts)
    if job.data.on_bad == "fail":
        require_first_rows(job.data.all_sources())
    with show_progress("looking at the model"):  # transformers is imported
        job = require_model(job)
    # Late: what comes before is answered at once.
    with show_progress("loading torch and transformers"):
        from ..models.loading import load_model_config
        from .disk import checkpoints_at_once, needed_space, require_disk_space
        from .plan import check_data, make_plan, find_start_checkpoint
        from .summary import describe_plan
    out, checkpoints = str(job.out), checkpoints_at_once(job.trainer, job.data.ends_at_bad_row)
    require_disk_space(out, needed_space(out, load_model_config(job.base), job.options, checkpoints))
    # What is to be removed is nothing to continue from.
    checkpoint = None if remove else find_start_checkpoint(job, placement.processes, resume)
    with show_progress("reading rows and images"):
        checked = check_data(job)
    plan = make_plan(job, placement, checked, checkpoint, accept)
    print(printable(describe_plan(plan, checked), allow="\n\t"), flush=True)
    plan.require_memory_and_disk()
    if checkpoint is not None:
        print(f"training continues from {checkpoint}, after step {plan.steps_done}", flush=True)
    elif resume:
        told = f"no complete checkpoint in {job.out}: training starts from the beginning"
        print(told, flush=True)
    return plan, checked, remove


@contextmanager
def _recorded(folder: Path, remove: list[str], adapters: bool) -> Iterator[None]:
    """Remove what is in the way, and list what the run has written, however it ends."""
    start_record(folder, remove)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # of a full disk, the first error is the one to be told
            close_record(folder, adapters)
        raise
    close_record(folder, adapters)


def require_model(job: Job) -> Job:
    """Return the job with its model pinned. Raises ``ValueError`` if it is not there, not whole, or
    another than its adapters were trained on."""
    base = pin_revision(job.base)
    require_recorded_base(base)
    require_complete_model(base.model, base.revision, job.from_scratch, job.options.trained)
    if base.adapters is not None:
        from ..models.limits import require_adapters  # late: transformers and peft are imported

        require_adapters(base)
    return job.with_base(base)


def _run_training(plan: "Plan") -> None:
    settings = plan.path.with_name(RECIPE)
    processes, on_cpu = plan.placement.processes, plan.placement.on_cpu
    environments = [single_process_environment(on_cpu)]
    if plan.options.zero_stage:
        common = training_environment(processes, on_cpu)
        environments = [common | each for each in rank_environments(processes)]
    command = python_module_command("glm4v_patched.finetune.process", str(plan.path))
    try:
        ended = _run_processes(command, environments)
    except KeyboardInterrupt as stop:
        number = stop.number if isinstance(stop, TrainingStopped) else signal.SIGINT
        told = f"training was stopped by {number.name}{_how_to_resume(plan)}"
        raise TrainingStopped(told, number) from None
    if not ended:
        return
    told = f" (settings: {settings})"
    if error := read_report(settings.parent).get("error"):
        raise RuntimeError(error + told + _how_to_resume(plan) * plan.is_streamed)
    told = f"training on {processes} processes failed: {ended}{told}"
    raise RuntimeError(told + _how_to_resume(plan))


def _how_to_resume(plan: "Plan") -> str:
    checkpoint = last_complete_checkpoint(plan.path.parent)
    if checkpoint is None and plan.arguments["save_strategy"] == "no":
        return "\nno weights are kept: trainer.save_steps asks for checkpoints"
    place = checkpoint or "the beginning, for no checkpoint is complete"
    options = ["--processes", str(plan.placement.processes)]
    options += [*(["--device", "cpu"] if plan.placement.on_cpu else []), "--resume"]
    command = own_command("train", str(plan.path.with_name(RECIPE)), *options)
    return f"\nto continue from {place}:\n  {command}"


def _run_processes(command: list[str], environments: list[dict[str, str]]) -> str:
    """Run a command in so many processes, which all end with this one.

    Returns:
        How the first one failed, if one did; the others are ended then.
    """
    with _signals_as_exceptions():
        # Only this process holds the other end of their standard input. Each leads a group: Ctrl-C
        # reaches it through us alone, and it ends with all that it has started.
        ranks = [
            subprocess.Popen(command, env=each, stdin=subprocess.PIPE, start_new_session=True)
            for each in environments
        ]
        try:
            while True:
                statuses = [rank.poll() for rank in ranks]
                if any(statuses) or None not in statuses:
                    return _describe_statuses(statuses, ranks)
                time.sleep(0.05)
        finally:
            for rank in ranks:
                with suppress(ProcessLookupError):  # nothing of the group is left
                    os.killpg(rank.pid, signal.SIGKILL)
            for rank in ranks:
                rank.communicate()


def _describe_statuses(statuses: list[int | None], ranks: list[subprocess.Popen]) -> str:
    failed = [(status, number) for number, status in enumerate(statuses) if status]
    if not failed:
        return ""
    status, number = min(failed)  # of a signal below 0: the others end in consequence
    process = f"process {number} (PID {ranks[number].pid})"
    if status == -signal.SIGKILL:
        return (
            f"{process} was killed (SIGKILL), as the system does where memory is short: free some, "
            "or lower trainer.per_device_train_batch_size or trainer.dataloader_num_workers"
        )
    if status < 0:
        return f"{process} was ended by {signal.Signals(-status).name}"
    return f"{process} ended with status {status}; the first error above says why"


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """SIGHUP, too, unless it is to be ignored (nohup)."""

    def stop(number: int, frame) -> None:
        raise TrainingStopped("", signal.Signals(number))

    handled = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handled.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
