"""The files of images: those that rows name, and those made of bytes that rows hold.

Needs no torch.
"""

import base64
import hashlib
import io
import os
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import url2pathname

from PIL import Image

from ..atomic import explain_failed_writes, write_atomically
from ..paths import is_within
from .check_cache import default_path
from .fetching import fetch
from .messages import describe_value, refuse_keys

IMAGE_NAMES = re.compile(
    r"(?:image|img|picture|photo)(?:s?_?(?:path|file|name|file_?name|url|uri|link|src|id))?s?"
    r"|(?:image|img|picture|photo)s?_(?:bytes|base64|b64|hex|data|blob|content|array)"
    r"|(?:input_|source_)(?:image|img)s?|jpe?g|png|webp|图[片像]",
    re.IGNORECASE,
)
"""What columns and keys of images are called."""
URL_CURE = "expected a path: save the image beside the rows, or set data.allow_urls: true"


class FileStamp(NamedTuple):
    """A file as it was when it was checked: one of rows, or an image."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    sha256: str

    @classmethod
    def of(cls, path: str) -> "Stamp":
        """Raises ``ValueError`` if it cannot be read."""
        try:
            with open(path, "rb") as file:
                found = os.fstat(file.fileno())
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
        return cls(path, found.st_size, found.st_mtime_ns, found.st_ctime_ns, digest)

    def has_changed(self) -> bool:
        """Whether its bytes are others now, or not there. It may have been touched, or have got
        another name."""
        times = times_of(self.path)
        if times == self[1:4]:
            return False
        return times is None or FileStamp.of(self.path).sha256 != self.sha256


def times_of(path: str) -> tuple[int, int, int] | None:
    """Size, time of change and of the entry's change; None if it is not there."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


class ImageFiles:
    """Gives the path of each image.

    Args:
        folder: What paths are relative to.
        allow_urls: Whether images may be fetched by http(s), from the public internet.
        store: Where images without a file are written, by the digest of their bytes; default in
            the user's cache folder. They stay there, and are not fetched again.
        within: The folder in which files that are named must lie; default anywhere.
    """

    def __init__(
        self,
        folder: str,
        allow_urls: bool = False,
        store: Path | None = None,
        within: str | None = None,
    ):
        self.folder = os.path.abspath(folder)
        self.allow_urls = allow_urls
        self.store = store
        self.within = within

    def path_of(self, image: Any) -> str:
        """The absolute path of the file of an image: a path, data URL, URL, bytes, or ``{"bytes",
        "path"}`` as ``datasets`` has it.

        Raises:
            ValueError: it is none of these, or cannot be fetched or written.
        """
        if isinstance(image, dict):
            refuse_keys(image, ("bytes", "path"), "an image")
            content = image.get("bytes")
            image = image.get("path") if content is None else content
        if isinstance(image, (bytes, bytearray)):
            return self._written(bytes(image))
        if not isinstance(image, str) or not image:
            none = image is None or image == ""
            cure = "; leave the key out where there is no image" if none else ""
            raise ValueError(f"image is {describe_value(image)}; expected the path of one image{cure}")
        if image[:5].lower() == "data:":
            return self._written(decode_data_url(image))
        if image[:8].lower().startswith(("http://", "https://")):
            return self._fetched(image)
        return self._named(image)

    def _named(self, image: str) -> str:
        """The absolute path of a file that is named by its path."""
        if image[:7].lower() == "file://":
            path = url2pathname(image[7:])
            raise ValueError(f"image is {describe_value(image)}; write the path: {describe_value(path)}")
        if "://" in image[:12]:
            raise ValueError(f"image is {describe_value(image)}; {URL_CURE.partition(',')[0]}")
        if "\0" in image:
            raise ValueError(f"image is {describe_value(image)}; a path holds no character of code 0")
        if image.endswith(("/", "/.", "/..")) or image in (".", ".."):
            raise ValueError(f"image is {describe_value(image)}, a folder; expected the path of a file")
        # Of many rows with one folder, abspath() would take a third of the time.
        path = os.path.normpath(os.path.join(self.folder, image))
        if "\\" in image:
            self._refuse_backslashes(image, path)
        if not self.may_name(path):
            raise ValueError(
                f"image is {describe_value(image)}, outside of {self.within}; expected an image in the "
                "table, or a path in data.image_folder: a data set of the Hub names no other files"
            )
        return path

    def may_name(self, path: str) -> bool:
        """Return whether rows may name a file, which need not exist."""
        return self.within is None or is_within(path, self.within)

    def _refuse_backslashes(self, image: str, path: str) -> None:
        """Raise ``ValueError`` if there is no such file, and one by the name with slashes."""
        slashes = image.replace("\\", "/")
        if not os.path.lexists(path) and os.path.lexists(os.path.join(self.folder, slashes)):
            raise ValueError(f"image is {describe_value(image)}; write {describe_value(slashes)}")

    def _fetched(self, url: str) -> str:
        if not self.allow_urls:
            raise ValueError(f"image is {describe_value(url)}; {URL_CURE}")
        name = f"url-{hashlib.sha256(url.encode()).hexdigest()}"
        path = self._store() / name
        if path.is_file():
            return str(path)
        content = fetch(url)
        _require_image(url, content)
        return self._write(path, content)

    def _written(self, content: bytes) -> str:
        path = self._store() / hashlib.sha256(content).hexdigest()
        # Not written again, so that it keeps its time, by which the check remembers it.
        if path.is_file() and path.stat().st_size == len(content):
            return str(path)
        return self._write(path, content)

    def _store(self) -> Path:
        if self.store is None:
            cache = default_path()
            if cache is None:
                raise ValueError(
                    "the image has no file, and there is no folder to write one: set "
                    "XDG_CACHE_HOME to one"
                )
            self.store = cache.parent / "images"
        return self.store

    def _write(self, path: Path, content: bytes) -> str:
        # No fault of the row: with ``data.on_bad: skip`` a full disk would leave rows out.
        with explain_failed_writes(path, "; XDG_CACHE_HOME may name another folder"):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(path, content)
        return str(path)


def decode_data_url(url: str) -> bytes:
    """Raises ``ValueError`` if it is no base64."""
    head, comma, content = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ValueError(f"image is {describe_value(url)}; expected data:image/...;base64,...")
    try:
        # Lines may be broken anywhere.
        return base64.b64decode("".join(content.split()), validate=True)
    except ValueError as error:
        raise ValueError(f"image is {describe_value(url)}, which is no base64: {error}") from None


def _require_image(url: str, content: bytes) -> None:
    """Raise ``ValueError`` for what is fetched and begins as no image, such as a page of an error,
    so that it is not kept: whether all of it can be decoded is for the check."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of its size, which the check judges, too
            Image.open(io.BytesIO(content)).close()
    except Image.DecompressionBombError:
        return
    except Exception as error:  # Pillow raises whatever its readers raise
        begin = describe_value(content[:40].decode("ascii", "replace"))
        raise ValueError(
            f"the image {describe_value(url)} is {len(content):,} bytes that are no image, and begin "
            f"with {begin} ({type(error).__name__}); it is not kept, and fetched again next time"
        ) from None
