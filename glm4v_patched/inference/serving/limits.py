"""What clients of a server may do; needs no torch."""

import json
import os
from dataclasses import asdict, dataclass

VARIABLE = "GLM4V_PATCHED_LIMITS"
"""Hands the limits on to vLLM's processes, whose middleware takes no arguments."""

LARGEST_PICTURES = 4
"""So many pictures of the most pixels may a request have, or more that are smaller."""
MOST_MEGAPIXELS = 178
"""Twice Pillow's ``MAX_IMAGE_PIXELS``: more is an error of its own."""
MOST_BYTES_OF_TEXT = 10**6
"""Of a request without its pictures: the model's 8,192 positions are about 30,000."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a request may have.

    Args:
        api_key: That clients have to send; None asks for none.
        hosts: Names that clients may call the server by, beside addresses in numbers; None is any.
            A page of the web that had its own name lead to this machine is refused by it.
        max_body_bytes: Of a request.
        max_pixels: Of each picture; a request has :data:`LARGEST_PICTURES` times as many at most.
        max_pictures: Of a request: each is 15 MB and 1,602 tokens for the model, however small.
        allow_urls: Whether pictures are fetched by http(s), from the public internet.
        most_at_once: Requests that wait or are answered; None is any number.
    """

    api_key: str | None = None
    hosts: tuple[str, ...] | None = None
    max_body_bytes: int = 32 * 10**6
    max_pixels: int = 50 * 10**6
    max_pictures: int = 16
    allow_urls: bool = False
    most_at_once: int | None = 64

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_environment() -> "Limits":
        """Raises ``RuntimeError`` if there are none: a server without limits must not start."""
        try:
            values = json.loads(os.environ[VARIABLE])
            hosts = values.pop("hosts")
            return Limits(hosts=None if hosts is None else tuple(hosts), **values)
        except (KeyError, ValueError, TypeError) as error:
            raise RuntimeError(
                f"{VARIABLE} does not hold the limits of the server ({error!r}): start it by "
                "glm4v-patched serve"
            ) from None
