"""The folder of a run: one run at a time writes to it, and none overwrites what others wrote.

``run.json`` in it says that files with the names of a run were written by runs. It is written while
no such file is there, and at the end lists what the run has left. Needs no torch.
"""

import errno
import fcntl
import json
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from ..atomic import fault_of_file, remove_partial, require_file, write_atomically
from ..models.base import REPORT, read_report
from ..terminal_text import listed

LOCK, RECORD = "run.lock", "run.json"
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
# What a run that was stopped leaves beside checkpoints.
PLOT, SHEET = "loss.png", "answers.png"
STATE = [PLOT, SHEET, RECIPE, PLAN, CHECKED_DATA, "data.arrow", "data_eval.arrow"]


def names_of_run(folder: Path, adapters: bool = True) -> list[str]:
    """What is in a folder under names that a run writes, ``run.json`` aside.

    Args:
        adapters: Whether the run trains adapters; peft writes a README.md beside them.
    """
    patterns = [*MODEL, *CODE, *STATE, REPORT, *(["README.md"] if adapters else [])]
    return sorted(
        path.name
        for path in folder.iterdir()
        if CHECKPOINTS.fullmatch(path.name) or any(fnmatch(path.name, p) for p in patterns)
    )


@contextmanager
def locked(folder: Path, command: str | None = None) -> Iterator[None]:
    """Make a folder where there is none, and keep other runs out of it meanwhile.

    The lock is the kernel's, and gone with this process however that ends. Not filelock's, which
    does not say who holds it, and writes to a file of somebody else's.

    Raises:
        ValueError: another run holds it, or nothing can be written there; says who, or why.
    """
    made = not os.path.lexists(folder)
    file = _take_lock(folder)
    if os.fstat(file).st_size and not _holder_of(file):
        os.close(file)
        raise ValueError(
            f"{folder / LOCK} is there, and no run wrote it; move it away, or give the run another "
            "folder (out)"
        )
    try:
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": command or shlex.join(sys.argv),
        }
        os.truncate(file, 0)
        os.pwrite(file, json.dumps(holder).encode(), 0)
        yield
    finally:
        # While it is held: whoever opened it before will see that it has left the folder.
        with suppress(OSError):
            os.unlink(folder / LOCK)
        os.close(file)
        if made:
            with suppress(OSError):  # not empty: that is the run
                folder.rmdir()


def _take_lock(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            require_file(folder / LOCK, alone=True)
            file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(file), os.stat(folder / LOCK)):
                    return file
            except FileNotFoundError:
                pass
            except BlockingIOError:
                raise ValueError(_describe_holder(folder, file)) from None
            except BaseException:
                os.close(file)
                raise
            os.close(file)
    except OSError as error:
        raise ValueError(_why_not_writable(folder, error)) from None


def fault_of_lock(folder: Path) -> str | None:
    """Which other run writes to a folder now; nothing is made or changed."""
    try:
        require_file(folder / LOCK, alone=True)
        file = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except ValueError as error:
        return str(error)
    except OSError:
        return None  # no run, or a folder that cannot be used, which is told elsewhere
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _describe_holder(folder, file)
    finally:
        os.close(file)
    return None


def _holder_of(file: int) -> str:
    """Who holds a lock, as runs write it; empty where none did."""
    try:
        holder = json.loads(os.pread(file, 10_000, 0))
        return "process {pid} on {host}, since {started}: {command}".format(**holder)
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _describe_holder(folder: Path, file: int) -> str:
    who = _holder_of(file) or "a process that has just taken it"  # and is about to say so
    return (
        f"another run writes to {folder} ({who}); wait for it, end it, or give this one another "
        "folder (out)"
    )


def _why_not_writable(folder: Path, error: OSError) -> str:
    cure = "expected out to be a folder that can be written to"
    for place in (folder, *folder.parents):
        if os.path.islink(place) and not os.path.exists(place):
            return f"{place} is a link to {os.readlink(place)}, which is not there; {cure}"
        if os.path.exists(place):
            if not os.path.isdir(place):
                return f"{place} is a file; {cure}"
            break
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"nothing can be written to {place} ({error.strerror}); {cure}"
    return f"{folder} cannot be used: {error}; {cure}"


PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def fault_of_pictures(folder: Path) -> str | None:
    """What pictures a folder holds that has been no run's: its files would lie among them."""
    if not folder.is_dir() or read_record(folder) is not None:
        return None
    found = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in PICTURES)
    found = [name for name in found if name not in (PLOT, SHEET)]
    if not found:
        return None
    return (
        f"it holds pictures ({listed(found, 2)}), among which the run would write its files; "
        "expected a new folder"
    )


def require_usable(
    folder: Path,
    inputs: list[Path],
    adapters: bool,
    resume: bool,
    overwrite: bool,
    extends: bool = False,
) -> list[str]:
    """Make sure that a run may write to its folder; changes nothing. The caller holds its lock.

    Args:
        inputs: Files and folders that the run reads.
        overwrite: Whether what earlier runs wrote there may go: only names that
            :func:`names_of_run` knows, where ``run.json`` says that they are of runs.
        extends: Whether the run is longer than the finished one that it continues.

    Returns:
        What is to be removed there, for :func:`begin`.

    Raises:
        ValueError: there is a finished training, or what has a run's names and may not go.
    """
    recorded = read_record(folder)
    present = names_of_run(folder, adapters)
    for path in inputs:
        relative = Path(os.path.relpath(path.resolve(), folder.resolve())).parts
        if relative[0] in {*present, RECIPE, CHECKED_DATA, RECORD, LOCK}:
            raise ValueError(
                f"the run reads {path}, and would replace {folder / relative[0]}; expected out to "
                "be another folder"
            )
    if resume:
        if read_report(folder).get("finished") and not extends:
            raise ValueError(
                f"the training in {folder} is finished ({REPORT}), there is nothing to continue; "
                "to make it longer, raise trainer.num_train_epochs or trainer.max_steps; to train "
                "on other data, give a new run that folder as model"
            )
        ours = {*STATE} if recorded is None else {*STATE, REPORT, *recorded}
        if others := [n for n in present if not CHECKPOINTS.fullmatch(n) and n not in ours]:
            raise ValueError(
                f"{folder} holds {listed(others, 6)}, which no run wrote and this one would "
                "replace; give it another folder (out), or move them away"
            )
        _require_own_record(folder, recorded)
        return []
    if recorded is not None and not read_report(folder).get("finished"):
        # What a run leaves that was stopped before it had anything to lose.
        present = [name for name in present if name not in (*STATE, REPORT)]
    foreign = present if recorded is None else sorted({*present} - recorded)
    if present and not overwrite:
        raise ValueError(
            f"{folder} holds {_describe(present)}; give the new run another folder (out)"
            + ("" if foreign else ", or replace them (--overwrite)")
            + _or_resume(present)
        )
    if foreign:
        raise ValueError(
            f"--overwrite removes only what runs wrote, and {folder} holds {listed(foreign, 6)}, "
            "of which no run says so; move them away, or give the new run another folder (out)"
        )
    _require_own_record(folder, recorded)
    return present


def _require_own_record(folder: Path, recorded: set[str] | None) -> None:
    if recorded is None and os.path.lexists(folder / RECORD):
        raise ValueError(
            f"{folder / RECORD} is there, and no run wrote it; move it away, or give the run "
            "another folder (out)"
        )


def begin(folder: Path, remove: list[str]) -> None:
    """Remove what :func:`require_usable` said, and say that what comes now is a run's."""
    remove_partial(folder, [*STATE, RECORD, REPORT])
    # Written anew already, or about to be.
    if remove := [name for name in remove if name not in STATE]:
        for name in remove:
            _remove(folder / name)
        print(f"removed from {folder}: {listed(remove, most=100)}", flush=True)
    present = names_of_run(folder)
    ours = read_record(folder) is not None
    if ours or all(CHECKPOINTS.fullmatch(name) or name in STATE for name in present):
        _write_record(folder, None)
    (folder / REPORT).unlink(missing_ok=True)


def read_record(folder: Path) -> set[str] | None:
    """The names that runs have written in a folder: all that is there now under a run's names
    if the last run was killed (SIGKILL) before it could list them. None if no run says so."""
    if fault_of_file(folder / RECORD):
        return None
    try:
        listed = json.loads((folder / RECORD).read_text(encoding="utf-8"))["written"]
        return {*names_of_run(folder)} if listed is None else {*map(str, listed)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def close_record(folder: Path, adapters: bool) -> None:
    """List what a run has written, when it has ended, well or not."""
    if read_record(folder) is not None:
        _write_record(folder, names_of_run(folder, adapters))


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


def _describe(names: list[str]) -> str:
    kinds = {
        "a finished training": REPORT in names,
        "a model": any(fnmatch(name, "model*.safetensors*") for name in names),
        "adapters": any(fnmatch(name, "adapter_*") for name in names),
    }
    kinds |= {name: True for name in names if CHECKPOINTS.fullmatch(name)}
    found = [kind for kind, there in kinds.items() if there]
    return listed(found or names, 6)


def _or_resume(present: list[str]) -> str:
    if REPORT not in present and any(CHECKPOINTS.fullmatch(name) for name in present):
        return ", or continue what was stopped there (--resume)"
    return ""
