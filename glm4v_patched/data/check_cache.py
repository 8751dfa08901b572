"""A cache, in the user's cache folder, of what earlier checks of data found.

A damaged file is written again. Where nothing can be written, everything is checked each time.
"""

import hashlib
import json
import logging
import os
import sqlite3
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ..atomic import fault_of_file

VERSION = 1
SECONDS_TO_WAIT = 10
KEYS_AT_ONCE = 500  # SQLite takes 999 in a query

logger = logging.getLogger(__name__)


def default_path() -> Path | None:
    """In ``$XDG_CACHE_HOME``, or ``~/.cache``; None for who has no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored, as that standard says.
    if os.path.isabs(given):
        root = Path(given)
    else:
        try:
            root = Path.home() / ".cache"
        except RuntimeError:
            return None
    return root / "glm4v-patched" / f"checked-data-{VERSION}.sqlite"


class Memory:
    """JSON values by keys, in a SQLite file, which several processes may use at once.

    A value whose digest does not fit is not there. Without a path, or after an error of the file
    system, nothing is.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.connection: sqlite3.Connection | None = None
        if path is None:
            return
        for each in (path, Path(f"{path}-journal")):
            if fault := fault_of_file(each, alone=True):
                logger.warning("%s is not used: %s %s", path, each.name, fault)
                return
        try:
            try:
                self._open(path)
            except sqlite3.DatabaseError as error:
                if not self._set_aside(error):
                    raise
                self._open(path)
        except (OSError, sqlite3.Error) as error:
            self._give_up(error)

    def get(self, keys: Iterable[str]) -> dict[str, Any]:
        """The values of those keys that there are."""
        found = {}
        keys = iter(keys)
        while self.connection and (some := list(islice(keys, KEYS_AT_ONCE))):
            marks = ", ".join("?" * len(some))
            query = f"SELECT key, value, digest FROM entries WHERE key IN ({marks})"
            try:
                rows = self.connection.execute(query, some).fetchall()
            except sqlite3.Error as error:
                self._give_up(error)
                break
            for key, value, digest in rows:
                if digest == _digest(key, value):
                    found[key] = json.loads(value)
        return found

    def put(self, values: Mapping[str, Any]) -> None:
        rows = []
        for key, value in values.items():
            text = json.dumps(value)
            rows.append((key, text, _digest(key, text)))
        if self.connection is None or not rows:
            return
        try:
            with self.connection:
                self.connection.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", rows)
        except sqlite3.Error as error:
            self._give_up(error)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.connection = sqlite3.connect(path, timeout=SECONDS_TO_WAIT)
        # Reads all of it: a page that is damaged would show only when it is met.
        if self.connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("the file is damaged")
        with self.connection:
            self.connection.execute(
                "CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value TEXT, digest TEXT)"
            )

    def _give_up(self, error: Exception) -> None:
        self.close()
        if not self._set_aside(error):
            logger.warning("%s is not used: %s", self.path, error)

    def _set_aside(self, error: Exception) -> bool:
        """Delete a file that is damaged, and nothing for errors of other kinds (subclasses)."""
        if self.path is None or type(error) is not sqlite3.DatabaseError:
            return False
        self.close()
        logger.warning("%s is damaged and begun anew: %s", self.path, error)
        self.path.unlink(missing_ok=True)
        # Else SQLite would roll it back into the new file.
        Path(f"{self.path}-journal").unlink(missing_ok=True)
        return True


def _digest(key: str, value: str) -> str:
    return hashlib.sha256(f"{key} {value}".encode()).hexdigest()[:16]
