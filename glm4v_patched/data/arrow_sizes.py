"""What the batches of an Arrow file say of themselves, before Arrow unpacks them at once.

pyarrow shows a message's kind and its bytes alone. The header is in the format of FlatBuffers, by
Arrow's File.fbs and Message.fbs: pyarrow has seen to it that its offsets lead to its own bytes.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

OLD_COMPRESSION = b"ARROW:experimental_compression"
# Numbers of fields.
DICTIONARIES, BATCHES = 2, 3  # of a footer
HEADER = 2  # of a message
DATA = 1  # of a dictionary
LENGTH, BUFFERS, COMPRESSION = 0, 2, 3  # of a batch


class BatchSize(NamedTuple):
    """How many rows a batch has, and bytes of what is compressed in it."""

    is_dictionary: bool
    rows: int
    unpacked: int


def batch_sizes(file: Any, is_file: bool) -> Iterator[BatchSize]:
    """Yield the sizes of the batches and dictionaries that are read of an Arrow file.

    Args:
        file: What :func:`pyarrow.memory_map` opened; it is left anywhere.
        is_file: Whether it is a file with a footer, and no stream.

    Raises:
        ValueError: They are compressed in a way that does not show their sizes.
    """
    for message in _messages_of_file(file) if is_file else _messages_of_stream(file):
        is_dictionary = message.type == "dictionary"
        if not (is_dictionary or message.type == "record batch"):
            continue
        content = message.metadata.to_pybytes()
        if OLD_COMPRESSION in content:
            raise ValueError("its batches are compressed as by Arrow 0.17: write the table again")
        batch = _root(content).table(HEADER)
        batch = batch.table(DATA) if is_dictionary else batch
        unpacked = 0
        if batch.place_of(COMPRESSION):
            for place in batch.structs(BUFFERS, 16):
                at, size = struct.unpack_from("<qq", content, place)
                if size:  # by its first 8 bytes; -1, if it is as it is
                    unpacked += max(struct.unpack_from("<q", message.body, at)[0], 0)
        length = batch.place_of(LENGTH)
        rows = struct.unpack_from("<q", content, length)[0] if length else 0
        yield BatchSize(is_dictionary, rows, unpacked)


def _messages_of_stream(file: Any) -> Iterator[Any]:
    import pyarrow

    file.seek(0)
    return iter(pyarrow.ipc.MessageReader.open_stream(file))


def _messages_of_file(file: Any) -> Iterator[Any]:
    import pyarrow

    pyarrow.ipc.open_file(file)  # checks the footer
    end = file.size() - len(b"____ARROW1")
    file.seek(end)
    (size,) = struct.unpack("<i", file.read(4))
    file.seek(end - size)
    content = file.read(size)
    footer = _root(content)
    for field in (DICTIONARIES, BATCHES):
        for place in footer.structs(field, 24):
            file.seek(struct.unpack_from("<q", content, place)[0])
            yield pyarrow.ipc.read_message(file)


class _Table(NamedTuple):
    """A table of FlatBuffers, which begins with the distance to its list of fields."""

    content: bytes
    at: int

    def place_of(self, field: int) -> int:
        """Return where a field is; 0, if it has its default value."""
        fields = self.at - struct.unpack_from("<i", self.content, self.at)[0]
        place = 4 + 2 * field
        if place >= struct.unpack_from("<H", self.content, fields)[0]:
            return 0
        offset = struct.unpack_from("<H", self.content, fields + place)[0]
        return offset and self.at + offset

    def table(self, field: int) -> "_Table":
        return _Table(self.content, _follow(self.content, self.place_of(field)))

    def structs(self, field: int, size: int) -> range:
        """Return where the elements of a list are."""
        if not (place := self.place_of(field)):
            return range(0)
        begin = _follow(self.content, place) + 4
        (number,) = struct.unpack_from("<I", self.content, begin - 4)
        return range(begin, begin + number * size, size)


def _root(content: bytes) -> _Table:
    return _Table(content, _follow(content, 0))


def _follow(content: bytes, at: int) -> int:
    return at + struct.unpack_from("<I", content, at)[0]
