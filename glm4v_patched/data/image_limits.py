"""What an image may cost: for rows of data, and for clients of a server. Needs no torch.

Pixels alone do not say it: a resize has a temporary image as high as the input, a progressive JPEG
decodes all of its pixels once a scan, and Pillow reads a file of millions of empty segments one by
one, in Python; so it decodes some formats.
"""

import io
import math
import re
import struct
from collections.abc import Collection

from PIL import Image

MOST_SIDE = 2**15
"""Pixels of a side."""
SCANS = 10
"""Of a progressive JPEG as libjpeg writes it; one with more counts as more pixels."""
MOST_PARTS = 40_000
"""Segments, chunks, strips or tiles of any file; a larger one may have a part for 512 bytes."""
# In the data of a scan, 0xff is followed by 0 or the number of a restart.
PIXELS_OF_A_BYTE = 16
"""A byte that is decoded in Python takes as long as so many pixels of PNG: 0.7 to 1.2 us."""
PIXELS_OF_A_COMMENT = 2000
"""In a PPM of text: each is cut out of a block of 1 MB."""
NEXT_MARKER = re.compile(rb"\xff+[^\x00\xd0-\xd7\xff]")
SMALLER = "make it smaller (the model sees 1120 x 1120 pixels)"


class TooLargeError(ValueError):
    """An image that costs too much; the message has the numbers and the cure."""


class CountedFile(io.BytesIO):
    """The bytes of an image, whose header may be read in a limited number of pieces."""

    def __init__(self, content: bytes):
        super().__init__(content)
        self.left: float = most_parts(content)

    def read(self, size: int | None = -1) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise _too_many_parts(len(self.getbuffer()))
        return super().read(size)


def most_parts(content: bytes) -> int:
    return MOST_PARTS + len(content) // 512


def count_decoded_pixels(image: Image.Image, content: bytes, most_pixels: int) -> int:
    """Return the pixels that an image counts as, from its header.

    Raises:
        TooLargeError: they are over ``most_pixels``, a side or the number of its parts is too
            large.
    """
    width, height = image.size
    shown = f"{width:,} x {height:,} pixels"
    if width * height > most_pixels:
        raise TooLargeError(f"is too large ({shown}); expected {most_pixels:,} pixels at most")
    if max(width, height) > MOST_SIDE:
        raise TooLargeError(f"is too large ({shown}); expected {MOST_SIDE:,} at most of a side")
    # Tiles of TIFF may be larger than the image, and are decoded whole.
    tags = getattr(image, "tag_v2", {})
    tile = [tags.get(tag, 0) for tag in (322, 323)]
    if max(tile) > MOST_SIDE or tile[0] * tile[1] > most_pixels:
        raise TooLargeError(f"has tiles of {tile[0]:,} x {tile[1]:,} pixels for {shown}")
    scans = 1
    if image.format in ("JPEG", "MPO"):
        scans = _count_scans(content)
    elif image.format == "PNG":
        _check_chunks(content)
    if len(getattr(image, "tile", ())) > most_parts(content):
        raise _too_many_parts(len(content))
    cost = width * height * max(scans, SCANS) // SCANS
    in_python = _cost_in_python(image, content)
    if in_python > most_pixels:
        raise TooLargeError(
            f"is too large ({len(content):,} bytes of {image.format} that Pillow decodes in "
            f"Python take as long as {in_python:,} pixels); expected {most_pixels:,} pixels at "
            "most: save it as PNG"
        )
    if cost > most_pixels:
        raise TooLargeError(
            f"is too large ({shown}, {scans} times: a scan of JPEG each); expected "
            f"{most_pixels * SCANS // scans:,} pixels at most: save it anew"
        )
    return max(cost, in_python)


def _cost_in_python(image: Image.Image, content: bytes) -> int:
    """Return the pixels that the bytes count as; 0 where Pillow decodes them in C."""
    codec = next((tile[0] for tile in getattr(image, "tile", ())), None)
    if codec not in Image.DECODERS:
        return 0
    comments = content.count(b"#") if codec == "ppm_plain" else 0
    return len(content) * PIXELS_OF_A_BYTE + comments * PIXELS_OF_A_COMMENT


def open_image(content: bytes, formats: Collection[str] | None = None) -> Image.Image:
    """Open an image of bytes, and decode nothing.

    Args:
        formats: Of Pillow's names, those that are taken; None is all.
    """
    file = CountedFile(content)
    image = Image.open(file)
    file.left = math.inf  # some decoders read byte by byte
    # Not by Pillow's own ``formats``: what decodes it later would take the first that fits.
    if formats is not None and image.format not in formats:
        raise ValueError(f"it is {image.format}; expected {', '.join(formats)}: convert it to PNG")
    return image


def _count_scans(content: bytes) -> int:
    """Return how many scans the first image of a JPEG has."""
    scans, place, left = 0, 2, most_parts(content)
    while found := NEXT_MARKER.search(content, place):
        marker, place = content[found.end() - 1], found.end()
        left -= 1
        if left < 0:
            raise _too_many_parts(len(content))
        if marker == 0xD9:  # its end
            break
        if marker in (0x01, 0xD8):  # without a length
            continue
        scans += marker == 0xDA
        place += int.from_bytes(content[place : place + 2], "big")
    return scans


def _check_chunks(content: bytes) -> None:
    place, left = 8, most_parts(content)
    while place + 8 <= len(content):
        left -= 1
        if left < 0:
            raise _too_many_parts(len(content))
        length, name = struct.unpack_from(">I4s", content, place)
        if name == b"IEND":
            break
        place += length + 12


def _too_many_parts(size: int) -> TooLargeError:
    most = MOST_PARTS + size // 512
    return TooLargeError(f"has over {most:,} parts in {size:,} bytes: save it anew")
