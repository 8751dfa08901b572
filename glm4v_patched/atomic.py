"""Files that hold either what they held or all that is written, whatever happens meanwhile."""

import os
import uuid
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file, or make it; a power cut cannot leave its name and half of its bytes.

    A link stays one. Text is written in UTF-8.

    Raises:
        OSError: it cannot be written; what was there is there still, and nothing is beside it.
    """
    path = path.resolve()
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
