"""Which checkpoint folders were written to their end, and which one a run may continue from.

The Trainer and DeepSpeed write a checkpoint as some ten files from every process, straight into its
final folder: a run that dies meanwhile leaves a folder that looks like any other. Here a checkpoint
counts only with a manifest, ``complete.json``, which is made last: after every process has written
and everything is on the disk. It lists the files with their sizes.

Noticed: a checkpoint cut short at any moment, files lost, shortened or grown afterwards, a manifest
lost or damaged. Not noticed: bytes that change while the size stays; there is no checksum, for the
checkpoints of the real model are 200 GB.
"""

import json
import logging
import os
import re
import shutil
from pathlib import Path

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

MANIFEST = "complete.json"
PARTIAL_MANIFEST = MANIFEST + ".partial"
NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")

logger = logging.getLogger(__name__)


class CompletionMarker(TrainerCallback):
    """Marks each checkpoint of the Trainer complete, and keeps the newest ones.

    All processes must see one file system. The Trainer's own ``save_total_limit`` must stay unset:
    it deletes the old checkpoint before the new one is complete.

    Args:
        settings: What a run that continues from here must have in common with this one.
        keep: How many complete checkpoints to keep, or None for all; others are never deleted.
    """

    def __init__(self, settings: dict, keep: int | None = None):
        self.settings = settings
        self.keep = keep

    def on_step_end(self, args, state, control, **kwargs):
        # The Trainer saves at the end in any case; the trained model is about to be saved itself,
        # and from a checkpoint of the last step the Trainer would resume into one step more.
        if state.global_step >= state.max_steps:
            control.should_save = False
        return control

    def on_save(self, args, state, control, **kwargs):
        args.distributed_state.wait_for_everyone()
        if state.is_world_process_zero:
            folder = Path(args.output_dir)
            write_manifest(folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", self.settings)
            if self.keep is not None:
                _delete_all_but_newest(folder, self.keep)


def write_manifest(checkpoint: Path, settings: dict) -> None:
    """Declare everything in a checkpoint folder to be complete, once it is on the disk."""
    files = [
        path
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name not in (MANIFEST, PARTIAL_MANIFEST)
    ]
    # Else a power cut could leave the manifest and not the files.
    for path in [*files, *{path.parent for path in files}]:
        _flush(path)
    sizes = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}
    partial = checkpoint / PARTIAL_MANIFEST
    partial.write_text(json.dumps({"settings": settings, "files": sizes}, indent=2))
    _flush(partial)
    os.replace(partial, checkpoint / MANIFEST)
    _flush(checkpoint)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete_all_but_newest(folder: Path, number: int) -> None:
    complete = [checkpoint for checkpoint in checkpoints_in(folder) if not find_faults(checkpoint)]
    for checkpoint in complete[:-number]:
        shutil.rmtree(checkpoint)


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoint folders, complete or not, in the order of their steps."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(NAME.fullmatch(checkpoint.name)[1])


def find_faults(checkpoint: Path) -> list[str]:
    """What a checkpoint lacks, one line a file; nothing if it is complete."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        files = manifest["files"]
    except FileNotFoundError:
        return [f"{MANIFEST} is missing: the checkpoint was not written to its end"]
    except (ValueError, KeyError, TypeError) as error:
        return [f"{MANIFEST} is damaged: {error!r}"]
    faults = []
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            faults.append(f"{name} is missing: expected {expected} bytes")
        elif (found := path.stat().st_size) != expected:
            faults.append(f"{name}: expected {expected} bytes, found {found}")
    return faults


def last_complete_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step; warns of incomplete ones that are newer."""
    for checkpoint in reversed(checkpoints_in(folder)):
        faults = find_faults(checkpoint)
        if not faults:
            return checkpoint
        logger.warning("%s is incomplete and not used: %s", checkpoint, _listed(faults))
    return None


def choose_checkpoint(folder: Path, resume: bool | Path) -> Path | None:
    """The checkpoint to continue from, or None to start from the beginning. Changes nothing.

    Args:
        folder: Where the run saves.
        resume: False, to start from the beginning; True, for the last complete checkpoint, if there
            is one; or a checkpoint in ``folder``.

    Raises:
        ValueError: a start from the beginning where checkpoints are; a checkpoint that is
            incomplete, not in ``folder``, or followed by complete ones, which would be overwritten.
    """
    present = checkpoints_in(folder)
    if resume is False:
        if present:
            raise ValueError(
                f"{folder} holds {_names(present)} of an earlier run; continue it (--resume), give "
                "the new run another folder (out), or move the checkpoints away"
            )
        return None
    if resume is True:
        return last_complete_checkpoint(folder)
    if resume.resolve() not in [checkpoint.resolve() for checkpoint in present]:
        raise ValueError(f"{resume} is not a checkpoint in {folder}, which holds {_names(present)}")
    if faults := find_faults(resume):
        raise ValueError(
            f"{resume} is incomplete:{_listed(faults)}\n"
            "continue from the last complete checkpoint instead: --resume"
        )
    later = [path for path in present if step_of(path) > step_of(resume)]
    if complete := [path for path in later if not find_faults(path)]:
        raise ValueError(
            f"continuing from {resume.name} would overwrite {_names(complete)}; move them out of "
            f"{folder}, or continue from the last one (--resume)"
        )
    return resume


def set_incomplete_aside(folder: Path, after_step: int) -> None:
    """Rename the incomplete checkpoints of later steps, for new ones will need their names.

    Nothing is deleted; a warning gives the new names.
    """
    for checkpoint in checkpoints_in(folder):
        if step_of(checkpoint) <= after_step or not find_faults(checkpoint):
            continue
        aside = folder / f"incomplete-{checkpoint.name}"
        number = 1
        while aside.exists():
            number += 1
            aside = folder / f"incomplete-{checkpoint.name}-{number}"
        checkpoint.rename(aside)
        logger.warning("%s is now %s; delete it if you do not need it", checkpoint, aside)


def require_same_settings(checkpoint: Path, settings: dict, defaults: dict | None = None) -> None:
    """Raise ``ValueError`` naming what differs from the run that wrote a complete checkpoint.

    Args:
        defaults: Of settings that there were not yet when an older checkpoint was written.
    """
    written = json.loads((checkpoint / MANIFEST).read_text())["settings"]
    written = (defaults or {}) | written
    differences = [
        f"{name}: {written.get(name)} there, {settings.get(name)} now"
        for name in sorted(written.keys() | settings.keys())
        if written.get(name) != settings.get(name)
    ]
    if differences:
        raise ValueError(
            f"{checkpoint} is of a run with other settings:{_listed(differences)}\n"
            "continue with the settings it has, or start a new run in another folder (out)"
        )


def _names(checkpoints: list[Path]) -> str:
    return ", ".join(checkpoint.name for checkpoint in checkpoints) or "no checkpoint"


def _listed(lines: list[str], most: int = 8) -> str:
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "".join(f"\n  - {line}" for line in lines[:most] + more)
