"""Decode images completely, as training will, to find those that cannot be read."""

import hashlib
import os
import re
import stat
import warnings
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from .file_signatures import LONG_TEXT_CURE, RAW_CURE, fill_cure, find_signature
from .image_limits import SHRINK_CURE, TooLargeError, count_decoded_pixels, open_image
from .workers import count_cores

MAX_PIXELS = 120 * 10**6
"""Phone cameras have up to 108 megapixels; this many decoded pixels take half a gigabyte."""
MAX_IMAGE_BYTES = 2**29
# TIFF tags: the first is only in DNG files; bit 0 of the second marks a smaller copy of an image.
DNG_VERSION, NEW_SUBFILE_TYPE = 50706, 254
TEXT_RE = re.compile(rb"[\s!-~\x80-\xff]*")  # no control characters
MAX_THREADS = 32  # more would wait for the GIL
IMAGES_PER_SUBMIT = 1000  # paths that are passed to the threads at a time


class ImageCheck(NamedTuple):
    """The size, times and digest of an image file; ``problem`` says why it cannot be used."""

    size: int
    mtime_ns: int
    ctime_ns: int
    sha256: str
    problem: str | None


UNREAD_IMAGE = ImageCheck(-1, -1, -1, "", None)  # to be copied with the problem of a file


def check_image_file(path: str) -> ImageCheck:
    """Read an image file and decode all of it."""
    try:
        # Checked before the file is opened, because reading a pipe would block.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return UNREAD_IMAGE._replace(problem="is not a file")
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size > MAX_IMAGE_BYTES:
                limit = f"expected at most {MAX_IMAGE_BYTES:,}: {SHRINK_CURE}"
                return UNREAD_IMAGE._replace(problem=f"has {status.st_size:,} bytes; {limit}")
            content = file.read()
    except FileNotFoundError:
        return UNREAD_IMAGE._replace(problem="does not exist")
    except (OSError, ValueError, MemoryError) as error:
        # strerror leaves out the name of the file, which may be very long.
        reason = getattr(error, "strerror", None) or error
        return UNREAD_IMAGE._replace(problem=f"cannot be read: {reason}")
    digest = hashlib.sha256(content).hexdigest()
    problem = find_image_problem(content, path)
    return ImageCheck(len(content), status.st_mtime_ns, status.st_ctime_ns, digest, problem)


def has_decodable_header(path: str) -> bool:
    """Return whether the header of a file is that of an image within the limits of
    :func:`check_image_file`. The pixels are not decoded."""
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > MAX_IMAGE_BYTES:
            return False
        with open(path, "rb") as file:
            content = file.read()
        with warnings.catch_warnings(action="ignore"), open_image(content) as image:
            count_decoded_pixels(image, content, MAX_PIXELS)
            return True
    except Exception:  # Pillow's readers raise any kind
        return False


def find_image_problem(content: bytes, path: str = "FILE") -> str | None:
    """Return why the image in ``content`` cannot be used, or None.

    Args:
        path: The image's file, for commands in the message.
    """
    from ..remote.image_processing_chatglm import as_image  # imports torch

    if not content:
        return "is empty: it has 0 bytes; copy it again"
    # This filter stays, because filters are global: a thread that removed it would do so for all.
    warnings.filterwarnings("ignore", module=r"PIL\b")
    try:
        with open_image(content) as image:
            count_decoded_pixels(image, content, MAX_PIXELS)
            tags = getattr(image, "tag_v2", {})
            if DNG_VERSION in tags or tags.get(NEW_SUBFILE_TYPE, 0) & 1:
                return f"is a preview in a RAW photo: {fill_cure(RAW_CURE, path)}"
            # Decode as the image processor will.
            image = as_image(image)
            if image.mode != "RGB":
                image.convert("RGB")
    except TooLargeError as error:
        return f"{error}: {SHRINK_CURE}"
    except Image.DecompressionBombError as error:  # Pillow's own limit, when it opens the image
        size = str(error).partition(" exceeds")[0]
        return f"is too large ({size}); expected at most {MAX_PIXELS:,} pixels: {SHRINK_CURE}"
    except UnidentifiedImageError:
        if signature := find_signature(content, content):
            name, cure = signature
            return f"is {name}: {fill_cure(cure, path)}"
        if TEXT_RE.fullmatch(content[:1000]):
            return "is text, such as a server's error: copy or download it again"
        return "cannot be read as an image: Pillow does not know its format; save it as PNG"
    except Exception as error:  # Pillow's readers raise any kind for broken files
        reason = str(error) or type(error).__name__
        if "MAX_TEXT_" in reason:
            return f"has over 1 MiB of text: {fill_cure(LONG_TEXT_CURE, path)}"
        # Messages of this package's image processor begin with "it"; other errors are Pillow's.
        if reason.startswith("it "):
            return reason.removeprefix("it ")
        return f"cannot be read as an image: {reason}"
    return None


def check_image_files(paths: Sequence[str]) -> Generator[ImageCheck, None, None]:
    """Yield the result of :func:`check_image_file` for each path, in order.

    There is one thread per core, because Pillow and hashlib release the GIL. Closing the generator
    cancels the remaining checks.
    """
    with ThreadPoolExecutor(min(count_cores(), MAX_THREADS)) as threads:
        for start in range(0, len(paths), IMAGES_PER_SUBMIT):
            yield from threads.map(check_image_file, paths[start : start + IMAGES_PER_SUBMIT])
