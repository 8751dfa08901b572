"""Which checkpoints are complete, and which one a run may continue from.

The Trainer and DeepSpeed write a checkpoint as some ten files from every process, straight into its
final folder: a run that is killed meanwhile leaves a folder that looks complete. Here a checkpoint
counts only with a manifest, ``complete.json``, which is made last: after every process has written
and everything is on the disk. It lists the files with their sizes and digests, and what a run that
continues from here must have in common with this one.

Noticed: a checkpoint that was not finished, files that are missing or were changed afterwards, a
missing or damaged manifest. Not noticed: in files above 64 MiB, a change outside of the blocks that
are compared (checkpoints of the real model have 200 GB); and a change by someone who also writes a
new manifest.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..atomic import write_atomically
from ..models.base import digest_file
from ..patch.config_json import read_json_object
from ..terminal_text import listed, shorten

CHECKPOINT_MANIFEST = "complete.json"
NAME = re.compile(r"checkpoint-(\d+)", re.ASCII)
MAX_LISTED_PROBLEMS = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowDigests:
    """The rows that are learned, in their order.

    Args:
        digest: Of all rows, with the bytes of their images.
        evaluated: Digest of the rows for evaluation, where they decide what is saved or when the
            run ends.
    """

    number: int
    digest: str
    evaluated: str | None = None


@dataclass(frozen=True)
class ResumeFingerprint:
    """What a run and its continuation must have in common."""

    settings: dict[str, Any]
    base: dict[str, str]
    rows: RowDigests


def write_checkpoint_manifest(checkpoint: Path, fingerprint: ResumeFingerprint) -> None:
    """Declare everything in a checkpoint folder to be complete, once it is on the disk."""
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    files = [path for path in files if path.name != CHECKPOINT_MANIFEST]
    # Else a power cut could leave the manifest and not the files.
    for path in [*files, *{path.parent for path in files}]:
        _flush(path)
    manifest: dict[str, Any] = asdict(fingerprint)
    manifest["files"] = {
        path.relative_to(checkpoint).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": digest_file(path),
        }
        for path in files
    }
    manifest["sha256"] = _digest_of(manifest)
    write_atomically(checkpoint / CHECKPOINT_MANIFEST, json.dumps(manifest, indent=2))
    _flush(checkpoint)


def read_checkpoint_manifest(checkpoint: Path) -> dict[str, Any]:
    """Raises ``FileNotFoundError``, or ``ValueError`` for anything else that is no manifest."""
    path = checkpoint / CHECKPOINT_MANIFEST
    if not path.exists():
        raise FileNotFoundError(path)
    manifest = read_json_object(path)
    if manifest.pop("sha256", None) != _digest_of(manifest):
        raise ValueError("its contents have changed: another sha256 is expected of them")
    return manifest


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_all_but_newest(folder: Path, number: int, best: str | None = None) -> None:
    complete = [
        checkpoint
        for checkpoint in list_checkpoints(folder)
        if not checkpoint.is_symlink() and not find_checkpoint_problems(checkpoint, contents=False)
    ]
    for checkpoint in complete[:-number]:
        if best is None or checkpoint.name != Path(best).name:
            shutil.rmtree(checkpoint)


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders, complete or not, in the order of their steps."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=checkpoint_step)


def checkpoint_step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def find_checkpoint_problems(checkpoint: Path, contents: bool = True) -> list[str]:
    """What is wrong with a checkpoint, one line a file; nothing if it is complete.

    Args:
        contents: Whether to read the files, too; else their sizes are looked at alone.
    """
    try:
        manifest = read_checkpoint_manifest(checkpoint)
        files = [(name, of["bytes"], of["sha256"]) for name, of in manifest["files"].items()]
        if not files:
            return [f"{CHECKPOINT_MANIFEST} is damaged: it lists no file"]
        if odd := [n for n, *_ in files if "\0" in n or n.startswith("/") or ".." in Path(n).parts]:
            return [f"{CHECKPOINT_MANIFEST} is damaged: {shorten(odd[0])} is no file of the checkpoint"]
    except FileNotFoundError:
        return [f"{CHECKPOINT_MANIFEST} is missing: the checkpoint was not written to its end"]
    except (LookupError, TypeError, AttributeError) as error:
        return [f"{CHECKPOINT_MANIFEST} is damaged: it does not list files as expected ({error!r})"]
    except ValueError as error:
        return [f"{CHECKPOINT_MANIFEST} is damaged: {error}"]
    faults = []
    for name, size, sha256 in files:
        path = checkpoint / name
        try:
            found = path.stat().st_size
            if found != size:
                faults.append(f"{name}: expected {size} bytes, found {found}")
            elif contents and digest_file(path) != sha256:
                faults.append(f"{name} has changed since it was written: its sha256 is another")
        except OSError as error:
            faults.append(f"{name}: expected {size} bytes, and {error.strerror}")
    return faults


def last_complete_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step; warns of incomplete ones that are newer."""
    for checkpoint in reversed(list_checkpoints(folder)):
        faults = find_checkpoint_problems(checkpoint)
        if not faults:
            return checkpoint
        logger.warning("%s is incomplete and not used:\n  - %s", checkpoint, _in_lines(faults))
    return None


def require_checkpoint(folder: Path, checkpoint: Path) -> None:
    """Raise ``ValueError`` for a checkpoint that is incomplete, not in ``folder``, or followed by
    complete ones, which would be overwritten."""
    present = list_checkpoints(folder)
    if checkpoint.resolve() not in [path.resolve() for path in present]:
        found = listed([path.name for path in present], MAX_LISTED_PROBLEMS) or "none"
        raise ValueError(f"{checkpoint} is not a checkpoint in {folder}; there: {found}")
    if faults := find_checkpoint_problems(checkpoint):
        raise ValueError(
            f"{checkpoint} is incomplete:\n  - {_in_lines(faults)}\n"
            "continue from the last complete checkpoint instead: --resume"
        )
    later = [path for path in present if checkpoint_step(path) > checkpoint_step(checkpoint)]
    if complete := [path.name for path in later if not find_checkpoint_problems(path)]:
        raise ValueError(
            f"continuing from {checkpoint.name} would overwrite {listed(complete)}; move them out "
            f"of {folder}, or continue from the last one (--resume)"
        )


def set_incomplete_aside(folder: Path, after_step: int) -> None:
    """Rename the incomplete checkpoints of later steps, for new ones will need their names.

    Nothing is deleted; a warning gives the new names.
    """
    for checkpoint in list_checkpoints(folder):
        if checkpoint_step(checkpoint) <= after_step or not find_checkpoint_problems(checkpoint):
            continue
        aside = folder / f"incomplete-{checkpoint.name}"
        number = 1
        while aside.exists():
            number += 1
            aside = folder / f"incomplete-{checkpoint.name}-{number}"
        checkpoint.rename(aside)
        logger.warning("%s is now %s; delete it if you do not need it", checkpoint, aside)


def require_same_run(checkpoint: Path, settings: dict, base: dict[str, str]) -> None:
    """Raise ``ValueError`` naming what differs from the run that wrote a complete checkpoint.

    Args:
        settings, base: Of :class:`Origin`.
    """
    written = read_checkpoint_manifest(checkpoint)
    differences = _differences(written["settings"], settings)
    differences += [f"of the model, {told}" for told in _differences(written["base"], base)]
    if differences:
        raise ValueError(
            f"{checkpoint} is of a run with other settings:\n  - {_in_lines(differences)}\n"
            "continue with what it has, or start a new run in another folder (out)"
        )


def data_changes(checkpoint: Path, rows: RowDigests, accept: bool) -> list[str]:
    """What is different in ``rows``, a line each, since a complete checkpoint was written.

    Raises:
        ValueError: something is, and it is not to be accepted.
    """
    there, changes = read_checkpoint_manifest(checkpoint).get("rows", {}), []
    if there.get("digest") != rows.digest:
        told = f"rows: {there.get('number', '?')} there, {rows.number} now; "
        changes.append(told + "others, or in another order")
    if there.get("evaluated") and rows.evaluated and there["evaluated"] != rows.evaluated:
        changes.append("rows for evaluation: others; the best so far is of those there")
    if changes and not accept:
        raise ValueError(
            f"{checkpoint} is of a run on other data:\n  - {_in_lines(changes)}\n"
            "continue with the data it has, or with this (--accept-changed-data), or start a new "
            "run in another folder (out)"
        )
    return changes


def _differences(there: dict, now: dict) -> list[str]:
    return [
        f"{name}: {there.get(name, 'absent')} there, {now.get(name, 'absent')} now"
        for name in sorted(there.keys() | now.keys())
        if name not in there or name not in now or there[name] != now[name]
    ]


def _in_lines(faults: list[str]) -> str:
    return listed(faults, MAX_LISTED_PROBLEMS, between="\n  - ")
