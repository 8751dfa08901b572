"""The images of a request, within the limits; needs no torch.

Whoever is behind :class:`guard.Guard` reads data URLs alone: what a request names by http(s) is
fetched here, or refused. Files of the server are never read for a client.
"""

import base64
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from PIL import Image

from ...data.fetching import fetch
from ...data.image_files import decode_data_url
from ...data.image_limits import TooLargeError, count_decoded_pixels, open_image
from ...data.messages import describe_value
from .limits import LARGEST_IMAGES, MOST_BYTES_OF_TEXT, MOST_DEPTH, ApiError, ServerLimits, key_of

IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's names of the formats that clients may send."""
# Keys of OpenAI's API, and of vLLM's additions to it, under which something may be fetched.
KEYS_OF_URLS = ("url", "image_url", "image", "video_url", "audio_url", "file_url")
# Keys of a request in which nothing is fetched.
NO_IMAGES = ("metadata", "tools")
SECONDS_TO_FETCH = 60
HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")

# Of its size, which is judged here; for ever, as threads must not change it for a while.
warnings.simplefilter("ignore", Image.DecompressionBombWarning)


def check_and_fetch_images(body: Any, limits: ServerLimits) -> bool:
    """Check the images and the length of a request, and put what it has fetched into it.

    Returns:
        Whether the body was changed.
    """
    images, size = _images_in(body)
    if size > MOST_BYTES_OF_TEXT:
        raise ApiError(
            413,
            f"the request has {size:,} bytes of text; this server takes {MOST_BYTES_OF_TEXT:,}, "
            "which is more than the model reads: send less",
            code="request_too_large",
        )
    if len(images) > limits.max_images:
        raise ApiError(
            400,
            f"the messages have {len(images):,} images; this server takes "
            f"{limits.max_images:,} (--max-images): send fewer",
            key_of(images[0][1][:1]),
            "too_many_images",
        )
    fetched = pixels = 0
    for holder, place in images:
        with _naming(key_of(place), limits):
            content, is_fetched = _read(holder[place[-1]], limits, fetched)
            if is_fetched:
                fetched += len(content)
                encoded = base64.b64encode(content).decode()
                holder[place[-1]] = f"data:image/any;base64,{encoded}"
            with open_image(content, IMAGE_FORMATS) as image:
                pixels += count_decoded_pixels(image, content, limits.max_pixels)
    if pixels > (most := limits.max_pixels * LARGEST_IMAGES):
        told = f"the messages have {len(images):,} images of {pixels / 1e6:.1f} million pixels"
        option = f"{LARGEST_IMAGES} times --max-image-megapixels"
        raise _too_large(told, most, option, key_of(images[0][1][:1]))
    return fetched > 0


@contextmanager
def _naming(key: str, limits: ServerLimits) -> Iterator[None]:
    """Raise what is wrong with an image as ``ApiError`` that names its key."""
    try:
        yield
    except ApiError as error:
        raise ApiError(error.status, f"{key}: {error}", key, error.code) from None
    except (TooLargeError, Image.DecompressionBombError) as error:
        told = f"{key}: an image {error}"
        raise _too_large(told, limits.max_pixels, "--max-image-megapixels", key) from None
    except Exception as error:  # Pillow raises whatever its readers raise
        told = str(error) if type(error) is ValueError else type(error).__name__
        told = f"{key}: it is no image that this server reads ({told})"
        raise ApiError(400, told, key, "invalid_image") from None


def _images_in(body: Any) -> tuple[list[tuple[Any, tuple]], int]:
    """Return what holds each image of a request, and its place; and the bytes of all else."""
    images: list[tuple[Any, tuple]] = []
    size = 0
    waiting: list[tuple[Any, tuple, bool]] = [(body, (), True)]
    while waiting:
        value, where, has_images = waiting.pop()
        if len(where) >= MOST_DEPTH:
            raise ApiError(400, f"the body has over {MOST_DEPTH} levels; expected fewer")
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            place = (*where, key)
            may_be = has_images and not (value is body and key in NO_IMAGES)
            size += _size_of(key, place)
            if isinstance(each, dict | list):
                waiting.append((each, place, may_be))
            elif isinstance(each, str) and may_be and key in KEYS_OF_URLS:
                images.append((value, place))
            else:
                size += _size_of(each, place)
    return images, size


def _size_of(value: Any, place: tuple) -> int:
    """Return the bytes of a text, or raise ``ApiError`` of one that no tokenizer reads."""
    if not isinstance(value, str):
        return 0
    if half := HALF_OF_A_PAIR.search(value):
        key = key_of(place)
        told = f"has {ascii(half[0])}, half of a surrogate pair and no character"
        raise ApiError(400, f"{key} {told}", key)
    return len(value.encode())


def _read(url: str, limits: ServerLimits, before: int) -> tuple[bytes, bool]:
    """Return the file of an image, and whether it was fetched: after so many bytes ``before``."""
    if url[:5].lower() == "data:":
        return decode_data_url(url), False
    if not url[:8].lower().startswith(("http://", "https://")):
        raise ValueError(f"it is {describe_value(url)}; expected data:image/...;base64,...")
    if not limits.allow_urls:
        raise ApiError(
            400,
            f"image is {describe_value(url)}: this server fetches no images (it was started "
            "without --allow-urls); send it as data:image/...;base64,...",
            code="url_not_allowed",
        )
    return fetch(url, limits.max_body_bytes - before, SECONDS_TO_FETCH), True


def _too_large(told: str, most: int, option: str, key: str | None = None) -> ApiError:
    return ApiError(
        400,
        f"{told}; this server takes {most / 1e6:g} million ({option}): make it smaller, the model "
        "sees far fewer",
        key,
        "image_too_large",
    )
