"""The folder of a run: one run at a time writes to it, and no run overwrites files of others.

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
HOLDER = "process "  # first word of the lock file, which names the process that holds the lock
RECIPE, PLAN, CHECKED_DATA = "recipe.json", "plan.json", "data.json"
"""The resolved recipe, the plan, and the result of the data check."""
# The trained model or adapters, and the files that are needed to load them.
WEIGHTS = ["*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json"]
MODEL_CONFIGS = [
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "chat_template.jinja",
]
MODEL_CONFIGS += ["processor_config.json", "preprocessor_config.json", "special_tokens_map.json"]
MODEL_CONFIGS += [
    "tokenizer*.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
]
MODEL_FILES = WEIGHTS + MODEL_CONFIGS
CODE_FILES = ["*_chatglm.py"]  # the model's code
CODE_FILES += [file.name for file in (Path(__file__).parents[1] / "remote").glob("[a-z]*.py")]
CHECKPOINT_FOLDER = re.compile(r"(incomplete-)?checkpoint-\d+(-\d+)?")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# The names of all files that a stopped run leaves beside its checkpoints.
PLOT, SHEET = "loss.png", "answers.png"
STATE_FILES = [PLOT, SHEET, RECIPE, PLAN, CHECKED_DATA, "data.arrow", "data_eval.arrow"]


def run_file_names(folder: Path, adapters: bool = True) -> list[str]:
    """Return the entries of a folder with names that a run writes, except ``run.json``.

    Args:
        adapters: Whether the run trains adapters. README.md is then a run's file, too.
    """
    patterns = [*MODEL_FILES, *CODE_FILES, *STATE_FILES, TRAINING_REPORT]
    patterns += ["README.md"] * adapters
    return sorted(
        path.name
        for path in (folder.iterdir() if folder.is_dir() else ())
        if CHECKPOINT_FOLDER.fullmatch(path.name) or any(fnmatch(path.name, p) for p in patterns)
    )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create a folder if it is missing, and hold its lock during the block.

    The kernel releases the lock (flock) however this process ends. The package filelock would not
    report who holds a lock, and would overwrite a file of somebody else.

    Raises:
        ValueError: Another run holds the lock, or the folder cannot be written to.
    """
    created = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _take_lock(folder / LOCK)
    except OSError as error:
        raise _unusable(folder, find_folder_problem(str(folder)) or error.strerror) from None
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"{socket.gethostname()}, since {since}: {shlex.join(sys.argv)}"
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{HOLDER}{os.getpid()} on {holder}".encode(), 0)
        yield
    finally:
        # Unlink before unlocking: a process that has opened the file then sees that it is gone.
        with suppress(OSError):
            os.unlink(folder / LOCK)
        os.close(descriptor)
        with suppress(OSError):  # the folder is not empty after a run
            for path in created:
                path.rmdir()


def require_lockable(folder: Path) -> None:
    """Raise ``ValueError`` if :func:`locked` would raise it; change nothing."""
    if problem := find_folder_problem(str(folder)):
        raise _unusable(folder, problem)
    with suppress(FileNotFoundError):
        os.close(_take_lock(folder / LOCK, os.O_RDONLY, fcntl.LOCK_SH))


def _unusable(folder: Path, problem: str | None) -> ValueError:
    return ValueError(
        f"{folder} cannot be used: {problem}; expected out to be a folder that can be written to"
    )


def _take_lock(lock: Path, flags: int = os.O_RDWR | os.O_CREAT, kind: int = fcntl.LOCK_EX) -> int:
    """Lock a file, and return its descriptor; raise ``ValueError`` if another run holds it."""
    while True:
        require_file(lock, refuse_hard_links=True)
        descriptor = os.open(lock, flags | os.O_NOFOLLOW, 0o666)
        try:
            holder = os.pread(descriptor, 10_000, 0).decode(errors="replace")
            take_lock(descriptor, lock, kind)
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                if holder and not holder.startswith(HOLDER):
                    raise ValueError(_not_ours(lock))
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


def _not_ours(path: Path) -> str:
    cure = "move it away, or give the run another folder (out)"
    return f"{path} is there, and no run wrote it; {cure}"


def find_foreign_images(folder: Path) -> str | None:
    """Return a problem if a folder holds images and was never a run's folder, else None."""
    if not folder.is_dir() or read_record(folder) is not None:
        return None
    image_names = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
    image_names = [name for name in image_names if name not in (PLOT, SHEET)]
    if not image_names:
        return None
    return (
        f"it holds images ({listed(image_names, 2)}), among which the run would write its files; "
        "expected a new folder"
    )


def require_usable(
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
        length: Length of the run (:attr:`TrainerFields.length`).
        adapters: Whether the run trains adapters.
        overwrite: Whether files of earlier runs may be removed, if :func:`run_file_names` knows
            them and ``run.json`` lists them.

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
        relative = Path(os.path.relpath(path.resolve(), folder.resolve())).parts
        if relative[0] in {*present, RECIPE, CHECKED_DATA, RECORD, LOCK}:
            raise ValueError(
                f"the run reads {path}, and would replace {folder / relative[0]}; expected out to "
                "be another folder"
            )
    extends = is_longer(before=report.get("length"), now=length)
    if resume and finished and not extends:
        raise ValueError(
            f"the training in {folder} is finished ({TRAINING_REPORT}), and there is nothing to "
            "resume; to make it longer, raise trainer.num_train_epochs or trainer.max_steps; to "
            "train on other data, give a new run that folder as model"
        )
    if recorded is not None and not finished:
        # A run that was stopped before its first checkpoint left no file worth keeping.
        present = [name for name in present if name not in (*STATE_FILES, TRAINING_REPORT)]
    foreign = sorted({*present} - (recorded or set()))
    if resume:  # the files of a stopped run may have been moved here without run.json
        foreign = [name for name in foreign if not _is_stopped_run(name)]
    if foreign:
        stopped = not finished and all(map(_is_stopped_run, foreign))
        raise ValueError(
            f"{folder} holds {listed(foreign, 6)}, which no run has recorded as its own; move "
            "them away, or give the run another folder (out)"
            + (", or resume the stopped run there (--resume)" if stopped else "")
        )
    if recorded is None and os.path.lexists(folder / RECORD):
        raise ValueError(_not_ours(folder / RECORD))
    if resume:
        return []
    if present and not overwrite:
        contents = "a finished training" if finished else f"{listed(present, 6)} of an earlier run"
        stopped = not finished and any(CHECKPOINT_FOLDER.fullmatch(name) for name in present)
        raise ValueError(
            f"{folder} holds {contents}; give the new run another folder (out), or replace them "
            "(--overwrite)" + (", or resume the stopped run there (--resume)" if stopped else "")
        )
    return present


def _is_stopped_run(name: str) -> bool:
    """Return whether a stopped run leaves a file or folder of this name."""
    return CHECKPOINT_FOLDER.fullmatch(name) is not None or name in STATE_FILES


def start_record(folder: Path, remove: list[str]) -> None:
    """Remove the names from :func:`require_usable`, and record that new files are a run's."""
    remove_partial(folder, [*STATE_FILES, RECORD, TRAINING_REPORT])
    # STATE_FILES are not removed: the run rewrites them.
    if remove := [name for name in remove if name not in STATE_FILES]:
        for name in remove:
            _remove(folder / name)
        print(f"removed from {folder}: {listed(remove, limit=100)}", flush=True)
    present = run_file_names(folder)
    if read_record(folder) is not None or all(map(_is_stopped_run, present)):
        _write_record(folder, None)
    (folder / TRAINING_REPORT).unlink(missing_ok=True)


def read_record(folder: Path) -> set[str] | None:
    """Return the names that runs have written in a folder, or None if it has no ``run.json``.

    If the last run was killed (SIGKILL) before it could list its files, the result is all names
    that :func:`run_file_names` finds.
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
    write_atomically(folder / RECORD, json.dumps({"written": names}, indent=2))


def remove_weights(folder: Path) -> None:
    """Remove the weights from the folder of a run that has no result."""
    for path in folder.iterdir():
        if any(fnmatch(path.name, pattern) for pattern in WEIGHTS):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
