"""The page at `/`, where a person talks to the served model from a browser.

One file that loads nothing. What the model says is shown as text only; should that ever fail, the
policy below lets no script or style run but the file's own, known by their digests. Knows no HTTP.
"""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPage:
    """The page as it is served."""

    html: bytes
    headers: Mapping[str, str]


@cache
def chat_page() -> ChatPage:
    """The page, read once."""
    html = Path(__file__).with_name("chat.html").read_bytes()
    return ChatPage(html=html, headers=_headers(html))


def _headers(html: bytes) -> dict[str, str]:
    policy = {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "script-src": _source_of(html, b"script"),
        "style-src": _source_of(html, b"style"),
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _source_of(html: bytes, tag: bytes) -> str:
    """The digest by which a browser knows the only such element."""
    opening, closing = b"<" + tag + b">", b"</" + tag + b">"
    assert html.count(opening) == html.count(closing) == 1, f"one {tag!r} in the page"
    text = html.partition(opening)[2].partition(closing)[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
