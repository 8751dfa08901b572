"""Image files: paths named in the data, and images stored as bytes. Needs no torch."""

import base64
import hashlib
import os
import re
import unicodedata
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import url2pathname

from ..atomic import explain_failed_writes, write_atomically
from ..paths import is_within
from .check_cache import default_cache_path
from .fetching import fetch
from .messages import describe_value, refuse_keys

IMAGE_KEY_RE = re.compile(
    r"(?:image|img|picture|photo)(?:s?_?(?:path|file|name|file_?name|url|uri|link|src|id))?s?"
    r"|(?:image|img|picture|photo)s?_(?:bytes|base64|b64|hex|data|blob|content|array)"
    r"|(?:input_|source_)(?:image|img)s?|jpe?g|png|webp|图[片像]",
    re.IGNORECASE,
)
"""Matches names of columns and keys that contain images."""
# Matches a file: URL up to its path, which is "/a.png" on Linux and "C:/a.png" on Windows.
FILE_URL_RE = re.compile(r"file:(?://(?:localhost(?=/))?)?(?:/(?=[a-z]:[\\/]))?", re.IGNORECASE)
PATH_CURE = "expected a path: save the image beside the data"


class FileStamp(NamedTuple):
    """The size, times and digest that a data or image file had when it was checked."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    sha256: str

    @classmethod
    def of(cls, path: str) -> "FileStamp":
        """Return the stamp of a file; raise ``ValueError`` if the file cannot be read."""
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
        return cls(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, digest)

    def has_changed(self) -> bool:
        """Return whether the file is missing or has other content. If only its times differ, it has
        not changed."""
        times = file_times(self.path)
        if times == self[1:4]:
            return False
        return times is None or FileStamp.of(self.path).sha256 != self.sha256


def file_times(path: str) -> tuple[int, int, int] | None:
    """Return the size, mtime and ctime (ns) of a file; None if it cannot be accessed."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


class ImageFiles:
    """Finds the file of each image, or writes one for images that are URLs or bytes.

    Args:
        folder: The folder to which paths are relative.
        allow_urls: Whether images may be downloaded over http(s), from the public internet.
        store: Folder for files of images that are URLs or bytes; by default in the user's cache
            folder. Names of these files are digests, so that later runs find them again.
        allowed_folder: The folder that must contain all files that rows name; None allows any file.
        image_root: Beginning that is removed from paths in rows (``data.image_root``), which are
            then relative to ``folder``.
    """

    def __init__(
        self,
        folder: str,
        allow_urls: bool = False,
        store: Path | None = None,
        allowed_folder: str | None = None,
        image_root: str | None = None,
    ):
        self.folder = os.path.abspath(folder)
        self.allow_urls = allow_urls
        self.store = store
        self.allowed_folder = allowed_folder
        self.image_root = None if image_root is None else image_root.replace("\\", "/").rstrip("/")

    def path_of(self, image: Any) -> str:
        """Return the absolute path of an image's file.

        Args:
            image: A path, data URL, URL, bytes, or ``{"bytes", "path"}`` as in ``datasets``.

        Raises:
            ValueError: The image is none of these, or cannot be downloaded.
        """
        if isinstance(image, dict):
            refuse_keys(image, ("bytes", "path"), "an image")
            content = image.get("bytes")
            image = image.get("path") if content is None else content
        if isinstance(image, (bytes, bytearray)):
            return self._store_bytes(bytes(image))
        if not isinstance(image, str) or not image:
            is_missing = image is None or image == ""
            cure = "; remove the key where there is no image" if is_missing else ""
            raise ValueError(
                f"image is {describe_value(image)}; expected the path of one image{cure}"
            )
        if image[:5].lower() == "data:":
            return self._store_bytes(decode_data_url(image))
        if image[:8].lower().startswith(("http://", "https://")):
            return self._download(image)
        return self._resolve_path(image)

    def _resolve_path(self, image: str) -> str:
        """Return the absolute path for a path or ``file:`` URL in a row."""
        if image[:6].lower() == "file:/":
            image = _path_of_file_url(image)
        if self.image_root is not None:
            length = len(self.image_root)
            if image[: length + 1].replace("\\", "/") == self.image_root + "/":
                image = image[length:].lstrip("/\\")
        if "://" in image[:12]:
            raise ValueError(f"image is {describe_value(image)}; {PATH_CURE}")
        if "\0" in image:
            raise ValueError(
                f"image is {describe_value(image)}; a path must not contain a null character"
            )
        if image.endswith(("/", "/.", "/..")) or image in (".", ".."):
            raise ValueError(
                f"image is {describe_value(image)}, a folder; expected the path of a file"
            )
        # abspath() is not used here, because it took a third of the time of reading rows.
        path = os.path.normpath(os.path.join(self.folder, image))
        if ("\\" in image or not image.isascii()) and not os.path.lexists(path):
            # Windows writes backslashes, and macOS stores an accent as a character of its own.
            slashed = image.replace("\\", "/")
            names = (unicodedata.normalize(form, slashed) for form in ("NFC", "NFD"))
            paths = (os.path.normpath(os.path.join(self.folder, name)) for name in names)
            path = next(filter(os.path.lexists, paths), path)
        if not self.may_name(path):
            raise ValueError(
                f"image is {describe_value(image)}, outside of {self.allowed_folder}; images of a "
                "data set of the Hub must be in its tables, among its files, or in "
                "data.image_folder"
            )
        return path

    def may_name(self, path: str) -> bool:
        """Return whether rows may name this path, whether or not the file exists."""
        return self.allowed_folder is None or is_within(path, self.allowed_folder)

    def _download(self, url: str) -> str:
        if not self.allow_urls:
            raise ValueError(
                f"image is {describe_value(url)}; {PATH_CURE}, or set data.allow_urls: true"
            )
        name = f"url-{hashlib.sha256(url.encode()).hexdigest()}"
        path = self._store_folder() / name
        if path.is_file():
            return str(path)
        content = fetch(url)
        _require_image(url, content)
        return self._write(path, content)

    def _store_bytes(self, content: bytes) -> str:
        path = self._store_folder() / hashlib.sha256(content).hexdigest()
        # The file is not written again: with a new time, its image would be decoded again.
        if path.is_file() and path.stat().st_size == len(content):
            return str(path)
        return self._write(path, content)

    def _store_folder(self) -> Path:
        if self.store is None:
            cache = default_cache_path()
            if cache is None:
                raise ValueError(
                    "the image needs a file, but there is no cache folder to write it to: set "
                    "XDG_CACHE_HOME to a folder"
                )
            self.store = cache.parent / "images"
        return self.store

    def _write(self, path: Path, content: bytes) -> str:
        # A failed write is no problem of the row, so ``data.on_bad: skip`` must not skip the row.
        with explain_failed_writes(path, "; XDG_CACHE_HOME may name another folder"):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(path, content)
        return str(path)


def _path_of_file_url(url: str) -> str:
    """Return the path in a ``file:`` URL. "%20" in it may stand for a blank, or be part of the
    file's name; the path that exists is returned."""
    undecoded = FILE_URL_RE.sub("", url)
    decoded = url2pathname(undecoded)
    existing = {path for path in (undecoded, decoded) if os.path.lexists(path)}
    if len(existing) > 1:
        raise ValueError(f"image is {describe_value(url)}, which may be {' or '.join(existing)}")
    return next(iter(existing), decoded)


def decode_data_url(url: str) -> bytes:
    """Return the bytes of a data URL; raise ``ValueError`` if it is not base64."""
    head, comma, content = url.partition(",")  # head: "data:image/png;base64"
    if not comma or not head.lower().endswith(";base64"):
        raise ValueError(f"image is {describe_value(url)}; expected data:image/...;base64,...")
    try:
        # base64 may contain line breaks.
        return base64.b64decode("".join(content.split()), validate=True)
    except ValueError as error:
        raise ValueError(f"image is {describe_value(url)}, which is not base64: {error}") from None


def _require_image(url: str, content: bytes) -> None:
    """Raise ``ValueError`` if a downloaded content is not an image, so that it is not cached."""
    from .decoding import find_image_problem  # imports torch

    if problem := find_image_problem(content):
        beginning = describe_value(content[:40].decode("ascii", "replace"))
        raise ValueError(
            f"the image {describe_value(url)} {problem}. It has {len(content):,} bytes and begins "
            f"with {beginning}. It is not cached: the next start downloads it again"
        )
