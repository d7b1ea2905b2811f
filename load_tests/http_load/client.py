"""A streaming client of OpenAI's protocol: one connection an answer, tokens as they come.

Built on the standard library's sockets, which gevent makes cooperative in a locust process and
which a terminal client uses as they are. Knows no schedule and retries nothing: a refusal is a
result.
"""

import http.client
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from load_tests.http_load.dialogue import Prompt, PromptStyle
from load_tests.http_load.sse import EventParser

READ_BYTES = 65536
CONNECT_TIMEOUT_S = 10.0
DONE = "[DONE]"
OK = 200


class LoadError(Exception):
    """What goes wrong between client and server.

    LoadError
      UnreachableError    no connection, or a server that cannot take this load
      RefusedError        an HTTP status other than 200, before the first token
      BrokenStreamError   an answer that began and did not end as it should
      TimedOutError       nothing came, or not everything, within the time it was given
    """


class UnreachableError(LoadError):
    pass


class RefusedError(LoadError):
    """`retry_after_s` is the server's wish, if it has one."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        wish = "" if retry_after_s is None else f" (retry after {retry_after_s:g} s)"
        super().__init__(f"HTTP {status}: {message}{wish}")
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s


class BrokenStreamError(LoadError):
    pass


class TimedOutError(LoadError):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where to ask, and as whom."""

    url: str
    api_key: str = ""

    def connection(self, timeout_s: float = CONNECT_TIMEOUT_S) -> http.client.HTTPConnection:
        """Not opened yet. Raises UnreachableError for something that is no URL."""
        try:
            parts = urlsplit(self.url)
            host, port, scheme = parts.hostname, parts.port, parts.scheme
        except ValueError as error:
            raise UnreachableError(f"{self.url!r} is no URL: {error}") from error
        if scheme not in ("http", "https") or not host:
            raise UnreachableError(
                f"{self.url!r} is no URL; it should look like http://127.0.0.1:8000"
            )
        kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        return kind(host, port, timeout=timeout_s)

    def path(self, path: str) -> str:
        return urlsplit(self.url).path.rstrip("/").removesuffix("/v1") + path

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        return headers | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class AskOptions:
    """How a server is asked, the same for every request of a run."""

    model: str
    style: PromptStyle
    takes_extensions: bool = True  # ignore_eos and return_token_ids, as ours and vLLM have them
    temperature: float = 0.0

    def body(self, prompt: Prompt, num_output_tokens: int) -> bytes:
        """Of one streamed request, as JSON."""
        is_chat = self.style is PromptStyle.CHAT
        fields: dict[str, object] = {
            "model": self.model,
            "messages" if is_chat else "prompt": prompt,
            "max_tokens": num_output_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.takes_extensions:
            fields |= {"ignore_eos": True, "return_token_ids": True}
        return msgspec.json.encode(fields)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.style is PromptStyle.CHAT else "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one event brought. A server that tells no ids is taken to send one token an event."""

    at_s: float  # on `time.perf_counter`
    num_tokens: int
    text: str
    token_ids: list[int]


class Usage(msgspec.Struct, frozen=True):
    """As the server counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: _Error | str | None = None
    message: str | None = None  # of an error that is not nested


class Answer:
    """One streamed answer: iterate its chunks; closing it early hangs up."""

    def __init__(self, server: Server, path: str, body: bytes, timeout_s: float) -> None:
        """Nothing is sent before its chunks are asked for; `timeout_s` counts from then."""
        self.usage: Usage | None = None
        self._connection = server.connection(min(CONNECT_TIMEOUT_S, timeout_s))
        self._response: http.client.HTTPResponse | None = None
        self._path = path
        self._headers = server.headers
        self._body = body
        self._timeout_s = timeout_s

    def close(self) -> None:
        """Hang up; a server that is still at it sees its client go."""
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def chunks(self) -> Iterator[Chunk]:
        """Until the server says it is done. Raises a LoadError otherwise."""
        until_s = time.perf_counter() + self._timeout_s
        sock = _connect(self._connection)
        _limit(sock, until_s)
        self._response = _exchange(self._connection, "POST", self._path, self._headers, self._body)
        if self._response.status != OK:
            raise _refusal(self._response)
        parser = EventParser()
        while True:
            _limit(sock, until_s)
            data = _read_some(self._response)
            at_s = time.perf_counter()
            for event in parser.feed(data):
                if event == DONE:
                    return
                if (chunk := self._chunk(event, at_s)).num_tokens:
                    yield chunk

    def _chunk(self, event: str, at_s: float) -> Chunk:
        try:
            parsed = msgspec.json.decode(event, type=_Event)
        except msgspec.DecodeError as error:
            raise BrokenStreamError(f"not an event of this protocol: {event[:200]}") from error
        if parsed.error is not None:
            raise BrokenStreamError(f"error event: {_message(parsed)}")
        if parsed.usage is not None:
            self.usage = parsed.usage
        text = "".join(_text(choice) for choice in parsed.choices)
        token_ids = [i for choice in parsed.choices for i in choice.token_ids or ()]
        num_tokens = len(token_ids) or int(bool(text))
        return Chunk(at_s=at_s, num_tokens=num_tokens, text=text, token_ids=token_ids)


def ask(
    server: Server, options: AskOptions, prompt: Prompt, num_output_tokens: int, timeout_s: float
) -> Answer:
    """An answer to be iterated. Raises UnreachableError for a server without a proper URL."""
    body = options.body(prompt, num_output_tokens)
    return Answer(server, server.path(options.path), body, timeout_s)


def get(server: Server, path: str) -> bytes:
    """The body of a small answer. Raises UnreachableError, TimedOutError or RefusedError."""
    connection = server.connection()
    try:
        _connect(connection)
        response = _exchange(connection, "GET", server.path(path), server.headers, None)
        if response.status != OK:
            raise _refusal(response)
        return response.read()
    except TimeoutError as error:
        raise TimedOutError(f"{server.url}{path}: no answer in {CONNECT_TIMEOUT_S:g} s") from error
    finally:
        connection.close()


def _connect(connection: http.client.HTTPConnection) -> socket.socket:
    try:
        connection.connect()
    except OSError as error:
        where = f"{connection.host}:{connection.port}"
        raise UnreachableError(f"no connection to {where}: {error}") from error
    sock = connection.sock
    assert isinstance(sock, socket.socket)
    # Held here because the connection lets go of it when the server wants to close afterwards.
    return sock


def _limit(sock: socket.socket, until_s: float) -> None:
    """Waits no longer than that. Raises TimedOutError when it is over."""
    left_s = until_s - time.perf_counter()
    if left_s <= 0:
        raise TimedOutError("the answer did not end in time")
    sock.settimeout(left_s)


def _exchange(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    headers: dict[str, str],
    body: bytes | None,
) -> http.client.HTTPResponse:
    try:
        connection.request(method, path, body, headers)
        return connection.getresponse()
    except TimeoutError as error:
        raise TimedOutError("no answer in time") from error
    except (OSError, http.client.HTTPException) as error:
        raise BrokenStreamError(f"the connection broke before an answer: {error!r}") from error


def _read_some(response: http.client.HTTPResponse) -> bytes:
    """At least a byte. Raises TimedOutError or BrokenStreamError."""
    try:
        data = response.read1(READ_BYTES)
    except TimeoutError as error:
        raise TimedOutError("the answer did not end in time") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise BrokenStreamError("the stream broke off") from error
    if not data:
        raise BrokenStreamError("the stream ended without [DONE]")
    return data


def _refusal(response: http.client.HTTPResponse) -> RefusedError:
    try:
        body = response.read(READ_BYTES)
    except (OSError, http.client.HTTPException):
        body = b""  # the status says what matters
    wish = response.headers.get("Retry-After", "")
    return refusal_of(response.status, body, wish, reason=response.reason)


def refusal_of(status: int, body: bytes, wish: str, *, reason: str) -> RefusedError:
    """An answer that is no 200, with its error's message, else its whole body, else `reason`.

    wish: its Retry-After; "" = it has none.
    """
    retry_after_s = float(wish) if wish.replace(".", "", 1).isdigit() else None
    try:
        message = _message(msgspec.json.decode(body, type=_Event))
    except msgspec.DecodeError:
        message = ""
    message = message or body.decode("utf-8", errors="replace")
    return RefusedError(status, message[:500] or reason, retry_after_s)


def _message(event: _Event) -> str:
    if isinstance(event.error, _Error):
        return event.error.message or str(event.error.code)
    return event.error or event.message or ""


def _text(choice: _Choice) -> str:
    delta = choice.delta or _Delta()
    return (choice.text or "") + "".join(
        part or "" for part in (delta.reasoning_content, delta.reasoning, delta.content)
    )
