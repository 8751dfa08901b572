"""Files that hold either what they held or all that is written, whatever happens meanwhile."""

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file, or make it; a power cut cannot leave its name and half of its bytes.

    A link stays one. Text is written in UTF-8.

    Raises:
        OSError: it cannot be written; what was there is there still, and nothing is beside it.
    """
    with open_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """As :func:`write_atomically`, a piece at a time: the file is replaced when the block ends."""
    path = path.resolve()
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def remove_partial(folder: Path, names: list[str]) -> None:
    """Remove what was written of files when a process was killed. Nobody may be writing them."""
    for path in folder.glob("*.partial"):
        if (found := re.fullmatch(r"(.+)\.[0-9a-f]{32}\.partial", path.name)) and found[1] in names:
            path.unlink(missing_ok=True)
