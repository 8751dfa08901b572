"""The chat page of ``chat --web``: a single file that connects to this server only."""

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse

PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def _csp_hash(tag: str) -> str:
    """Return the hash by which the content security policy allows the page's ``tag`` element."""
    [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; script-src {_csp_hash('script')}; style-src {_csp_hash('style')}; "
    "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",  # the page may change with the next release
}


async def show_page(request: Request) -> HTMLResponse:
    """Return the page. It contains no secret, because only the printed address has the key."""
    return HTMLResponse(PAGE, headers=HEADERS)
