"""Start a recipe on several processes of this machine and wait for it."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ..atomic import require_apart
from ..data.rows import require_first_rows
from ..engine.deepspeed.config import require_deepspeed, require_zero_plus_plus
from ..engine.environment import environments_of_ranks, python_module, training_environment
from ..engine.options import is_lora, require_packages
from ..models.base import pin, read_report, require_recorded_base
from ..models.check_weights import require_whole
from ..models.placement import Placement
from ..terminal_text import doing, own_command, pip_install, printable
from .disk import fault_of_space
from .origin import base_of, is_longer, length_of
from .recipe import Recipe
from .recipe_trainer import save_strategy
from .run_folder import begin, close_record, locked, require_usable

if TYPE_CHECKING:
    from ..data.checked_data import CheckedData
    from .plan import Plan

SETTINGS = "recipe.json"
"""In ``out``: the recipe, as it is run."""

# Processes that are told to end do so at once, unless they hang in a driver.
SECONDS_TO_END = 10
# How often it is noted which processes there are.
SECONDS_TO_LOOK = 2


class TrainingStopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM ended the training; the message says how to continue it."""

    def __init__(self, message: str, number: signal.Signals):
        super().__init__(message)
        self.number = number


def launch(
    recipe: Recipe,
    placement: Placement,
    resume: bool | Path = False,
    overwrite: bool = False,
    accept_changed_data: bool = False,
    dry_run: bool = False,
) -> None:
    """Train with NCCL on GPUs, or with gloo on the CPU; with ``engine.zero_stage`` 0 a single
    process trains without either, and without DeepSpeed.

    No training process outlives this call, nor this process, however it ends. Meanwhile no other
    run can write to ``recipe.out``.

    Args:
        placement: Of :func:`preflight.place`.
        resume: True, to continue from the last complete checkpoint in ``recipe.out``, or from the
            beginning if there is none; or the checkpoint there to continue from. Incomplete
            checkpoints in the way are renamed.
        overwrite: Whether to remove what earlier runs wrote to ``recipe.out``, once the data has
            been checked; :mod:`run_folder` has more.
        accept_changed_data: Whether the checkpoint's rows may have been others.
        dry_run: Check all that is checked before the first step, say what would be done
            (:mod:`summary`), and do none of it.

    Raises:
        RuntimeError: DeepSpeed or what it needs is missing, a killed process left DeepSpeed's lock
            behind, what its choices need is missing, or the training failed or diverged.
        ValueError: the data cannot be used, ``recipe.out`` holds what may not be replaced or
            another run writes to it, the checkpoint is incomplete, or of a run with other settings,
            another model or other data.
        TrainingStopped: Ctrl-C, or SIGTERM if this is the main thread.
    """
    if dry_run:
        with _checked(recipe, placement, resume, overwrite, accept_changed_data) as found:
            if resume:
                print(_describe_start(found.plan), flush=True)
            print("nothing was trained, and nothing written (--dry-run)", flush=True)
        return
    with prepared(recipe, placement, resume, overwrite, accept_changed_data) as found:
        _train(found)


@dataclass(frozen=True)
class Checked:
    """``remove`` is for :func:`run_folder.begin`."""

    plan: "Plan"
    data: "CheckedData"
    remove: list[str]


@contextmanager
def prepared(
    recipe: Recipe,
    placement: Placement,
    resume: bool | Path = False,
    overwrite: bool = False,
    accept_changed_data: bool = False,
) -> Iterator[Checked]:
    """All that comes before the first training process, once for all of them. ``recipe.out`` stays
    locked until they have ended. Takes and raises what :func:`launch` does."""
    with _checked(recipe, placement, resume, overwrite, accept_changed_data) as found:
        folder = Path(recipe.out)
        begin(folder, found.remove)
        try:
            _write_start(found, bool(resume))
            yield found
        except BaseException:
            with suppress(OSError):  # of a full disk, the first error is the one to be told
                close_record(folder, is_lora(recipe.trained))
            raise
        close_record(folder, is_lora(recipe.trained))


@contextmanager
def _checked(
    recipe: Recipe,
    placement: Placement,
    resume: bool | Path,
    overwrite: bool,
    accept_changed_data: bool,
) -> Iterator[Checked]:
    """Check all that can be checked, and say what is about to be done; writes nothing."""
    require_installed(recipe, placement.on_cpu)
    engine = recipe.engine
    require_zero_plus_plus(
        engine.zero_hpz_partition_size,
        engine.zero_quantized_weights or engine.zero_quantized_gradients,
        placement.processes,
        placement.on_cpu,
    )
    base = base_of(recipe)
    folder = Path(recipe.out)
    models = [model for name in {recipe.model, base.model} if (model := Path(name)).is_dir()]
    for model in models:
        require_apart(folder, model)
    with locked(folder):
        # Of a model's folder, files may be links to elsewhere.
        inputs = [*recipe.data.files(), *(file for model in models for file in model.iterdir())]
        extends = is_longer(read_report(folder).get("length"), length_of(recipe))
        remove = require_usable(
            folder, inputs, is_lora(recipe.trained), bool(resume), overwrite, extends
        )
        if recipe.data.on_bad == "fail":
            require_first_rows(recipe.data.all_sources())
        with doing("looking at the model"):  # transformers is imported
            base = pin(base)
            require_recorded_base(base)
            require_whole(base.model, base.revision, recipe.from_scratch, recipe.trained)
        if not Path(base.model).is_dir():
            recipe = recipe.override({"revision": base.revision})
        # Late: what comes before is answered at once.
        with doing("loading torch and transformers"):
            from .plan import check_data, make_plan, starting_point

        # What is to be removed is nothing to continue from.
        checkpoint = None if remove else starting_point(recipe, placement.processes, resume, base)
        if resume and checkpoint is None and read_report(folder).get("finished"):
            raise ValueError(
                f"the training in {folder} is finished and left no checkpoint, so that it cannot "
                "be made longer; to train further, give a new run that folder as model"
            )
        with doing("reading rows and pictures"):
            checked = check_data(recipe, base)
        plan = make_plan(recipe, placement, checked, base, checkpoint, accept_changed_data)
        _announce(plan, checked)
        yield Checked(plan, checked, remove)


def _announce(plan: "Plan", checked: "CheckedData") -> None:
    """Say what is about to be done; raise ``ValueError`` if the disk is too small for it, now that
    the number of steps is known, or the machine's memory."""
    from .summary import describe, fault_of_memory

    if plan.changes:
        print(_describe_changes(plan), flush=True)
    print(printable(describe(plan, checked), kept="\n\t"), flush=True)
    if fault := fault_of_memory(plan):
        raise ValueError(fault)
    if text := fault_of_space(plan.recipe.flat(), plan.steps):
        raise ValueError(f"out is {plan.recipe.out}: {text}")


def require_installed(recipe: Recipe, on_cpu: bool) -> None:
    """Raise ``RuntimeError`` if what the recipe needs is missing on this machine."""
    if recipe.engine.zero_stage:
        if version("transformers") == "5.1.0":
            raise RuntimeError(
                "transformers 5.1.0 does not hand a model to DeepSpeed; expected another: "
                + pip_install("-U", "transformers")
            )
        require_deepspeed()
    require_packages(recipe.trained)
    require_packages(recipe.engine.optimizer)


def _write_start(found: Checked, resume: bool) -> None:
    from .checkpoints import set_incomplete_aside, step_of
    from .plan import CHECKED_DATA

    plan, folder = found.plan, Path(found.plan.recipe.out)
    if resume:
        print(_describe_start(plan), flush=True)
        done = 0 if plan.checkpoint is None else step_of(plan.checkpoint)
        set_incomplete_aside(folder, after_step=done)
    plan.recipe.write(folder / SETTINGS)
    found.data.write(folder / CHECKED_DATA)
    plan.write()


def _train(found: Checked) -> None:
    plan, recipe, placement = found.plan, found.plan.recipe, found.plan.placement
    settings = Path(recipe.out, SETTINGS)
    processes, on_cpu = placement.processes, placement.on_cpu
    common = training_environment(processes, on_cpu)
    environments = [common | each for each in environments_of_ranks(processes)]
    if not recipe.engine.zero_stage:
        environments = [common]
        if not on_cpu:
            # The Trainer would spread a single process over all GPUs that it sees.
            first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            environments = [common | {"CUDA_VISIBLE_DEVICES": first}]
    command = python_module("glm4v_patched.finetune.rank", str(plan.path), "--end-with-stdin")
    if not on_cpu:
        command += ["--require-gpu"]
    try:
        ended = _run(command, environments)
    except KeyboardInterrupt as stop:
        number = stop.number if isinstance(stop, TrainingStopped) else signal.SIGINT
        raise TrainingStopped(
            f"training was stopped by {number.name}{_how_to_resume(recipe, settings, placement)}",
            number,
        ) from None
    if ended and (error := read_report(settings.parent).get("error")):
        raise RuntimeError(f"{error} (settings: {settings})")
    if ended:
        raise RuntimeError(
            f"training on {processes} processes failed: {ended} (settings: {settings})"
            f"{_how_to_resume(recipe, settings, placement)}"
        )
    if found.data.skipped:
        total = found.data.skipped + found.data.counts.rows
        print(f"{found.data.skipped:,} of {total:,} rows were left out", flush=True)


def _describe_start(plan: "Plan") -> str:
    from .checkpoints import step_of

    if plan.checkpoint is None:
        return f"no complete checkpoint in {plan.recipe.out}: training starts from the beginning"
    return f"training continues from {plan.checkpoint}, after step {step_of(plan.checkpoint)}"


def _describe_changes(plan: "Plan") -> str:
    if plan.recipe.data.pack_to is not None:
        order = "conversations may be packed into other rows, in another order"
    elif any(" are gone" in change for change in plan.changes):
        order = (
            "the order of rows is drawn from the seed and their number: of the epoch that was "
            "stopped, some may come a second time and others not at all"
        )
    else:
        order = (
            "the order of places in the file stays as it was, as their number has not changed: the "
            "epoch that was stopped goes on with what stands there now"
        )
    listed = "".join(f"\n  - {change}" for change in plan.changes)
    return f"the data has changed since {plan.checkpoint} was written:{listed}\n{order}"


def _how_to_resume(recipe: Recipe, settings: Path, placement: Placement) -> str:
    from .checkpoints import last_complete_checkpoint

    if save_strategy(recipe.trainer.model_dump()) == "no":
        return "\nno weights are kept: trainer.save_steps asks for checkpoints"
    checkpoint = last_complete_checkpoint(Path(recipe.out))
    place = "from the beginning, for no checkpoint is complete"
    if checkpoint is not None:
        place = f"from {checkpoint}"
    options = ["--processes", str(placement.processes)]
    options += [*(["--device", "cpu"] if placement.on_cpu else []), "--resume"]
    command = own_command("train", str(settings), *options)
    return f"\nto continue {place}:\n  {command}"


def _run(command: list[str], environments: list[dict[str, str]]) -> str:
    """Run a command in so many processes, which all end with this one.

    Returns:
        How the first one failed, if one did; the others are ended then.
    """
    with _signals_as_exceptions():
        # Only this process holds the other end of their standard input. In a session of its own,
        # Ctrl-C reaches each of them through us alone.
        ranks = [
            subprocess.Popen(command, env=each, stdin=subprocess.PIPE, start_new_session=True)
            for each in environments
        ]
        started: list[psutil.Process] = []
        try:
            while True:
                end = time.monotonic() + SECONDS_TO_LOOK
                while time.monotonic() < end:
                    statuses = [rank.poll() for rank in ranks]
                    if any(statuses) or None not in statuses:
                        return _describe_statuses(statuses, ranks)
                    time.sleep(0.05)
                started = [child for rank in ranks for child in _descendants(rank)]
        finally:
            _end(ranks, started)


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


def _end(ranks: list[subprocess.Popen], started: list[psutil.Process]) -> None:
    """End processes and what they started.

    The latter end by themselves with their parents. One that cannot, as it is stopped (SIGSTOP) or
    hangs in a driver, is killed after a while. Whoever has lost its parents is known from before,
    by its number and when it started.
    """
    started = started + [child for rank in ranks for child in _descendants(rank)]
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.wait()
        assert rank.stdin is not None  # a pipe
        rank.stdin.close()
    _, alive = psutil.wait_procs(started, SECONDS_TO_END)
    for descendant in alive:
        with suppress(psutil.NoSuchProcess):
            descendant.kill()


def _descendants(process: subprocess.Popen) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """In the main thread, where alone Python lets signals be handled; SIGHUP, too, unless it is to
    be ignored (nohup)."""

    def stop(number: int, frame) -> None:
        raise TrainingStopped("", signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handled.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
