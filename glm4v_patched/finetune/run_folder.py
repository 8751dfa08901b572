"""The folder of a run: one run at a time writes to it, and no run overwrites other people's files.

``run.json`` in the folder records which files runs have written there. A run creates it before its
other files, and lists these files in it at the end. Imports no torch.
"""

import fcntl
import json
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from ..atomic import (
    find_file_problem,
    remove_partial,
    require_file,
    take_lock,
    write_atomically,
)
from ..engine.folders import find_folder_problem
from ..models.base import TRAINING_REPORT, read_training_report
from ..patch.config_json import read_json_object
from ..terminal_text import listed
from .recipe.trainer import is_longer

LOCK, RECORD = "run.lock", "run.json"
LOCK_PREFIX = "process "
"""Beginning of the lock file's text, which names the process that holds the lock."""
RECIPE, PLAN, CHECKED_DATA = "recipe.json", "plan.json", "data.json"
"""The resolved recipe, the plan, and the result of the data check."""
LOSS_PLOT, CONTACT_SHEET = "loss.png", "answers.png"
# Patterns of the files of a trained model or of adapters: weights, and what is needed to load them.
WEIGHT_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json"]
CONFIG_PATTERNS = [
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "chat_template.jinja",
    "processor_config.json",
    "preprocessor_config.json",
    "special_tokens_map.json",
    "tokenizer*.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
]
CODE_PATTERNS = ["*_chatglm.py"]  # the model's code
CODE_PATTERNS += [file.name for file in (Path(__file__).parents[1] / "remote").glob("[a-z]*.py")]
CHECKPOINT_FOLDER = re.compile(r"(incomplete-)?checkpoint-\d+(-\d+)?")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# All files that a stopped run leaves beside its checkpoints.
STATE_FILES = [RECIPE, PLAN, CHECKED_DATA, "data.arrow", "data_eval.arrow"]
STATE_FILES += [LOSS_PLOT, CONTACT_SHEET]


def run_file_names(folder: Path, adapters: bool = True) -> list[str]:
    """Return the entries of a folder whose names a run uses, except ``run.json``.

    Args:
        adapters: Whether the run trains adapters. README.md is then a run's file, too.
    """
    if not folder.is_dir():
        return []
    patterns = [*WEIGHT_PATTERNS, *CONFIG_PATTERNS, *CODE_PATTERNS, *STATE_FILES, TRAINING_REPORT]
    if adapters:
        patterns.append("README.md")
    names = sorted(path.name for path in folder.iterdir())
    return [
        name
        for name in names
        if CHECKPOINT_FOLDER.fullmatch(name) or any(fnmatch(name, pattern) for pattern in patterns)
    ]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create a folder if it is missing, and hold its lock during the block.

    The kernel releases the lock (flock) however this process ends. The package filelock would not
    report which process holds a lock, and would overwrite a file of another program.

    Raises:
        ValueError: Another run holds the lock, or the folder cannot be written to.
    """
    new_folders = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _take_lock(folder / LOCK)
    except OSError as error:
        problem = find_folder_problem(str(folder)) or error.strerror
        raise _unusable_folder_error(folder, problem) from None
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        command = shlex.join(sys.argv)
        holder = f"{LOCK_PREFIX}{os.getpid()} on {socket.gethostname()}, since {since}: {command}"
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        yield
    finally:
        # Unlink before unlocking: a process that has opened the file then sees that it is gone.
        with suppress(OSError):
            os.unlink(folder / LOCK)
        os.close(descriptor)
        with suppress(OSError):  # rmdir fails for a folder that has files, as after a run
            for path in new_folders:
                path.rmdir()


def require_lockable(folder: Path) -> None:
    """Raise ``ValueError`` if :func:`locked` would raise it; change nothing."""
    if problem := find_folder_problem(str(folder)):
        raise _unusable_folder_error(folder, problem)
    with suppress(FileNotFoundError):
        os.close(_take_lock(folder / LOCK, os.O_RDONLY, fcntl.LOCK_SH))


def _unusable_folder_error(folder: Path, problem: str | None) -> ValueError:
    return ValueError(
        f"{folder} cannot be used: {problem}; expected out to be a folder that can be written to"
    )


def _take_lock(
    lock: Path, flags: int = os.O_RDWR | os.O_CREAT, operation: int = fcntl.LOCK_EX
) -> int:
    """Lock a file, and return its descriptor; raise ``ValueError`` if another run holds it.

    Args:
        flags: Flags of ``os.open``.
        operation: Operation of ``fcntl.flock``.
    """
    while True:
        require_file(lock, refuse_hard_links=True)
        descriptor = os.open(lock, flags | os.O_NOFOLLOW, 0o666)
        try:
            holder = os.pread(descriptor, 10_000, 0).decode(errors="replace")
            take_lock(descriptor, lock, operation)
            # Between open and flock, another run may have ended and unlinked the file.
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                if holder and not holder.startswith(LOCK_PREFIX):
                    raise ValueError(_foreign_file_message(lock))
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException as error:
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            holder = holder or "a process that has just taken the lock"
            raise ValueError(
                f"another run writes to {lock.parent} ({holder}); wait for it, end it, or give "
                "this one another folder (out)"
            ) from None
        os.close(descriptor)


def _foreign_file_message(path: Path) -> str:
    cure = "move it away, or give the run another folder (out)"
    return f"{path} exists, and no run wrote it; {cure}"


def find_foreign_images(folder: Path) -> str | None:
    """Return a problem if a folder contains images and was never a run's folder, else None."""
    if not folder.is_dir() or read_record(folder) is not None:
        return None
    image_names = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
    image_names = [name for name in image_names if name not in (LOSS_PLOT, CONTACT_SHEET)]
    if not image_names:
        return None
    return (
        f"it contains images ({listed(image_names, 2)}), and the run would write its files beside "
        "them; expected a new folder"
    )


def check_run_folder(
    folder: Path,
    inputs: Iterable[Path],
    length: dict[str, float],
    adapters: bool,
    resume: bool = False,
    overwrite: bool = False,
) -> list[str]:
    """Check that a run may write to its folder, which need not exist; change nothing.

    Args:
        inputs: Files that the run reads (:attr:`job.Job.inputs`).
        length: Length of the run (:attr:`TrainerFields.run_length`).
        adapters: Whether the run trains adapters.
        resume: Whether the run resumes from a checkpoint in the folder.
        overwrite: Whether files of earlier runs may be removed: those that ``run.json`` lists and
            :func:`run_file_names` returns.

    Returns:
        The names to remove, for :func:`start_record`.

    Raises:
        ValueError: The folder has a finished training, or files with a run's names that must not
            be removed.
    """
    report = read_training_report(folder)
    recorded, finished = read_record(folder), report.get("finished")
    present = run_file_names(folder, adapters)
    for path in inputs:
        name = Path(os.path.relpath(path.resolve(), folder.resolve())).parts[0]
        if name in {*present, RECIPE, CHECKED_DATA, RECORD, LOCK}:
            raise ValueError(
                f"the run reads {path}, and would replace {folder / name}; expected out to be "
                "another folder"
            )
    extends = is_longer(before=report.get("length"), now=length)
    if resume and finished and not extends:
        raise ValueError(
            f"the training in {folder} is finished ({TRAINING_REPORT}), and there is nothing to "
            "resume; to make it longer, raise trainer.num_train_epochs or trainer.max_steps; to "
            "train on other data, start a new run with that folder as model"
        )
    if recorded is not None and not finished:
        # A run that was stopped before its first checkpoint left no file worth keeping.
        present = [name for name in present if name not in (*STATE_FILES, TRAINING_REPORT)]
    unrecorded = sorted({*present} - (recorded or set()))
    if resume:  # the files of a stopped run may have been moved here without run.json
        unrecorded = [name for name in unrecorded if not _is_left_by_stopped_run(name)]
    resume_hint = ", or resume the stopped run there (--resume)"
    if unrecorded:
        can_resume = not finished and all(map(_is_left_by_stopped_run, unrecorded))
        raise ValueError(
            f"{folder} contains {listed(unrecorded, 6)}, which no run has recorded as its own; "
            "move them away, or give the run another folder (out)"
            f"{resume_hint if can_resume else ''}"
        )
    if recorded is None and os.path.lexists(folder / RECORD):
        raise ValueError(_foreign_file_message(folder / RECORD))
    if resume:
        return []
    if present and not overwrite:
        contents = "a finished training" if finished else f"{listed(present, 6)} of an earlier run"
        can_resume = not finished and any(CHECKPOINT_FOLDER.fullmatch(name) for name in present)
        raise ValueError(
            f"{folder} contains {contents}; give the new run another folder (out), or replace the "
            f"files (--overwrite){resume_hint if can_resume else ''}"
        )
    return present


def _is_left_by_stopped_run(name: str) -> bool:
    """Return whether a stopped run leaves a file or folder of this name."""
    return CHECKPOINT_FOLDER.fullmatch(name) is not None or name in STATE_FILES


def start_record(folder: Path, old_names: list[str]) -> None:
    """Remove the files of earlier runs, and record that new files are this run's.

    Args:
        old_names: The names to remove, from :func:`check_run_folder`. ``STATE_FILES`` are not
            removed, because the run rewrites them.
    """
    remove_partial(folder, [*STATE_FILES, RECORD, TRAINING_REPORT])
    if removed := [name for name in old_names if name not in STATE_FILES]:
        for name in removed:
            _remove(folder / name)
        print(f"removed from {folder}: {listed(removed, limit=100)}", flush=True)
    # No record is made if the folder has a file that no run wrote but some run may write, such as
    # README.md: the record would list it as a run's file.
    present = run_file_names(folder)
    if read_record(folder) is not None or all(map(_is_left_by_stopped_run, present)):
        _write_record(folder, None)
    (folder / TRAINING_REPORT).unlink(missing_ok=True)


def read_record(folder: Path) -> set[str] | None:
    """Return the names that runs have written in a folder, or None if it has no ``run.json``.

    If the last run was killed (SIGKILL) before it could list its files, these are all names of
    :func:`run_file_names`.
    """
    if find_file_problem(folder / RECORD):
        return None
    try:
        written = read_json_object(folder / RECORD)["written"]
        return {*run_file_names(folder)} if written is None else {*map(str, written)}
    except (ValueError, KeyError, TypeError):
        return None


def close_record(folder: Path, adapters: bool) -> None:
    """List the files of a run in ``run.json`` when it has ended, with or without an error."""
    if read_record(folder) is not None:
        _write_record(folder, run_file_names(folder, adapters))


def _write_record(folder: Path, names: list[str] | None) -> None:
    """Write ``run.json`` with the names that runs have written; None while a run is writing."""
    write_atomically(folder / RECORD, json.dumps({"written": names}, indent=2))


def remove_weights(folder: Path) -> None:
    """Remove the weights from the folder of a run that has no result."""
    for path in folder.iterdir():
        if any(fnmatch(path.name, pattern) for pattern in WEIGHT_PATTERNS):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
