"""Guards every route: limits on headers, then an API key, compared in constant time.

It is an ASGI application around another one, so it also guards unknown paths and routes added
later. It denies what it does not know.
"""

import hashlib
import hmac
import ipaddress
import logging
from collections.abc import Callable, Iterable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from actors.anthropic.errors import reply_at
from configs.schema import EdgeConfig
from engine.errors import RequestError

logger = logging.getLogger(__name__)

KEY_NAME = "laps.key_name"  # entry of the ASGI scope: the client's key name
READING = ["GET", "HEAD"]  # the methods that an open path answers without a key
POLICY_VIOLATION = 1008  # WebSocket's close code

Headers = Iterable[tuple[bytes, bytes]]  # as ASGI has them: names in lower case

ANYBODY = ""  # the name of a client where no keys are configured


class ApiKeys:
    """The configured keys, as digests."""

    def __init__(self, digests: Mapping[str, str]) -> None:
        """digests: name -> SHA-256 of the key, in hex."""
        self._digests = [(name, bytes.fromhex(digest)) for name, digest in digests.items()]

    def name_of(self, key: bytes) -> str | None:
        """Returns the key's name, None for one that is not configured.

        Every digest is compared, each in constant time, so that the duration reveals nothing.
        """
        digest = hashlib.sha256(key).digest()
        found = None
        for name, known in self._digests:
            if hmac.compare_digest(digest, known):
                found = name
        return found


def sent_key(headers: Headers) -> bytes | None:
    """Returns what follows `Bearer` in the Authorization header, or Anthropic's `x-api-key`.

    None if there is none, or several: two servers could read two of them differently.
    """
    headers = list(headers)
    values = [value for name, value in headers if name == b"authorization"]
    keys = [value for name, value in headers if name == b"x-api-key"]
    if not values and len(keys) == 1:
        return keys[0].strip() or None
    if len(values) != 1:
        return None
    scheme, _, key = values[0].partition(b" ")
    return key.strip() or None if scheme.lower() == b"bearer" else None


class KeyGate:
    """Lets authorised requests through; others get OpenAI's error object."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys | None,
        limits: EdgeConfig,
        on_refused: Callable[[int], None],
        open_paths: Iterable[str],
    ) -> None:
        """keys: None = every client may ask. `on_refused` gets the status of each refusal.

        open_paths: what GET and HEAD answer without a key.
        """
        self._app = app
        self._keys = keys
        self._limits = limits
        self._on_refused = on_refused
        self._open_paths = frozenset(open_paths)
        self._has_warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            self._check_headers(scope)
            scope[KEY_NAME] = self._whose(scope)
        except RequestError as error:
            self._on_refused(error.status)
            await _refuse(scope, send, error)
            return
        await self._app(scope, receive, send)

    def _check_headers(self, scope: Scope) -> None:
        headers, limits = scope["headers"], self._limits
        num_bytes = sum(len(name) + len(value) for name, value in headers)
        if len(headers) <= limits.max_headers and num_bytes <= limits.max_header_bytes:
            return
        raise RequestError(
            f"The request has {len(headers)} headers of {num_bytes} bytes; at most"
            f" {limits.max_headers} of {limits.max_header_bytes} bytes are read.",
            code="request_header_fields_too_large",
            status=431,
        )

    def _whose(self, scope: Scope) -> str:
        """Returns the name of the client's key. Raises RequestError (401) without a known one."""
        if self._keys is None:
            self._warn_if_open(scope)
            return ANYBODY
        if self._is_open(scope):
            return ANYBODY
        key = sent_key(scope["headers"])
        if key is None:
            raise RequestError(
                "No API key was sent. Send one as 'Authorization: Bearer KEY'.", status=401
            )
        name = self._keys.name_of(key)
        if name is None:  # do not quote the key: it may be a real one with a typing error
            raise RequestError("Incorrect API key provided.", code="invalid_api_key", status=401)
        return name

    def _is_open(self, scope: Scope) -> bool:
        if scope["type"] != "http" or scope["method"] not in READING:
            return False
        return _path(scope) in self._open_paths

    def _warn_if_open(self, scope: Scope) -> None:
        """Warns once, when the first client of another machine asks and no keys are configured."""
        server = scope.get("server")
        if self._has_warned or server is None or _is_loopback(server[0]):
            return
        self._has_warned = True
        logger.warning(
            "no API keys are configured, and this server is reached at %s: whoever reaches it may"
            " use it. Set LAPS_API_KEYS or api.keys_file",
            server[0],
        )


def _path(scope: Scope) -> str:
    """Returns the path within the application, as its router sees it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or a Unix socket's path
        return host == "localhost" or host.startswith("/")


async def _refuse(scope: Scope, send: Send, error: RequestError) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        return
    reply = reply_at(_path(scope), error)
    headers = [(b"content-type", b"application/json")]
    headers.append((b"content-length", str(len(reply.body)).encode()))
    if reply.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
