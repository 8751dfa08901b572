"""Cache the results of image checks in the user's cache folder.

If the cache cannot be written, every image is decoded each time.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ..atomic import find_file_problem

CACHE_VERSION = 2  # of the file's format; it is part of the file's name
MAX_CACHE_BYTES = 2**28
"""A larger cache file is emptied."""

logger = logging.getLogger(__name__)


def default_cache_path() -> Path | None:
    """Return the path of the cache file in ``$XDG_CACHE_HOME`` or ``~/.cache``; None if there is no
    home folder."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or ".")
    if not root.is_absolute():  # by the XDG standard, a relative path is ignored
        try:
            root = Path.home() / ".cache"
        except RuntimeError:
            return None
    return root / "glm4v-patched" / f"checked-images-{CACHE_VERSION}.jsonl"


class ImageCheckCache:
    """A map from keys to JSON values in a file, to which several processes may append at once.

    Each line of the file begins with a digest of the rest, so that damaged lines are ignored. If
    ``path`` is None, or after an error, the cache is empty and stores nothing.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.file: BinaryIO | None = None
        if path is None:
            return
        with self._disabled_on_error():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if problem := find_file_problem(path, refuse_hard_links=True):
                raise OSError(f"it {problem}")
            self.file = path.open("a+b")
            if self.file.tell() > MAX_CACHE_BYTES:
                self.file.truncate(0)

    def get(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the latest value of each key that is in the cache."""
        requested = {*keys}
        values: dict[str, Any] = {}
        with self._disabled_on_error():
            if self.file is not None:
                self.file.seek(0)
            for line in self.file or ():
                digest, _, text = line.strip().partition(b" ")
                if digest == _line_digest(text):
                    values |= {k: v for k, v in json.loads(text).items() if k in requested}
        return values

    def put(self, values: Mapping[str, Any]) -> None:
        """Append values by key, which replace earlier values of these keys."""
        text = json.dumps(values).encode()
        with self._disabled_on_error():
            if self.file is not None and values:
                # The first newline ends the previous line, which may be cut short.
                self.file.write(b"\n%b %b\n" % (_line_digest(text), text))
                self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        self.file = None

    @contextmanager
    def _disabled_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.warning("the cache %s is not used: %s", self.path, error)
            self.file = None


def _line_digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:16].encode()
