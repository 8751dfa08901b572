"""The bytes of pictures in a request, within the limits; needs no torch.

Files of the server are never read for a client.
"""

import io
import warnings
from collections.abc import Iterator
from typing import Any

from PIL import Image

from ...data.messages import as_words
from ...data.pictures import fetch, from_data_url
from .errors import ApiError
from .limits import Limits

# Keys of OpenAI's API, and of vLLM's additions to it, under which something may be fetched.
KEYS_OF_URLS = ("url", "image_url", "video_url", "audio_url", "file_url")


def bytes_of(source: Any, limits: Limits) -> bytes:
    """The file of a picture.

    Args:
        source: A data URL, or one of http(s) where these are allowed.

    Raises:
        ApiError: it is something else, no picture, or too large.
    """
    if not isinstance(source, str):
        raise _refused(f"image_url is {as_words(source)}; expected a data URL")
    if source[:5].lower() == "data:":
        try:
            content = from_data_url(source)
        except ValueError as error:
            raise _refused(str(error)) from None
    elif _is_http(source):
        content = _fetched(source, limits)
    else:
        raise _refused(f"image is {as_words(source)}; expected data:image/...;base64,...")
    require_size(content, limits)
    return content


def _fetched(url: str, limits: Limits) -> bytes:
    if not limits.allow_urls:
        raise ApiError(
            400,
            f"image is {as_words(url)}: this server fetches no pictures (it was started without "
            "--allow-urls); send it as data:image/...;base64,...",
            "messages",
            "url_not_allowed",
        )
    try:
        return fetch(url, limits.max_body_bytes)
    except ValueError as error:
        raise _refused(str(error)) from None


def require_size(content: bytes, limits: Limits) -> None:
    """Raise ``ApiError`` if a picture has too many pixels; none is decoded for that."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its size, which is judged here
            with Image.open(io.BytesIO(content)) as image:
                width, height = image.size
    except Image.DecompressionBombError as error:
        raise _too_large(str(error), limits) from None
    except Exception as error:  # Pillow raises whatever its readers raise
        raise _refused(
            f"{len(content):,} bytes of an image are no picture ({type(error).__name__})"
        ) from None
    if width * height > limits.max_pixels:
        told = f"a picture has {width:,} x {height:,} pixels ({width * height / 1e6:.1f} million)"
        raise _too_large(told, limits)


def check_all(body: Any, limits: Limits) -> None:
    """Raise ``ApiError`` if anything in a request is not allowed to be fetched, or too large."""
    for url in urls_in(body):
        if not (limits.allow_urls and _is_http(url)):  # whoever fetches it judges its size
            bytes_of(url, limits)


def urls_in(body: Any) -> Iterator[str]:
    """All that a request names under :data:`KEYS_OF_URLS`, wherever it stands."""
    waiting = [body]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
            for key in KEYS_OF_URLS:
                if isinstance(value.get(key), str):
                    yield value[key]


def _is_http(url: str) -> bool:
    return url[:8].lower().startswith(("http://", "https://"))


def _refused(message: str) -> ApiError:
    return ApiError(400, message, "messages", "invalid_image")


def _too_large(told: str, limits: Limits) -> ApiError:
    most = limits.max_pixels / 1e6
    return ApiError(
        400,
        f"{told}; this server takes {most:g} million (--max-picture-megapixels): make it smaller, "
        "the model sees far fewer",
        "messages",
        "image_too_large",
    )
