"""Check and fetch the images of a request; needs no torch.

http(s) URLs of images are either replaced by data URLs of the fetched images, or refused. So the
application behind :class:`guard.Guard` gets data URLs only. No client can read files of the server.
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
from .limits import (
    MAX_JSON_DEPTH,
    MAX_PIXELS_FACTOR,
    MAX_TEXT_BYTES,
    ApiError,
    ServerLimits,
    format_key,
)

IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's names of the image formats that clients may send."""
# Keys of OpenAI's API, and of vLLM's additions to it, whose value may be the URL of an image.
URL_KEYS = ("url", "image_url", "image", "video_url", "audio_url", "file_url")
# Top-level keys that are not searched for images.
KEYS_WITHOUT_IMAGES = ("metadata", "tools")
FETCH_TIMEOUT_S = 60
SURROGATE_HALF = re.compile("[\ud800-\udfff]")

# This module checks sizes itself, so it disables Pillow's warning. It does so permanently, because
# warnings.catch_warnings is not thread-safe.
warnings.simplefilter("ignore", Image.DecompressionBombWarning)


def check_and_fetch_images(body: Any, limits: ServerLimits) -> bool:
    """Check a request's images and length of text, and replace URLs of images by fetched images.

    Args:
        body: JSON of the request; changed in place.

    Returns:
        Whether the body was changed.

    Raises:
        ApiError: An image cannot be read or exceeds a limit. The error names the image's key.
    """
    images, text_size = _collect_images(body)
    if text_size > MAX_TEXT_BYTES:
        raise ApiError(
            413,
            f"the request has {text_size:,} bytes of text, and this server accepts "
            f"{MAX_TEXT_BYTES:,}: send less (the model's context length is shorter still)",
            code="request_too_large",
        )
    list_key = format_key(images[0][1][:1]) if images else None  # such as "messages"
    if len(images) > limits.max_images:
        raise ApiError(
            400,
            f"the messages have {len(images):,} images, and this server accepts "
            f"{limits.max_images:,} (--max-images): send fewer",
            list_key,
            "too_many_images",
        )
    fetched_bytes = pixels = 0
    for container, path in images:
        with _name_key_in_errors(format_key(path), limits):
            content, is_fetched = _read_image(container[path[-1]], limits, fetched_bytes)
            if is_fetched:
                fetched_bytes += len(content)
                encoded = base64.b64encode(content).decode()
                container[path[-1]] = f"data:image/any;base64,{encoded}"
            with open_image(content, IMAGE_FORMATS) as image:
                pixels += count_decoded_pixels(image, content, limits.max_pixels)
    if pixels > (max_pixels := limits.max_pixels * MAX_PIXELS_FACTOR):
        problem = f"the {len(images):,} images in the messages have {pixels / 1e6:.1f} megapixels"
        option = f"{MAX_PIXELS_FACTOR} times --max-image-megapixels"
        raise _image_too_large(problem, max_pixels, option, list_key)
    return fetched_bytes > 0


@contextmanager
def _name_key_in_errors(key: str, limits: ServerLimits) -> Iterator[None]:
    """Convert errors about an image to an ``ApiError`` that names the image's key."""
    try:
        yield
    except ApiError as error:
        raise ApiError(error.status, f"{key}: {error}", key, error.code) from None
    except (TooLargeError, Image.DecompressionBombError) as error:
        problem = f"{key}: the image {error}"
        raise _image_too_large(problem, limits.max_pixels, "--max-image-megapixels", key) from None
    except Exception as error:  # Pillow's readers raise errors of many types
        reason = str(error) if type(error) is ValueError else type(error).__name__
        message = f"{key}: this is not an image that the server can read ({reason})"
        raise ApiError(400, message, key, "invalid_image") from None


def _collect_images(body: Any) -> tuple[list[tuple[Any, tuple]], int]:
    """Find the images in a request, and count the bytes of its text.

    Returns:
        For each image, the container of its URL and the URL's path in the JSON, such as
        ``("messages", 0, "content", 1, "image_url", "url")``; and the size of other text in bytes.
    """
    images: list[tuple[Any, tuple]] = []
    size = 0
    stack: list[tuple[Any, tuple, bool]] = [(body, (), True)]
    while stack:
        container, parent_path, may_have_images = stack.pop()
        if len(parent_path) >= MAX_JSON_DEPTH:
            raise ApiError(
                400, f"the body is nested more than {MAX_JSON_DEPTH} levels deep; expected fewer"
            )
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in items:
            path = (*parent_path, key)
            may_be_image = may_have_images and not (
                container is body and key in KEYS_WITHOUT_IMAGES
            )
            size += _text_bytes(key, path)
            if isinstance(value, dict | list):
                stack.append((value, path, may_be_image))
            elif isinstance(value, str) and may_be_image and key in URL_KEYS:
                images.append((container, path))
            else:
                size += _text_bytes(value, path)
    return images, size


def _text_bytes(value: Any, path: tuple) -> int:
    """Return a text's size in UTF-8; raise ``ApiError`` if the text cannot be encoded."""
    if not isinstance(value, str):
        return 0
    if match := SURROGATE_HALF.search(value):
        key = format_key(path)
        problem = f"has {ascii(match[0])}, half of a surrogate pair, which is not a character"
        raise ApiError(400, f"{key} {problem}", key)
    return len(value.encode())


def _read_image(url: str, limits: ServerLimits, fetched_bytes: int) -> tuple[bytes, bool]:
    """Return an image file, and whether it was fetched.

    Args:
        fetched_bytes: Size of the images that were fetched for this request so far.
    """
    if url[:5].lower() == "data:":
        return decode_data_url(url), False
    if not url[:8].lower().startswith(("http://", "https://")):
        raise ValueError(f"{describe_value(url)}; expected data:image/...;base64,...")
    if not limits.allow_urls:
        raise ApiError(
            400,
            f"the image is {describe_value(url)}, but this server does not fetch images (it was "
            "started without --allow-urls): send it as data:image/...;base64,...",
            code="url_not_allowed",
        )
    return fetch(url, limits.max_body_bytes - fetched_bytes, FETCH_TIMEOUT_S), True


def _image_too_large(
    problem: str, max_pixels: int, option: str, key: str | None = None
) -> ApiError:
    return ApiError(
        400,
        f"{problem}; this server accepts {max_pixels / 1e6:g} megapixels ({option}): send smaller "
        "images, as the model sees far fewer pixels",
        key,
        "image_too_large",
    )
