"""Conversations about pictures: reading them from JSONL.

A line of the file is ``{"messages": [...]}``; a message is ``{"role", "content"}``, one from the
user may carry ``"image"``: a path, relative to the file's folder.
"""

import json
from pathlib import Path

from PIL import Image

ROLES = ("system", "user", "assistant", "observation")


def read_conversations(path: str | Path) -> list[list[dict]]:
    """Read a JSONL file of conversations; image paths become absolute.

    Raises:
        ValueError: a line that is no conversation ending with the assistant, or an image that
            cannot be read; names the line.
    """
    path = Path(path)
    conversations = []
    # By the file, not by splitlines(): JSON strings may hold other line separators.
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                conversations.append(_parse(line, path.parent))
            except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
                raise ValueError(f"{path}:{number}: {_explain(error, line)}") from error
    if not conversations:
        raise ValueError(f"{path}: 0 conversations; expected at least 1 line")
    return conversations


def _explain(error: Exception, line: str) -> str:
    if type(error) is ValueError:
        return str(error)
    return f'expected {{"messages": [{{"role": ..., "content": ...}}]}}, got {line[:80]!r}'


def _parse(line: str, folder: Path) -> list[dict]:
    messages = json.loads(line)["messages"]
    for message in messages:
        if message["role"] not in ROLES:
            raise ValueError(f"the role {message['role']!r} is not one of {', '.join(ROLES)}")
        if not isinstance(message["content"], str):
            raise ValueError(f"content is a {type(message['content']).__name__}; expected text")
        if "image" in message:
            message["image"] = str(_checked_image(folder / message["image"]))
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError("expected a question and, at the end, a message of the assistant to learn")
    return messages


def _checked_image(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"the image {path} does not exist")
    try:
        with Image.open(path) as image:
            image.verify()
    except Exception as error:  # Pillow raises whatever a broken file makes its readers raise
        raise ValueError(f"the image {path} cannot be read: {error}") from error
    return path.resolve()


def write_conversations(path: Path, conversations: list[list[dict]]) -> None:
    """Write conversations as JSONL, with image paths relative to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for messages in conversations:
            relative = [
                message | {"image": str(Path(message["image"]).relative_to(path.parent))}
                if "image" in message
                else message
                for message in messages
            ]
            file.write(json.dumps({"messages": relative}, ensure_ascii=False) + "\n")
