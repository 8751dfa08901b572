"""A cache, in the user's cache folder, of what earlier checks found of images.

Where nothing can be written, everything is checked each time.
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

VERSION = 2
MOST_BYTES = 2**28
"""Of the file, which is begun anew when it is larger."""

logger = logging.getLogger(__name__)


def default_path() -> Path | None:
    """In ``$XDG_CACHE_HOME``, or ``~/.cache``; None for who has no home."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or ".")
    if not root.is_absolute():  # then it is to be ignored, as that standard says
        try:
            root = Path.home() / ".cache"
        except RuntimeError:
            return None
    return root / "glm4v-patched" / f"checked-images-{VERSION}.jsonl"


class Memory:
    """JSON values by keys, in a file to which several processes may append at once.

    Each line begins with its digest, so that one that was cut or damaged is not read. Without a
    path, or after an error, nothing is there.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.file: BinaryIO | None = None
        if path is None:
            return
        with self._given_up_at_errors():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if fault := find_file_problem(path, alone=True):
                raise OSError(f"it {fault}")
            self.file = path.open("a+b")
            if self.file.tell() > MOST_BYTES:
                self.file.truncate(0)

    def get(self, keys: Sequence[str]) -> dict[str, Any]:
        """The values of those keys that there are; the last one of each."""
        wanted = {*keys}
        found: dict[str, Any] = {}
        with self._given_up_at_errors():
            if self.file is not None:
                self.file.seek(0)
            for line in self.file or ():
                digest, _, text = line.strip().partition(b" ")
                if digest == _digest(text):
                    found |= {key: of for key, of in json.loads(text).items() if key in wanted}
        return found

    def put(self, values: Mapping[str, Any]) -> None:
        text = json.dumps(values).encode()
        with self._given_up_at_errors():
            if self.file is not None and values:
                # The line before may have been cut.
                self.file.write(b"\n%b %b\n" % (_digest(text), text))
                self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        self.file = None

    @contextmanager
    def _given_up_at_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.warning("%s is not used: %s", self.path, error)
            self.file = None


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:16].encode()
