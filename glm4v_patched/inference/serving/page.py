"""The page of ``chat --web``: one file, which asks this server and nothing else."""

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse

CONTENT = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def _digest(tag: str) -> str:
    """Return the source of a content security policy that is the text of the only such element."""
    [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", CONTENT, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; script-src {_digest('script')}; style-src {_digest('style')}; "
    "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",  # another release has another page
}


async def show_page(request: Request) -> HTMLResponse:
    """Return the page, in which nothing is secret: its key is in the address that is printed."""
    return HTMLResponse(CONTENT, headers=HEADERS)
