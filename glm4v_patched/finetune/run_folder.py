"""The folder of a run: one run at a time writes to it, and none overwrites what others wrote.

``run.json`` in it says that files with the names of a run were written by runs. It is written while
no such file is there, and at the end lists what the run has left. Needs no torch.
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
from ..models.base import TRAINING_REPORT, read_report
from ..patch.config_json import read_json_object
from ..terminal_text import listed
from .recipe.trainer import is_longer

LOCK, RECORD = "run.lock", "run.json"
HOLDER = "process "  # begins what the lock's file says of who holds it
RECIPE, PLAN, CHECKED_DATA = "recipe.json", "plan.json", "data.json"
"""The recipe as it is run, what was decided, and what the check found of the data."""
# The trained model or adapters, and what lies beside them to load them.
WEIGHTS = ["*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json"]
BESIDE = ["config.json", "generation_config.json", "adapter_config.json", "chat_template.jinja"]
BESIDE += ["processor_config.json", "preprocessor_config.json", "special_tokens_map.json"]
BESIDE += ["tokenizer*.json", "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt"]
MODEL = WEIGHTS + BESIDE
CODE = ["*_chatglm.py"]
CODE += [file.name for file in (Path(__file__).parents[1] / "remote").glob("[a-z]*.py")]
CHECKPOINTS = re.compile(r"(incomplete-)?checkpoint-\d+(-\d+)?")
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# What a run that was stopped leaves beside checkpoints.
PLOT, SHEET = "loss.png", "answers.png"
STATE = [PLOT, SHEET, RECIPE, PLAN, CHECKED_DATA, "data.arrow", "data_eval.arrow"]


def run_file_names(folder: Path, adapters: bool = True) -> list[str]:
    """What is in a folder under names that a run writes, ``run.json`` aside.

    Args:
        adapters: Whether the run trains adapters; peft writes a README.md beside them.
    """
    patterns = [*MODEL, *CODE, *STATE, TRAINING_REPORT, *(["README.md"] if adapters else [])]
    return sorted(
        path.name
        for path in (folder.iterdir() if folder.is_dir() else ())
        if CHECKPOINTS.fullmatch(path.name) or any(fnmatch(path.name, p) for p in patterns)
    )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder where there is none, and keep other runs out of it meanwhile.

    The lock is the kernel's, and gone with this process however that ends. Not filelock's, which
    does not say who holds it, and writes to a file of somebody else's.

    Raises:
        ValueError: another run holds it, or nothing can be written there; says who, or why.
    """
    made = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _take_lock(folder / LOCK)
    except OSError as error:
        raise _unusable(folder, find_folder_problem(str(folder)) or error.strerror) from None
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        command = f"{socket.gethostname()}, since {since}: {shlex.join(sys.argv)}"
        os.truncate(file, 0)
        os.pwrite(file, f"{HOLDER}{os.getpid()} on {command}".encode(), 0)
        yield
    finally:
        # While it is held: whoever opened it before will see that it has left the folder.
        with suppress(OSError):
            os.unlink(folder / LOCK)
        os.close(file)
        with suppress(OSError):  # not empty: that is the run
            for each in made:
                each.rmdir()


def require_lockable(folder: Path) -> None:
    """Raise ``ValueError`` where :func:`locked` would; changes nothing."""
    if fault := find_folder_problem(str(folder)):
        raise _unusable(folder, fault)
    with suppress(FileNotFoundError):
        os.close(_take_lock(folder / LOCK, os.O_RDONLY, fcntl.LOCK_SH))


def _unusable(folder: Path, fault: str | None) -> ValueError:
    told = f"{folder} cannot be used: {fault}"
    return ValueError(f"{told}; expected out to be a folder that can be written to")


def _take_lock(lock: Path, flags: int = os.O_RDWR | os.O_CREAT, kind: int = fcntl.LOCK_EX) -> int:
    while True:
        require_file(lock, alone=True)
        file = os.open(lock, flags | os.O_NOFOLLOW, 0o666)
        try:
            holder = os.pread(file, 10_000, 0).decode(errors="replace")
            take_lock(file, lock, kind)
            if os.path.samestat(os.fstat(file), os.stat(lock)):
                if holder and not holder.startswith(HOLDER):
                    raise ValueError(_not_ours(lock))
                return file
        except FileNotFoundError:
            pass
        except BaseException as error:
            os.close(file)
            if not isinstance(error, BlockingIOError):
                raise
            who = holder or "a process that has just taken it"
            raise ValueError(
                f"another run writes to {lock.parent} ({who}); wait for it, end it, or give this "
                "one another folder (out)"
            ) from None
        os.close(file)


def _not_ours(path: Path) -> str:
    told = "is there, and no run wrote it; move it away, or give the run another folder (out)"
    return f"{path} {told}"


def find_foreign_images(folder: Path) -> str | None:
    """What images a folder holds that has been no run's: its files would lie among them."""
    if not folder.is_dir() or read_record(folder) is not None:
        return None
    found = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in IMAGES)
    if found := [name for name in found if name not in (PLOT, SHEET)]:
        told = f"it holds images ({listed(found, 2)}), among which the run would write its files"
        return f"{told}; expected a new folder"
    return None


def require_usable(
    folder: Path,
    inputs: Iterable[Path],
    length: dict[str, float],
    adapters: bool,
    resume: bool = False,
    overwrite: bool = False,
) -> list[str]:
    """Make sure that a run may write to its folder, which need not exist; changes nothing.

    Args:
        inputs: Files that the run reads (:func:`recipe.model.inputs_of`).
        length: How long the run is to be.
        adapters: Whether it trains adapters.
        overwrite: Whether what earlier runs wrote there may go: only names that
            :func:`run_file_names` knows, where ``run.json`` says that they are of runs.

    Returns:
        What is to be removed there, for :func:`begin`.

    Raises:
        ValueError: there is a finished training, or what has a run's names and may not go.
    """
    report = read_report(folder)
    recorded, finished = read_record(folder), report.get("finished")
    present = run_file_names(folder, adapters)
    for path in inputs:
        relative = Path(os.path.relpath(path.resolve(), folder.resolve())).parts
        if relative[0] in {*present, RECIPE, CHECKED_DATA, RECORD, LOCK}:
            raise ValueError(
                f"the run reads {path}, and would replace {folder / relative[0]}; expected out to "
                "be another folder"
            )
    extends = is_longer(report.get("length"), length)
    if resume and finished and not extends:
        raise ValueError(
            f"the training in {folder} is finished ({TRAINING_REPORT}), there is nothing to continue; to "
            "make it longer, raise trainer.num_train_epochs or trainer.max_steps; to train on "
            "other data, give a new run that folder as model"
        )
    if recorded is not None and not finished:
        # What a run leaves that was stopped before it had anything to lose.
        present = [name for name in present if name not in (*STATE, TRAINING_REPORT)]
    foreign = sorted({*present} - (recorded or set()))
    if resume:  # what was stopped may have been moved here, without its record
        foreign = [n for n in foreign if not CHECKPOINTS.fullmatch(n) and n not in STATE]
    if foreign:
        stopped = not finished and all(CHECKPOINTS.fullmatch(n) or n in STATE for n in foreign)
        raise ValueError(
            f"{folder} holds {listed(foreign, 6)}, and no run says that it wrote them; move "
            "that away, or give the run another folder (out)"
            + (", or continue what was stopped there (--resume)" if stopped else "")
        )
    if recorded is None and os.path.lexists(folder / RECORD):
        raise ValueError(_not_ours(folder / RECORD))
    if resume:
        return []
    if present and not overwrite:
        there = "a finished training" if finished else f"{listed(present, 6)} of an earlier run"
        stopped = not finished and any(CHECKPOINTS.fullmatch(name) for name in present)
        raise ValueError(
            f"{folder} holds {there}; give the new run another folder (out), or replace that "
            "(--overwrite)" + (", or continue what was stopped there (--resume)" if stopped else "")
        )
    return present


def start_record(folder: Path, remove: list[str]) -> None:
    """Remove what :func:`require_usable` said, and say that what comes now is a run's."""
    remove_partial(folder, [*STATE, RECORD, TRAINING_REPORT])
    # Written anew already, or about to be.
    if remove := [name for name in remove if name not in STATE]:
        for name in remove:
            _remove(folder / name)
        print(f"removed from {folder}: {listed(remove, most=100)}", flush=True)
    present = run_file_names(folder)
    ours = read_record(folder) is not None
    if ours or all(CHECKPOINTS.fullmatch(name) or name in STATE for name in present):
        _write_record(folder, None)
    (folder / TRAINING_REPORT).unlink(missing_ok=True)


def read_record(folder: Path) -> set[str] | None:
    """The names that runs have written in a folder: all that is there now under a run's names
    if the last run was killed (SIGKILL) before it could list them. None if no run says so."""
    if find_file_problem(folder / RECORD):
        return None
    try:
        written = read_json_object(folder / RECORD)["written"]
        return {*run_file_names(folder)} if written is None else {*map(str, written)}
    except (ValueError, KeyError, TypeError):
        return None


def close_record(folder: Path, adapters: bool) -> None:
    """List what a run has written, when it has ended, well or not."""
    if read_record(folder) is not None:
        _write_record(folder, run_file_names(folder, adapters))


def _write_record(folder: Path, names: list[str] | None) -> None:
    write_atomically(folder / RECORD, json.dumps({"written": names}, indent=2))


def remove_weights(folder: Path) -> None:
    """Take the weights out of a folder whose run has come to nothing."""
    for path in folder.iterdir():
        if any(fnmatch(path.name, pattern) for pattern in WEIGHTS):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
