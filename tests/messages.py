"""The words of errors and of what is printed, beside each room's tests.

``tests/<room>/__snapshots__/messages.ambr`` has one entry a message. A test says that a mistake is
refused, with which class and what of the input is named; its words stand in that file. Entries are
renewed by ``pytest tests/<room> --snapshot-update`` and read in review; one whose test has gone is
found by tests/test_project.py, and taken out by removing the file before that command.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from syrupy.extensions.amber import AmberSnapshotExtension

from tests.helpers.refused import refused


class RoomMessages(AmberSnapshotExtension):
    """One file a folder of tests, entries by test file and test."""

    @classmethod
    def get_location(cls, *, test_location, index) -> str:
        return str(Path(cls.dirname(test_location=test_location)) / "messages.ambr")

    @classmethod
    def get_snapshot_name(cls, *, test_location, index=0) -> str:
        name = super().get_snapshot_name(test_location=test_location, index=index)
        return f"{name} in {Path(test_location.filepath).name}"

    @classmethod
    def matches_test_location(cls, *, test_location, snapshot_location) -> bool:
        return snapshot_location == cls.get_location(test_location=test_location, index=0)


class Words:
    """Compares words with the room's file, apart from what each run has of its own."""

    def __init__(self, snapshot, folder: Path):
        self.snapshot = snapshot.use_extension(RoomMessages)
        self.folder = folder

    def __call__(self, message: object, **changing: object) -> None:
        """``changing`` gives names to other parts that differ from run to run: ``port=4711``."""
        text = str(message).replace(str(self.folder), "FOLDER")
        for name, value in changing.items():
            text = text.replace(str(value), name.upper())
        assert text == self.snapshot

    @contextmanager
    def refused(
        self, kind: type[BaseException], *named: str, **changing: object
    ) -> Iterator[pytest.ExceptionInfo]:
        """What is done within raises ``kind``; its words name each of ``named``: what of the input
        is wrong, such as a file with its line, a key or a number."""
        with refused(kind, *named) as caught:
            yield caught
        self(caught.value, **changing)
