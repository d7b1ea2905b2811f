"""Rewrites headers that Ray Serve reads itself, and removes those that clients may not send it.

Serve reads five headers before any application does, as UTF-8. HTTP headers are bytes, by tradition
Latin-1; a value that is not UTF-8 is read as Latin-1, so that no bytes end in a 500. Two of the
five are not a client's business: by one of them its request would go on to the end after it has
left, by the other it would end as Serve ends it, without an error object.
`configs.process_environment` names `middlewares` to Serve's proxies, and to its replicas where they
listen themselves.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

READ_BY_SERVE = (b"x-request-id", b"serve-multiplexed-model-id", b"x-session-id")
FOR_OPERATORS = (b"x-request-disconnect-disabled", b"x-request-timeout-seconds")


def middlewares() -> list[Middleware]:
    """Returns the middlewares that Serve puts around every application."""
    return [Middleware(HeaderText)]


class HeaderText:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "headers" in scope:
            headers = [
                (name, _as_utf8(name, value))
                for name, value in scope["headers"]
                if name not in FOR_OPERATORS
            ]
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


def _as_utf8(name: bytes, value: bytes) -> bytes:
    if name.replace(b"_", b"-") not in READ_BY_SERVE:
        return value
    try:
        value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1").encode()
    return value
