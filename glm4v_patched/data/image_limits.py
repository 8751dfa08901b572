"""Limits on the cost of decoding an image of a data set or of a request to the server. Needs no
torch.

A limit on the number of pixels is not enough, because other properties of an image cost memory or
time, too. A resize makes a temporary image as high as the input. Decoding a progressive JPEG takes
one pass over all pixels per scan. Pillow reads empty segments one by one, and decodes some formats
in Python.
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
"""Scans of a progressive JPEG that libjpeg writes. An image with more scans costs more pixels."""
MAX_PARTS = 40_000
"""Limit on the parts of an image: segments of a JPEG, chunks of a PNG, strips or tiles of a TIFF.
:func:`max_parts` adds one part for each 512 bytes."""
PIXELS_PER_PYTHON_BYTE = 16
"""Decoding a byte in Python takes as long as decoding this many pixels of PNG: 0.7 to 1.2 us."""
PIXELS_PER_PPM_COMMENT = 2000
"""Cost of one comment in a plain-text PPM, in pixels. Pillow cuts each comment out of a block of 1
MB."""
# A marker begins a segment. In the data of a scan, 0xff is followed by 0 or by the number of a
# restart marker. The pattern begins with one literal byte instead of "\xff+", because re searches
# for it 20 times faster.
JPEG_MARKER_RE = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
SHRINK_CURE = "make it smaller (the model sees 1120 x 1120 pixels)"


class TooLargeError(ValueError):
    """Raised for an image that costs too much to decode."""


class ReadLimitedFile(io.BytesIO):
    """The bytes of an image. After ``reads_left`` calls, :meth:`read` raises
    :class:`TooLargeError`."""

    def __init__(self, content: bytes):
        super().__init__(content)
        self.reads_left: float = max_parts(content)

    def read(self, size: int | None = -1) -> bytes:
        self.reads_left -= 1
        if self.reads_left < 0:
            raise _too_many_parts(len(self.getbuffer()))
        return super().read(size)


def max_parts(content: bytes) -> int:
    """Return the limit on the parts of an image of these bytes."""
    return MAX_PARTS + len(content) // 512


def count_decoded_pixels(image: Image.Image, content: bytes, max_pixels: int) -> int:
    """Return the cost of decoding an image, in pixels that take as long. Nothing is decoded.

    Args:
        image: The image, from :func:`open_image`.
        content: The bytes of its file.

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
    tile_width, tile_height = tags.get(322, 0), tags.get(323, 0)  # TileWidth and TileLength
    if max(tile_width, tile_height) > MAX_SIDE or tile_width * tile_height > max_pixels:
        tile = f"{tile_width:,} x {tile_height:,}"
        raise TooLargeError(f"has tiles of {tile} pixels for {dimensions}")
    num_scans = 1
    if image.format in ("JPEG", "MPO"):
        num_scans = _count_scans(content)
    elif image.format == "PNG":
        _check_chunks(content)
    if len(getattr(image, "tile", ())) > max_parts(content):
        raise _too_many_parts(len(content))
    scan_cost = width * height * max(num_scans, NORMAL_SCANS) // NORMAL_SCANS
    python_cost = _cost_in_python(image, content)
    if python_cost > max_pixels:
        raise TooLargeError(
            f"is too large (Pillow decodes {image.format} in Python, where {len(content):,} bytes "
            f"take as long as {python_cost:,} pixels); expected at most {max_pixels:,} pixels: "
            "save it as PNG"
        )
    if scan_cost > max_pixels:
        raise TooLargeError(
            f"is too large ({dimensions}, decoded in {num_scans} scans of a progressive JPEG); "
            f"expected at most {max_pixels * NORMAL_SCANS // num_scans:,} pixels: save it again"
        )
    return max(scan_cost, python_cost)


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
    file = ReadLimitedFile(content)
    image = Image.open(file)
    file.reads_left = math.inf  # some decoders read byte by byte
    # Image.open(file, formats) is not used: later code opens the same bytes without its formats.
    if formats is not None and image.format not in formats:
        raise ValueError(f"it is {image.format}; expected {', '.join(formats)}: convert it to PNG")
    return image


def _count_scans(content: bytes) -> int:
    """Return how many scans the first image of a JPEG has."""
    num_scans, position, parts_left = 0, 2, max_parts(content)
    while match := JPEG_MARKER_RE.search(content, position):
        marker, position = content[match.end() - 1], match.end()
        parts_left -= 1
        if parts_left < 0:
            raise _too_many_parts(len(content))
        if marker == 0xD9:  # end of image
            break
        if marker in (0x01, 0xD8):  # markers without a length
            continue
        num_scans += marker == 0xDA  # start of scan
        position += int.from_bytes(content[position : position + 2], "big")
    return num_scans


def _check_chunks(content: bytes) -> None:
    """Raise :class:`TooLargeError` if a PNG has too many chunks."""
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
