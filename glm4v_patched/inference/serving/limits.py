"""Limits of a server, and the errors that its clients get; needs no torch."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...option_fields import option
from ...terminal_text import printable, shorten

LIMITS_VARIABLE = "GLM4V_PATCHED_LIMITS"
"""Environment variable with the limits, because vLLM passes no arguments to our middleware."""

MAX_PIXELS_FACTOR = 4
"""All images of a request together may have this many times the pixels of a single image."""
MAX_MEGAPIXELS = 178
"""Twice Pillow's ``MAX_IMAGE_PIXELS``; Pillow raises an error for larger images."""
MAX_TEXT_BYTES = 10**6
"""Bytes of text in a request; 8,192 tokens, the model's context length, take about 30,000."""
MAX_JSON_VALUES = 50_000
"""JSON values in a request. Parsed, a value may take a hundred times the memory of its text."""
MAX_JSON_DEPTH = 64  # levels of nested lists and objects
MAX_BUFFERED_BODIES = 8
"""How many bodies of the maximum size may be in memory. Each is there in three forms: as bytes, as
JSON and as decoded images."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits of requests.

    Args:
        api_key: Key that clients must send; None if they need no key.
        hosts: Host names that clients may use, besides numeric addresses; None allows any. The list
            prevents DNS rebinding: a web page whose own host name resolves to this machine could
            send requests to the server.
        max_body_bytes: Maximum size of a request's body.
        max_pixels: Maximum number of pixels of one image. All images of a request together may have
            :data:`MAX_PIXELS_FACTOR` times as many.
        max_images: Images in a request. Each takes 15 MB and 1,602 tokens in the model.
        allow_urls: Whether images are fetched by http(s), from the public internet.
        max_requests: Maximum number of requests that wait or are being answered.
        max_buffered_bodies: Memory for the bodies of all requests, as a multiple of
            ``max_body_bytes``.
    """

    api_key: str | None = option(
        None,
        "key that clients must send; also read from GLM4V_PATCHED_API_KEY",
        metavar="KEY",
    )
    hosts: Sequence[str] | None = None
    max_body_bytes: int = 32 * 10**6
    max_pixels: int = 50 * 10**6
    max_images: int = option(16, "images that a request may have", metavar="N", ge=1)
    allow_urls: bool = option(
        False, "fetch images that clients name by http(s), from the public internet"
    )
    max_requests: int = 64
    max_buffered_bodies: int = MAX_BUFFERED_BODIES

    @property
    def max_buffered_bytes(self) -> int:
        """Maximum size of the bodies of all requests that arrive, wait or are being answered."""
        return self.max_buffered_bodies * self.max_body_bytes

    def to_json(self) -> str:
        """Return the limits for :meth:`from_environment`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_environment() -> "ServerLimits":
        """Return the limits in :data:`LIMITS_VARIABLE`.

        Raises ``RuntimeError`` if it is not set: a server without limits must not start.
        """
        if LIMITS_VARIABLE not in os.environ:
            raise RuntimeError(
                f"{LIMITS_VARIABLE} is not set: start the server with glm4v-patched serve"
            )
        return ServerLimits(**json.loads(os.environ[LIMITS_VARIABLE]))


class ApiError(Exception):
    """An error that a client gets, in the format of OpenAI's API.

    Args:
        status: HTTP status.
        message: Text for people.
        param: The key in the request's JSON that has the problem.
        code: OpenAI's name of the problem, for programs.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        # JSON is sent as UTF-8, which cannot encode lone surrogates.
        super().__init__(message.encode(errors="backslashreplace").decode())
        self.status, self.code = status, code
        self.param = param and shorten(param, 200)

    def body(self) -> dict[str, Any]:
        """Return the JSON of the response."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        error_types = {401: "authentication_error", 429: "rate_limit_error"}
        error_type = error_types.get(self.status, default)
        error = {"message": str(self), "type": error_type, "param": self.param, "code": self.code}
        return {"error": error}


def format_key(path: Sequence[str | int]) -> str:
    """Return a path within a request's JSON in the form ``messages[0].content``, for errors."""
    parts = (f"[{key}]" if isinstance(key, int) else f".{shorten(key)}" for key in path)
    return "".join(parts).removeprefix(".")


def log(subject: str, message: object) -> None:
    """Print a line about a request, without control characters that clients may have put in it.

    Args:
        subject: The path of the request, or the model that answered it.
    """
    status = f"{message.status} " if isinstance(message, ApiError) else ""
    line = printable(shorten(str(message), 300))
    print(time.strftime("%H:%M:%S"), f"{shorten(subject)}: {status}{line}", flush=True)
