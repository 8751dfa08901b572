"""What clients of a server may do, and the errors that tell them otherwise; needs no torch."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...option_fields import option
from ...terminal_text import printable, shorten

VARIABLE = "GLM4V_PATCHED_LIMITS"
"""Hands the limits on to vLLM's processes, whose middleware takes no arguments."""

LARGEST_IMAGES = 4
"""So many images of the most pixels may a request have, or more that are smaller."""
MOST_MEGAPIXELS = 178
"""Twice Pillow's ``MAX_IMAGE_PIXELS``: more is an error of its own."""
MOST_BYTES_OF_TEXT = 10**6
"""Of a request without its images: the model's 8,192 positions are about 30,000."""
MOST_VALUES = 50_000
"""Values of a request's JSON: each may take a hundred times the memory of its text."""
MOST_DEPTH = 64
LARGEST_AT_ONCE = 8
"""So many bodies of the most bytes are held, or more that are smaller; each is there in three
forms."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What a request may have.

    Args:
        api_key: That clients have to send; None asks for none.
        hosts: Names that clients may call the server by, beside addresses in numbers; None is any.
            A page of the web that had its own name lead to this machine is refused by it.
        max_body_bytes: Of a request.
        max_pixels: Of each image; a request has :data:`LARGEST_IMAGES` times as many at most.
        max_images: Of a request: each is 15 MB and 1,602 tokens for the model, however small.
        allow_urls: Whether images are fetched by http(s), from the public internet.
        most_at_once: Requests that wait or are answered.
        largest_at_once: Bodies of the most bytes that are held, or more that are smaller.
    """

    api_key: str | None = option(
        None,
        "what clients have to send; GLM4V_PATCHED_API_KEY in the environment is the same",
        metavar="KEY",
    )
    hosts: Sequence[str] | None = None
    max_body_bytes: int = 32 * 10**6
    max_pixels: int = 50 * 10**6
    max_images: int = option(16, "images that a request may have", metavar="N", ge=1)
    allow_urls: bool = option(
        False, "fetch images that clients name by http(s), from the public internet"
    )
    most_at_once: int = 64
    largest_at_once: int = LARGEST_AT_ONCE

    @property
    def max_held_bytes(self) -> int:
        """Of the bodies of all requests that arrive, wait or are answered."""
        return self.largest_at_once * self.max_body_bytes

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_environment() -> "Limits":
        """Raises ``RuntimeError`` if there are none: a server without limits must not start."""
        if VARIABLE not in os.environ:
            raise RuntimeError(f"{VARIABLE} is not set: start the server by glm4v-patched serve")
        return ServerLimits(**json.loads(os.environ[VARIABLE]))


class ApiError(Exception):
    """What a client is told, in the form of OpenAI's API.

    Args:
        status: Of HTTP.
        param: The key of the request that is wrong.
        code: OpenAI's word for the mistake, which programs read.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        # JSON is sent as UTF-8, which has no halves of surrogate pairs.
        super().__init__(message.encode(errors="backslashreplace").decode())
        self.status, self.param, self.code = status, param and shorten(param, 200), code

    def body(self) -> dict[str, Any]:
        """As JSON."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        told = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": told}


def key_of(place: Sequence[str | int]) -> str:
    """Return how errors name a place of a request, such as ``messages[0].content``."""
    parts = (f"[{each}]" if isinstance(each, int) else f".{shorten(each)}" for each in place)
    return "".join(parts).removeprefix(".")


def log(path: str, told: object) -> None:
    """Print a line about a request; what clients say in it may hold what a terminal would obey."""
    status = f"{told.status} " if isinstance(told, ApiError) else ""
    line = printable(shorten(str(told), 300))
    print(time.strftime("%H:%M:%S"), f"{shorten(path)}: {status}{line}", flush=True)
