"""A tab of a headless browser that a test drives step by step, and a real server for it to ask."""

import base64
import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import uvicorn
from fastapi import FastAPI

from tests.actors.ingress.browser import browser

REPLY_TIMEOUT_S = 120.0  # a browser on a busy machine is slow to start
# The promise of a moment at which `condition` holds.
UNTIL = """new Promise((resolve) => {
  const look = () => { if (%s) resolve(true); else setTimeout(look, 20); };
  look();
})"""


class Tab:
    """Speaks the DevTools protocol over two pipes; each call waits for its reply."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        """File descriptors, which stay the caller's."""
        self._to_browser, self._from_browser = to_browser, from_browser
        self._rest = b""
        self._num_sent = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result; fails the test on an error or after REPLY_TIMEOUT_S."""
        self._num_sent += 1
        message = {"id": self._num_sent, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + REPLY_TIMEOUT_S
        while True:
            reply = self._read(deadline_s - time.monotonic(), method)
            if reply.get("id") == self._num_sent:
                assert "error" not in reply, f"{method}: {reply['error']}"
                result: dict[str, Any] = reply["result"]
                return result

    def open(self, url: str) -> None:
        """Returns when the page's script has run."""
        error = self.call("Page.navigate", url=url).get("errorText")
        assert error is None, f"{url}: {error}"
        self.wait(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value, as JSON has it; of a promise, what it came to."""
        reply = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in reply, f"{expression[:300]}: {reply['exceptionDetails']}"
        return reply["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until the expression is true."""
        self.evaluate(UNTIL % condition)

    def text(self, selector: str) -> str:
        """What a reader sees of the last element."""
        found = self.evaluate(f"[...document.querySelectorAll({selector!r})].at(-1)?.innerText")
        assert isinstance(found, str), f"no element {selector}"
        return found

    def is_shown(self, selector: str) -> bool:
        """Whether the last such element takes part in the page."""
        last = f"[...document.querySelectorAll({selector!r})].at(-1)"
        return bool(self.evaluate(f"{last}?.checkVisibility() ?? false"))

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({selector!r}).click()")

    def fill(self, selector: str, text: str) -> None:
        """As if typed and left."""
        self.evaluate(
            f"(() => {{ const field = document.querySelector({selector!r}); field.value ="
            f" {json.dumps(text)}; field.dispatchEvent(new Event('change')); }})()"
        )

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """The window, in pixels, and the colours that its owner prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _read(self, timeout_s: float, method: str) -> dict[str, Any]:
        """The next message, reply or event."""
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from_browser], [], [], max(0.0, timeout_s))
            assert ready, f"{method}: no reply in {REPLY_TIMEOUT_S} s"
            piece = os.read(self._from_browser, 1 << 20)
            assert piece, f"{method}: the browser has gone"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def open_tab(profile: Path) -> Iterator[Tab]:
    """A browser of its own; skips the test if none is installed."""
    command = [
        *("sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null', "sh"),  # where it looks for them
        browser(),
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--hide-scrollbars", f"--user-data-dir={profile}", "--remote-debugging-pipe"),
    ]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Tab(process.stdin.fileno(), process.stdout.fileno())
            process.stdin.close()  # the browser ends with its pipe
            process.wait(REPLY_TIMEOUT_S)
        finally:
            process.kill()


@contextmanager
def serving_app(app: FastAPI) -> Iterator[str]:
    """URL of the application, on a port of its own, until the end of the block."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, ws="none", lifespan="on", log_config=None, timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
