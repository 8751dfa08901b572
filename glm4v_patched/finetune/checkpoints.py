"""Detect which checkpoints are complete, and whether a run may resume from one.

The Trainer and DeepSpeed write a checkpoint's files, about ten from each process, straight into its
final folder, so a run that is killed while it writes leaves a folder that looks complete. A
checkpoint is therefore complete only if it has a manifest, ``complete.json``, which is written
last, once the files of every process are on the disk. The manifest lists the files with their sizes
and digests, and the fingerprint that a resumed run must match.

A manifest reveals unfinished checkpoints, missing or changed files, and its own damage. It does not
reveal every change: of files above 64 MiB, only sampled blocks are hashed, because checkpoints of
the real model have 200 GB. Someone could also write a new manifest for changed files.
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
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)", re.ASCII)
MAX_LISTED_PROBLEMS = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowDigests:
    """Digests of the rows of a run.

    Args:
        number: How many rows there are to train on.
        digest: Digest of the rows to train on, in their order, with the bytes of their images.
        evaluated: Digest of the rows for evaluation, if evaluations decide which step is saved or
            when the run ends; else None.
    """

    number: int
    digest: str
    evaluated: str | None = None


@dataclass(frozen=True)
class ResumeFingerprint:
    """Settings and digests that must be the same when a run is resumed.

    Args:
        settings: Values of the recipe by dotted names, and the number of processes.
        base: Digests of the base model's files by name.
        rows: Digests of the rows.
    """

    settings: dict[str, Any]
    base: dict[str, str]
    rows: RowDigests


def write_checkpoint_manifest(checkpoint: Path, fingerprint: ResumeFingerprint) -> None:
    """Mark a checkpoint as complete, after flushing all of its files to the disk."""
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    files = [path for path in files if path.name != CHECKPOINT_MANIFEST]
    # Without fsync, a power cut could leave the manifest without the files.
    for path in [*files, *{path.parent for path in files}]:
        _fsync(path)
    manifest: dict[str, Any] = asdict(fingerprint)
    manifest["files"] = {
        path.relative_to(checkpoint).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": digest_file(path),
        }
        for path in files
    }
    manifest["sha256"] = _manifest_digest(manifest)
    write_atomically(checkpoint / CHECKPOINT_MANIFEST, json.dumps(manifest, indent=2))
    _fsync(checkpoint)


def read_checkpoint_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        FileNotFoundError: There is no manifest.
        ValueError: The manifest is damaged.
    """
    path = checkpoint / CHECKPOINT_MANIFEST
    if not path.exists():
        raise FileNotFoundError(path)
    manifest = read_json_object(path)
    if manifest.pop("sha256", None) != _manifest_digest(manifest):
        raise ValueError("its contents have changed: they do not match its sha256")
    return manifest


def _manifest_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _fsync(path: Path) -> None:
    """Call fsync on a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_all_but_newest(folder: Path, num_kept: int, best: str | None = None) -> None:
    """Delete the complete checkpoints except the newest ``num_kept`` and the best one.

    Incomplete checkpoints, and links to checkpoints, are not deleted.

    Args:
        best: Path of the best checkpoint, if there is one.
    """
    complete = [
        checkpoint
        for checkpoint in list_checkpoints(folder)
        if not checkpoint.is_symlink() and not find_checkpoint_problems(checkpoint, contents=False)
    ]
    for checkpoint in complete[:-num_kept]:
        if best is None or checkpoint.name != Path(best).name:
            shutil.rmtree(checkpoint)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint folders, complete or not, in the order of their steps."""
    if not folder.is_dir():
        return []
    named = (path for path in folder.iterdir() if CHECKPOINT_NAME.fullmatch(path.name))
    return sorted((path for path in named if path.is_dir()), key=checkpoint_step)


def checkpoint_step(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def find_checkpoint_problems(checkpoint: Path, contents: bool = True) -> list[str]:
    """Return what is wrong with a checkpoint, one text per file; [] if it is complete.

    Args:
        contents: Whether to compare the digests of the files in addition to their sizes.
    """
    try:
        manifest = read_checkpoint_manifest(checkpoint)
        files = [
            (name, entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()
        ]
        if not files:
            return [f"{CHECKPOINT_MANIFEST} is damaged: it lists no file"]
        for name, _, _ in files:
            if "\0" in name or name.startswith("/") or ".." in Path(name).parts:
                return [
                    f"{CHECKPOINT_MANIFEST} is damaged: {shorten(name)} is not a path inside of "
                    "the checkpoint"
                ]
    except FileNotFoundError:
        return [f"{CHECKPOINT_MANIFEST} is missing: the checkpoint was not written to its end"]
    except (LookupError, TypeError, AttributeError) as error:
        return [f"{CHECKPOINT_MANIFEST} is damaged: it does not list files as expected ({error!r})"]
    except ValueError as error:
        return [f"{CHECKPOINT_MANIFEST} is damaged: {error}"]
    problems = []
    for name, expected_size, sha256 in files:
        path = checkpoint / name
        try:
            size = path.stat().st_size
            if size != expected_size:
                problems.append(f"{name}: expected {expected_size} bytes, found {size}")
            elif contents and digest_file(path) != sha256:
                problems.append(f"{name} has changed since it was written: its sha256 differs")
        except OSError as error:
            problems.append(f"{name}: expected {expected_size} bytes, and {error.strerror}")
    return problems


def last_complete_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint of the highest step, and warn of incomplete later ones."""
    for checkpoint in reversed(list_checkpoints(folder)):
        problems = find_checkpoint_problems(checkpoint)
        if not problems:
            return checkpoint
        logger.warning("%s is incomplete and not used:\n  - %s", checkpoint, _as_list(problems))
    return None


def require_checkpoint(folder: Path, checkpoint: Path) -> None:
    """Raise ``ValueError`` for a checkpoint that a run in ``folder`` cannot resume from.

    Such a checkpoint is incomplete, lies in another folder, or has later complete checkpoints,
    which the run would overwrite.
    """
    present = list_checkpoints(folder)
    if checkpoint.resolve() not in [path.resolve() for path in present]:
        names = listed([path.name for path in present], MAX_LISTED_PROBLEMS) or "none"
        raise ValueError(f"{checkpoint} is not a checkpoint in {folder}; its checkpoints: {names}")
    if problems := find_checkpoint_problems(checkpoint):
        raise ValueError(
            f"{checkpoint} is incomplete:\n  - {_as_list(problems)}\n"
            "resume from the last complete checkpoint instead: --resume"
        )
    later = [path for path in present if checkpoint_step(path) > checkpoint_step(checkpoint)]
    if complete := [path.name for path in later if not find_checkpoint_problems(path)]:
        raise ValueError(
            f"resuming from {checkpoint.name} would overwrite {listed(complete)}; move them out "
            f"of {folder}, or resume from the last one (--resume)"
        )


def set_incomplete_aside(folder: Path, after_step: int) -> None:
    """Rename the incomplete checkpoints after a step, because the run will reuse their names.

    No file is deleted; a warning reports the new names.
    """
    for checkpoint in list_checkpoints(folder):
        if checkpoint_step(checkpoint) <= after_step or not find_checkpoint_problems(checkpoint):
            continue
        new_path = folder / f"incomplete-{checkpoint.name}"
        number = 1
        while new_path.exists():
            number += 1
            new_path = folder / f"incomplete-{checkpoint.name}-{number}"
        checkpoint.rename(new_path)
        logger.warning(
            "the incomplete %s is now %s; delete it if you do not need it", checkpoint, new_path
        )


def require_same_run(checkpoint: Path, settings: dict, base: dict[str, str]) -> None:
    """Raise ``ValueError`` if the settings or the model differ from a complete checkpoint's.

    Args:
        settings, base: As in :class:`ResumeFingerprint`.
    """
    manifest = read_checkpoint_manifest(checkpoint)
    differences = _differences(manifest["settings"], settings)
    differences += [f"of the model, {line}" for line in _differences(manifest["base"], base)]
    if differences:
        raise ValueError(
            f"{checkpoint} was saved with other settings:\n  - {_as_list(differences)}\n"
            "resume with the same settings, or start a new run in another folder (out)"
        )


def data_changes(checkpoint: Path, rows: RowDigests, accept: bool) -> list[str]:
    """Return a line for each change of the rows since a complete checkpoint was written.

    Raises:
        ValueError: There are changes, and ``accept`` is False.
    """
    before, changes = read_checkpoint_manifest(checkpoint).get("rows", {}), []
    if before.get("digest") != rows.digest:
        number = before.get("number", "?")
        changes.append(
            f"rows: {number} then, {rows.number} now; their contents or their order differ"
        )
    if before.get("evaluated") and rows.evaluated and before["evaluated"] != rows.evaluated:
        changes.append("rows for evaluation differ; the best score so far is that of the old ones")
    if changes and not accept:
        raise ValueError(
            f"{checkpoint} was saved by a run on other data:\n  - {_as_list(changes)}\n"
            "resume with the same data, or with this data (--accept-changed-data), or start a new "
            "run in another folder (out)"
        )
    return changes


def _differences(saved: dict, now: dict) -> list[str]:
    """Return a line for each key whose values differ."""
    return [
        f"{name}: {saved.get(name, 'absent')} then, {now.get(name, 'absent')} now"
        for name in sorted(saved.keys() | now.keys())
        if name not in saved or name not in now or saved[name] != now[name]
    ]


def _as_list(lines: list[str]) -> str:
    return listed(lines, MAX_LISTED_PROBLEMS, separator="\n  - ")
