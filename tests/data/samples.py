"""Rows for tests, files of rows, and images."""

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from glm4v_patched.data.checked_data import CheckedData
from glm4v_patched.data.collate import SampleSize


def said(role: str, content: Any = "x", **more: Any) -> dict:
    return {"role": role, "content": content, **more}


def turns(question: Any = "q", answer: Any = "a", **more: Any) -> list[dict]:
    """A question with an answer."""
    return [said("user", question, **more), said("assistant", answer)]


def write_rows(path: Path, *rows: Any) -> Path:
    """JSON lines; of a list the messages, of a text the line itself."""
    whole = [{"messages": row} if isinstance(row, list) else row for row in rows]
    lines = [row if isinstance(row, str) else json.dumps(row) for row in whole]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def contents_of(checked: CheckedData) -> tuple:
    """All that a check has found, to compare it with another's."""
    files = [(file.path, file.sha256) for file in (*checked.files, *checked.images)]
    sizes = [checked.column(name).tolist() for name in SampleSize._fields]
    rows = checked.sample_labels, checked.sample_digests, [*checked.conversations()]
    plain = checked.sources, checked.pack_to, checked.skipped, checked.eval_option
    return *plain, files, sizes, rows, checked.eval and contents_of(checked.eval)


def png(color: Any = "red", side: int = 8) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (side, side), color).save(content, "PNG")
    return content.getvalue()
