"""Errors as OpenAI's API has them, and the server's lines; needs no torch."""

import time
from typing import Any

from ...terminal_text import printable, shorten


class ApiError(Exception):
    """What a client is told.

    Args:
        status: Of HTTP.
        param: The key of the request that is wrong.
        code: OpenAI's word for the mistake, which programs read.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """As JSON."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        told = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": told}


def log(path: str, told: object) -> None:
    """Print a line about a request; what clients say in it may hold what a terminal would obey."""
    status = f"{told.status} " if isinstance(told, ApiError) else ""
    line = printable(shorten(str(told), 300))
    print(time.strftime("%H:%M:%S"), f"{shorten(path)}: {status}{line}", flush=True)
