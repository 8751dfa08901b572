"""A cache, in the user's cache folder, of what earlier checks of data found.

A damaged one is deleted. Where nothing can be written, everything is checked each time.
"""

import hashlib
import json
import logging
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..atomic import fault_of_file
from ..paths import PathError, expand

VERSION = 1
SECONDS_TO_WAIT = 10
KEYS_AT_ONCE = 500  # SQLite takes 999 in a query

logger = logging.getLogger(__name__)


def default_path() -> Path | None:
    """In ``$XDG_CACHE_HOME``, or ``~/.cache``; None for who has no home."""
    try:
        root = Path(expand(os.environ.get("XDG_CACHE_HOME") or "."))
    except PathError as error:
        raise ValueError(f"XDG_CACHE_HOME: {error}") from None
    if not root.is_absolute():  # then it is to be ignored, as that standard says
        try:
            root = Path.home() / ".cache"
        except RuntimeError:
            return None
    return root / "glm4v-patched" / f"checked-data-{VERSION}.sqlite"


class Memory:
    """JSON values by keys, in a SQLite file, which several processes may use at once.

    A value whose digest does not fit is not there. Without a path, or after an error, nothing is.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.connection: sqlite3.Connection | None = None
        for each in () if path is None else (path, Path(f"{path}-journal")):
            if fault := fault_of_file(each, alone=True):
                logger.warning("%s is not used: %s %s", path, each.name, fault)
                return
        if path is not None:
            self._open(path)

    def get(self, keys: Sequence[str]) -> dict[str, Any]:
        """The values of those keys that there are."""
        found = {}
        for start in range(0, len(keys), KEYS_AT_ONCE):
            some = keys[start : start + KEYS_AT_ONCE]
            marks = ", ".join("?" * len(some))
            query = f"SELECT key, value, digest FROM entries WHERE key IN ({marks})"
            with self._given_up_at_errors():
                rows = self.connection.execute(query, some).fetchall() if self.connection else ()
                for key, value, digest in rows:
                    if digest == _digest(key, value):
                        found[key] = json.loads(value)
        return found

    def put(self, values: Mapping[str, Any]) -> None:
        texts = {key: json.dumps(value) for key, value in values.items()}
        rows = [(key, text, _digest(key, text)) for key, text in texts.items()]
        with self._given_up_at_errors():
            if self.connection is not None:
                with self.connection as file:
                    file.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", rows)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None

    def _open(self, path: Path) -> None:
        with self._given_up_at_errors():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.connection = sqlite3.connect(path, timeout=SECONDS_TO_WAIT)
            # Reads all of it: a page that is damaged would show only when it is met.
            if self.connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("the file is damaged")
            columns = "key TEXT PRIMARY KEY, value TEXT, digest TEXT"
            with self.connection as file:
                file.execute(f"CREATE TABLE IF NOT EXISTS entries ({columns})")

    @contextmanager
    def _given_up_at_errors(self) -> Iterator[None]:
        """A file that is damaged is deleted, too; errors of other kinds are subclasses."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            self.close()
            assert self.path is not None
            is_damaged = type(error) is sqlite3.DatabaseError
            told = "is damaged, deleted, and begun anew next time" if is_damaged else "is not used"
            logger.warning("%s %s: %s", self.path, told, error)
            if is_damaged:
                self.path.unlink(missing_ok=True)
                # Else SQLite would roll it back into the new file.
                Path(f"{self.path}-journal").unlink(missing_ok=True)


def _digest(key: str, value: str) -> str:
    return hashlib.sha256(f"{key} {value}".encode()).hexdigest()[:16]
