"""Limits on the cost of decoding an image, for rows of data and for clients of a server. Needs no
torch.

A limit on the number of pixels is not enough. A resize makes a temporary image as high as the
input. Decoding a progressive JPEG takes one pass over all pixels per scan. Pillow reads empty
segments one by one, and decodes some formats in Python.
"""

import io
import math
import re
import struct
from collections.abc import Collection

from PIL import Image

MAX_SIDE = 2**15
"""Limit on width and height, in pixels."""
NORMAL_SCANS = 10
"""Scans of a usual progressive JPEG (libjpeg's); more scans count as more pixels."""
MAX_PARTS = 40_000
"""Limit on segments, chunks, strips or tiles; :func:`max_parts` adds one for each 512 bytes."""
PIXELS_PER_PYTHON_BYTE = 16
"""Decoding a byte in Python takes as long as decoding this many pixels of PNG: 0.7 to 1.2 us."""
PIXELS_PER_PPM_COMMENT = 2000
"""Cost of one comment in a plain-text PPM; Pillow cuts each comment out of a block of 1 MB."""
# Inside of a scan, 0xff is followed by 0 or by the number of a restart marker.
# No "\xff+": with a literal first byte, re searches 20 times faster.
JPEG_MARKER_RE = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
SHRINK_CURE = "make it smaller (the model sees 1120 x 1120 pixels)"


class TooLargeError(ValueError):
    """Error of an image that costs too much to decode."""


class CountedFile(io.BytesIO):
    """The bytes of an image; reading more than ``reads_left`` times is a :class:`TooLargeError`."""

    def __init__(self, content: bytes):
        super().__init__(content)
        self.reads_left: float = max_parts(content)

    def read(self, size: int | None = -1) -> bytes:
        self.reads_left -= 1
        if self.reads_left < 0:
            raise _too_many_parts(len(self.getbuffer()))
        return super().read(size)


def max_parts(content: bytes) -> int:
    return MAX_PARTS + len(content) // 512


def count_decoded_pixels(image: Image.Image, content: bytes, max_pixels: int) -> int:
    """Return the cost of decoding an image, in pixels, from its header.

    Raises:
        TooLargeError: The cost is above ``max_pixels``, a side is too long, or the image has too
            many parts.
    """
    width, height = image.size
    dimensions = f"{width:,} x {height:,} pixels"
    if width * height > max_pixels:
        raise TooLargeError(f"is too large ({dimensions}); expected at most {max_pixels:,} pixels")
    if max(width, height) > MAX_SIDE:
        raise TooLargeError(f"is too large ({dimensions}); expected at most {MAX_SIDE:,} per side")
    # Tiles of a TIFF may be larger than the image; each tile is decoded completely.
    tags = getattr(image, "tag_v2", {})
    tile = [tags.get(tag, 0) for tag in (322, 323)]
    if max(tile) > MAX_SIDE or tile[0] * tile[1] > max_pixels:
        raise TooLargeError(f"has tiles of {tile[0]:,} x {tile[1]:,} pixels for {dimensions}")
    scans = 1
    if image.format in ("JPEG", "MPO"):
        scans = _count_scans(content)
    elif image.format == "PNG":
        _check_chunks(content)
    if len(getattr(image, "tile", ())) > max_parts(content):
        raise _too_many_parts(len(content))
    cost = width * height * max(scans, NORMAL_SCANS) // NORMAL_SCANS
    in_python = _cost_in_python(image, content)
    if in_python > max_pixels:
        raise TooLargeError(
            f"is too large (Pillow decodes {image.format} in Python, where {len(content):,} bytes "
            f"take as long as {in_python:,} pixels); expected at most {max_pixels:,} pixels: save "
            "it as PNG"
        )
    if cost > max_pixels:
        raise TooLargeError(
            f"is too large ({dimensions}, decoded in {scans} scans of a progressive JPEG); "
            f"expected at most {max_pixels * NORMAL_SCANS // scans:,} pixels: save it again"
        )
    return max(cost, in_python)


def _cost_in_python(image: Image.Image, content: bytes) -> int:
    """Return the cost of decoding in Python, in pixels; 0 for formats that Pillow decodes in C."""
    codec = next((tile[0] for tile in getattr(image, "tile", ())), None)
    if codec not in Image.DECODERS:
        return 0
    comments = content.count(b"#") if codec == "ppm_plain" else 0
    return len(content) * PIXELS_PER_PYTHON_BYTE + comments * PIXELS_PER_PPM_COMMENT


def open_image(content: bytes, formats: Collection[str] | None = None) -> Image.Image:
    """Open an image from its bytes without decoding it.

    Args:
        formats: Names of the Pillow formats that are accepted; None accepts all.
    """
    file = CountedFile(content)
    image = Image.open(file)
    file.reads_left = math.inf  # some decoders read byte by byte
    # Pillow's argument ``formats`` would not help, because later code opens the bytes without it.
    if formats is not None and image.format not in formats:
        raise ValueError(f"it is {image.format}; expected {', '.join(formats)}: convert it to PNG")
    return image


def _count_scans(content: bytes) -> int:
    """Return how many scans the first image of a JPEG has."""
    scans, position, parts_left = 0, 2, max_parts(content)
    while match := JPEG_MARKER_RE.search(content, position):
        marker, position = content[match.end() - 1], match.end()
        parts_left -= 1
        if parts_left < 0:
            raise _too_many_parts(len(content))
        if marker == 0xD9:  # end of image
            break
        if marker in (0x01, 0xD8):  # markers without a length
            continue
        scans += marker == 0xDA
        position += int.from_bytes(content[position : position + 2], "big")
    return scans


def _check_chunks(content: bytes) -> None:
    position, parts_left = 8, max_parts(content)
    while position + 8 <= len(content):
        parts_left -= 1
        if parts_left < 0:
            raise _too_many_parts(len(content))
        length, name = struct.unpack_from(">I4s", content, position)
        if name == b"IEND":
            break
        position += length + 12


def _too_many_parts(size: int) -> TooLargeError:
    limit = MAX_PARTS + size // 512
    return TooLargeError(f"has over {limit:,} parts in {size:,} bytes: save it again")
