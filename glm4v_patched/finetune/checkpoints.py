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
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..models.base import digest
from ..terminal_text import listed

MANIFEST = "complete.json"
PARTIAL_MANIFEST = MANIFEST + ".partial"
ROWS = "rows.json"
NAME = re.compile(r"checkpoint-(\d+)", re.ASCII)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rows:
    """The rows that are learned, in their order.

    Args:
        digests: Of each row with the bytes of its pictures.
        lines: Where it stands in the file; of several files, with the file's name.
        evaluated: Digest of the rows for evaluation, where they decide what is saved or when the
            run ends.
    """

    digests: tuple[str, ...]
    lines: tuple[int | str, ...]
    evaluated: str | None = None

    def changes_to(self, new: "Rows") -> list[str]:
        """What is different in ``new``, a line for each kind; nothing if they are the same."""
        changes = self._changes_to_learned(new)
        if self.evaluated and new.evaluated and self.evaluated != new.evaluated:
            changes.append("rows for evaluation: others; the best so far is of those there")
        return changes

    def _changes_to_learned(self, new: "Rows") -> list[str]:
        if self.digests == new.digests:
            return []
        there, now = len(self.digests), len(new.digests)
        changed = [
            line for line, a, b in zip(new.lines, self.digests, new.digests, strict=False) if a != b
        ]
        counts = Counter(self.digests), Counter(new.digests)
        if counts[0] == counts[1]:
            return [f"rows: the same {now}, in another order from line {changed[0]} on"]
        gone, come = _lines_of(self, counts[0] - counts[1]), _lines_of(new, counts[1] - counts[0])
        if there == now and len(changed) == len(come):
            return [f"rows: {now} there and now, {_count(changed, 'differ')}"]
        changes = f"{_count(gone, 'are gone')}; {_count(come, 'are new')}"
        return [f"rows: {there} there, {now} now; {changes}"]


def _lines_of(rows: Rows, wanted: Counter) -> list[int | str]:
    """Where so many rows of each digest stand; of equal ones, the last."""
    lines: list[int | str] = []
    for row, line in zip(reversed(rows.digests), reversed(rows.lines), strict=True):
        if wanted[row] > 0:
            wanted[row] -= 1
            lines.append(line)
    return lines[::-1]


def _count(lines: Sequence[int | str], what: str, most: int = 5) -> str:
    if not lines:
        return f"0 {what}"
    places = ", ".join(map(str, lines[:most])) + (", ..." if len(lines) > most else "")
    return f"{len(lines)} {what} (line{'s' if len(lines) > 1 else ''} {places})"


@dataclass(frozen=True)
class Origin:
    """What a run and its continuation must have in common."""

    settings: dict[str, Any]
    base: dict[str, str]
    rows: Rows


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class WrittenFile(_Strict):
    bytes: Annotated[int, Field(ge=0)]
    sha256: str


class Manifest(_Strict):
    """What ``complete.json`` holds; ``sha256`` is of all the rest."""

    settings: dict[str, Any]
    base: dict[str, str]
    files: Annotated[dict[str, WrittenFile], Field(min_length=1)]
    sha256: str

    @model_validator(mode="after")
    def _check(self) -> "Manifest":
        if self.sha256 != self.digest_of_rest():
            raise ValueError("its contents have changed: another sha256 is expected of them")
        for name in self.files:
            path = PurePosixPath(name)
            if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
                raise ValueError(f"it lists {name!r}, which is not in it")
        return self

    def digest_of_rest(self) -> str:
        text = json.dumps(self.model_dump(exclude={"sha256"}), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def read(cls, checkpoint: Path) -> "Manifest":
        """Raises ``FileNotFoundError``, or ``ValueError`` for anything else that is no manifest."""
        try:
            return cls.model_validate(json.loads((checkpoint / MANIFEST).read_bytes()))
        except FileNotFoundError:
            raise
        except ValidationError as error:
            first = error.errors()[0]
            text = first["msg"].removeprefix("Value error, ")
            raise ValueError(": ".join([*map(str, first["loc"]), text])) from None
        except (OSError, RecursionError) as error:
            raise ValueError(str(error)) from None


def write_manifest(checkpoint: Path, origin: Origin) -> None:
    """Declare everything in a checkpoint folder to be complete, once it is on the disk."""
    (checkpoint / ROWS).write_text(json.dumps(asdict(origin.rows)))
    files = [
        path
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name not in (MANIFEST, PARTIAL_MANIFEST)
    ]
    # Else a power cut could leave the manifest and not the files.
    for path in [*files, *{path.parent for path in files}]:
        _flush(path)
    manifest = Manifest.model_construct(
        # As they will be read: JSON has no tuples.
        settings=json.loads(json.dumps(origin.settings)),
        base=origin.base,
        files={
            path.relative_to(checkpoint).as_posix(): WrittenFile(
                bytes=path.stat().st_size, sha256=digest(path)
            )
            for path in files
        },
        sha256="",
    )
    manifest = manifest.model_copy(update={"sha256": manifest.digest_of_rest()})
    partial = checkpoint / PARTIAL_MANIFEST
    partial.write_text(manifest.model_dump_json(indent=2))
    _flush(partial)
    os.replace(partial, checkpoint / MANIFEST)
    _flush(checkpoint)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_all_but_newest(folder: Path, number: int, best: str | None = None) -> None:
    complete = [
        checkpoint
        for checkpoint in checkpoints_in(folder)
        if not checkpoint.is_symlink() and not find_faults(checkpoint, contents=False)
    ]
    for checkpoint in complete[:-number]:
        if best is None or checkpoint.name != Path(best).name:
            shutil.rmtree(checkpoint)


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoint folders, complete or not, in the order of their steps."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def find_faults(checkpoint: Path, contents: bool = True) -> list[str]:
    """What is wrong with a checkpoint, one line a file; nothing if it is complete.

    Args:
        contents: Whether to read the files, too; else their sizes are looked at alone.
    """
    try:
        manifest = Manifest.read(checkpoint)
    except FileNotFoundError:
        return [f"{MANIFEST} is missing: the checkpoint was not written to its end"]
    except ValueError as error:
        return [f"{MANIFEST} is damaged: {error}"]
    faults = []
    for name, written in manifest.files.items():
        path = checkpoint / name
        try:
            found = path.stat().st_size
            same = not contents or found != written.bytes or digest(path) == written.sha256
        except OSError as error:
            reason = "is missing" if isinstance(error, FileNotFoundError) else f"({error})"
            faults.append(f"{name} {reason}: expected {written.bytes} bytes")
            continue
        if found != written.bytes:
            faults.append(f"{name}: expected {written.bytes} bytes, found {found}")
        elif not same:
            faults.append(f"{name} has changed since it was written: its sha256 is another")
    return faults


def last_complete_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step; warns of incomplete ones that are newer."""
    for checkpoint in reversed(checkpoints_in(folder)):
        faults = find_faults(checkpoint)
        if not faults:
            return checkpoint
        logger.warning("%s is incomplete and not used:\n  - %s", checkpoint, _in_lines(faults))
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
            f"{resume} is incomplete:\n  - {_in_lines(faults)}\n"
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


def require_same_settings(
    checkpoint: Path, settings: dict, base: dict[str, str], defaults: dict | None = None
) -> None:
    """Raise ``ValueError`` naming what differs from the run that wrote a complete checkpoint.

    Args:
        settings, base: Of :class:`Origin`.
        defaults: Values of settings that there were not yet when an older checkpoint was written.
    """
    written = Manifest.read(checkpoint)
    there = {name: value for name, value in (defaults or {}).items() if name in settings}
    differences = _differences(there | written.settings, json.loads(json.dumps(settings)))
    differences += _differences(written.base, base, of="of the model, ")
    if differences:
        raise ValueError(
            f"{checkpoint} is of a run with other settings:\n  - {_in_lines(differences)}\n"
            "continue with what it has, or start a new run in another folder (out)"
        )


def changes_of_data(checkpoint: Path, rows: Rows, accept: bool) -> list[str]:
    """What is different in ``rows``, a line each, since a complete checkpoint was written.

    Raises:
        ValueError: something is, and it is not to be accepted.
    """
    written = json.loads((checkpoint / ROWS).read_text())
    there = Rows(tuple(written["digests"]), tuple(written["lines"]), written.get("evaluated"))
    changes = there.changes_to(rows)
    if changes and not accept:
        raise ValueError(
            f"{checkpoint} is of a run on other data:\n  - {_in_lines(changes)}\n"
            "continue with the data it has, or with this (--accept-changed-data), or start a new "
            "run in another folder (out)"
        )
    return changes


def _differences(there: dict, now: dict, of: str = "") -> list[str]:
    def value(values: dict, name: str) -> Any:
        return values.get(name, "absent")

    return [
        f"{of}{name}: {value(there, name)} there, {value(now, name)} now"
        for name in sorted(there.keys() | now.keys())
        if name not in there or name not in now or there[name] != now[name]
    ]


def _names(checkpoints: list[Path]) -> str:
    return ", ".join(checkpoint.name for checkpoint in checkpoints) or "no checkpoint"


def _in_lines(faults: list[str]) -> str:
    return listed(faults, most=8, between="\n  - ")
