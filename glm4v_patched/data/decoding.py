"""Decodes images completely, as training will, to find those that cannot be read before it."""

import hashlib
import os
import stat
import warnings
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from .image_limits import SMALLER, TooLargeError, count_decoded_pixels, open_image
from .workers import cores

MOST_PIXELS = 120 * 10**6
"""More than the 108 megapixels of a telephone; half a gigabyte where it is decoded."""
MOST_BYTES = 2**29
MOST_THREADS = 32  # more would wait for Python's lock
ASKED_AT_ONCE = 1000


class Facts(NamedTuple):
    """An image's file, and why it cannot be learned from, if so."""

    size: int
    mtime_ns: int
    ctime_ns: int
    sha256: str
    fault: str | None


NOT_READ = Facts(-1, -1, -1, "", None)


def check_image_file(path: str) -> Facts:
    """Read an image and decode all of it."""
    try:
        # Before it is opened: a pipe would be waited for.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return NOT_READ._replace(fault="is not a file")
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_size > MOST_BYTES:
                told = f"has {found.st_size:,} bytes; expected {MOST_BYTES:,} at most"
                return NOT_READ._replace(fault=f"{told}: {SMALLER}")
            content = file.read()
    except FileNotFoundError:
        return NOT_READ._replace(fault="does not exist")
    except (OSError, ValueError, MemoryError) as error:
        # Without the name, which may be as long as the row.
        reason = getattr(error, "strerror", None) or error
        return NOT_READ._replace(fault=f"cannot be read: {reason}")
    digest = hashlib.sha256(content).hexdigest()
    return Facts(len(content), found.st_mtime_ns, found.st_ctime_ns, digest, find_fault(content))


def may_be_decoded(path: str) -> bool:
    """Return whether a file's header, which is all that is decoded, says that it is an image, and
    none that costs more than :func:`check_image_file` takes."""
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > MOST_BYTES:
            return False
        with open(path, "rb") as file:
            content = file.read()
        with warnings.catch_warnings(action="ignore"), open_image(content) as image:
            count_decoded_pixels(image, content, MOST_PIXELS)
            return True
    except Exception:  # Pillow raises whatever its readers raise
        return False


def find_fault(content: bytes) -> str | None:
    """Why an image of these bytes cannot be learned from; None if it can."""
    from ..remote.image_processing_chatglm import as_image  # late: it imports torch

    if not content:
        return "is empty: it has 0 bytes; copy it again"
    # For ever: threads must not change filters for a while.
    warnings.filterwarnings("ignore", module=r"PIL\b")
    try:
        with open_image(content) as image:
            count_decoded_pixels(image, content, MOST_PIXELS)
            # As the image processor will; where nothing changes it copies nothing.
            image = as_image(image)
            if image.mode != "RGB":
                image.convert("RGB")
    except TooLargeError as error:
        return f"{error}: {SMALLER}"
    except Image.DecompressionBombError as error:  # Pillow raises it for still larger ones
        told = str(error).partition(" exceeds")[0]
        return f"is too large ({told}); expected {MOST_PIXELS:,} pixels at most: {SMALLER}"
    except UnidentifiedImageError:
        return "cannot be read as an image: it is of no kind that Pillow knows"
    except Exception as error:  # Pillow raises whatever a broken file makes its readers raise
        told = str(error) or type(error).__name__
        # The image processor's own words are of "it".
        is_ours = told.startswith("it ")
        return told.removeprefix("it ") if is_ours else f"cannot be read as an image: {told}"
    return None


def check_image_files(paths: Sequence[str]) -> Generator[Facts, None, None]:
    """:func:`check_image_file` for each path, in order.

    In threads, a core each: Pillow and hashlib compute without Python's lock. What was asked for is
    given up where no more answers are wanted.
    """
    with ThreadPoolExecutor(min(cores(), MOST_THREADS)) as threads:
        for start in range(0, len(paths), ASKED_AT_ONCE):
            yield from threads.map(check_image_file, paths[start : start + ASKED_AT_ONCE])
