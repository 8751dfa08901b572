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
from .limits import LARGEST_PICTURES, Limits

# Keys of OpenAI's API, and of vLLM's additions to it, under which something may be fetched.
KEYS_OF_URLS = ("url", "image_url", "video_url", "audio_url", "file_url")
# Keys of a request in which nothing is fetched.
NO_PICTURES = ("metadata", "tools")
SECONDS_TO_FETCH = 60


# Of its size, which is judged here; for ever, as threads must not change it for a while.
warnings.simplefilter("ignore", Image.DecompressionBombWarning)


class Pictures:
    """The pictures of a request, counted."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.number = self.pixels = self.fetched = 0

    def bytes_of(self, source: Any) -> bytes:
        """The file of a picture.

        Args:
            source: A data URL, or one of http(s) where these are allowed.

        Raises:
            ApiError: it is something else, no picture, or too large; or too many were there before.
        """
        self.count()
        if not isinstance(source, str):
            raise _refused(f"image_url is {as_words(source)}; expected a data URL")
        if source[:5].lower() == "data:":
            try:
                content = from_data_url(source)
            except ValueError as error:
                raise _refused(str(error)) from None
        elif _is_http(source):
            content = self._fetched(source)
        else:
            raise _refused(f"image is {as_words(source)}; expected data:image/...;base64,...")
        self._add(require_size(content, self.limits))
        return content

    def count(self) -> None:
        """Raise ``ApiError`` if there are too many with one more."""
        self.number += 1
        most = self.limits.max_pictures
        if self.number > most:
            raise ApiError(
                400,
                f"the messages have {self.number:,} pictures or more; this server takes {most:,} "
                "(--max-pictures): send fewer",
                "messages",
                "too_many_images",
            )

    def _fetched(self, url: str) -> bytes:
        if not self.limits.allow_urls:
            raise ApiError(
                400,
                f"image is {as_words(url)}: this server fetches no pictures (it was started "
                "without --allow-urls); send it as data:image/...;base64,...",
                "messages",
                "url_not_allowed",
            )
        try:
            content = fetch(url, self.limits.max_body_bytes - self.fetched, SECONDS_TO_FETCH)
        except ValueError as error:
            most = f"{self.limits.max_body_bytes:,} (--max-body-mb)"
            before = f"; pictures before it have {self.fetched:,} bytes of {most}"
            raise _refused(f"{error}{before if self.fetched else ''}") from None
        self.fetched += len(content)
        return content

    def _add(self, pixels: int) -> None:
        self.pixels += pixels
        most = self.limits.max_pixels * LARGEST_PICTURES
        if self.pixels > most:
            raise _too_large(
                f"the first {self.number:,} pictures have {self.pixels / 1e6:.1f} million pixels",
                most,
                f"{LARGEST_PICTURES} times --max-picture-megapixels",
            )


def require_size(content: bytes, limits: Limits) -> int:
    """How many pixels a picture has; it is not decoded for that.

    Raises:
        ApiError: too many, or it is no picture.
    """
    option = "--max-picture-megapixels"
    try:
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
    except Image.DecompressionBombError as error:
        raise _too_large(str(error), limits.max_pixels, option) from None
    except Exception as error:  # Pillow raises whatever its readers raise
        raise _refused(
            f"{len(content):,} bytes of an image are no picture ({type(error).__name__})"
        ) from None
    if width * height > limits.max_pixels:
        told = f"a picture has {width:,} x {height:,} pixels ({width * height / 1e6:.1f} million)"
        raise _too_large(told, limits.max_pixels, option)
    return width * height


def check_all(body: Any, limits: Limits) -> None:
    """Raise ``ApiError`` if anything in a request is not allowed to be fetched, or too large, or
    there are too many pictures."""
    pictures = Pictures(limits)
    for url in urls_in(body):
        if limits.allow_urls and _is_http(url):  # whoever fetches it judges its size
            pictures.count()
        else:
            pictures.bytes_of(url)


def urls_in(body: Any) -> Iterator[str]:
    """All that a request names under :data:`KEYS_OF_URLS`, wherever it stands, but for
    :data:`NO_PICTURES`."""
    if isinstance(body, dict):
        body = [value for key, value in body.items() if key not in NO_PICTURES]
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


def _too_large(told: str, most: int, option: str) -> ApiError:
    return ApiError(
        400,
        f"{told}; this server takes {most / 1e6:g} million ({option}): make it smaller, the model "
        "sees far fewer",
        "messages",
        "image_too_large",
    )
