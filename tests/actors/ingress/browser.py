"""A headless browser, and a server of the page with recorded answers instead of an application."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import unescape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from actors.ingress.pages import PAGE_HEADERS, laps_page

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER_TIMEOUT_S = 120.0

# The number of the question for /laps_status, from 0 -> status and body.
Answer = Callable[[int], tuple[int, bytes]]


def browser() -> str:
    """Path of the installed browser; skips the test without one."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no chromium is installed: none of {', '.join(NAMES)} is on the PATH")
    return found


# Keeps each frame's page as text, which is all that is left of it in the document's own.
_KEEPING = """
setTimeout(() => {
  for (const frame of document.querySelectorAll("iframe")) {
    const kept = document.createElement("pre");
    kept.id = frame.name;
    kept.textContent = frame.contentDocument.documentElement.outerHTML;
    document.body.append(kept);
  }
}, %d);
"""


@contextmanager
def serving(answer: Answer, probe: str = "") -> Iterator[str]:
    """URL of the page as the ingress serves it, with the script `probe` run after its own."""
    with _serving({"app": answer}, probe) as url:
        yield f"{url}/app/laps"


@contextmanager
def _serving(answers: Mapping[str, Answer], probe: str = "", index: str = "") -> Iterator[str]:
    """URL of a server that has the page in a folder for each of `answers`, and `index` above."""
    nums_asked = {name: iter(range(10**9)) for name in answers}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, _, file = self.path.removeprefix("/").rpartition("/")
            if not name and not file:
                self._send(200, "text/html", index.encode(), {})
            elif name in answers and file == "laps":
                script = f"<script>{probe}</script>".encode()
                self._send(200, "text/html", laps_page() + script, PAGE_HEADERS)
            elif name in answers and file == "laps_status":
                status, body = answers[name](next(nums_asked[name]))
                self._send(status, "application/json", body, {"Cache-Control": "no-store"})
            else:
                self._send(404, "text/plain", b"", {})

        def _send(self, status: int, kind: str, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": kind, **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def run_frames(answers: Mapping[str, Answer], profile: Path, page_s: float = 3.0) -> dict[str, str]:
    """What the page becomes for each of `answers`: one browser shows them beside each other."""
    frame = '<iframe name="{0}" src="/{0}/laps" width="1200" height="1300"></iframe>'
    frames = "".join(map(frame.format, answers))
    script = _KEEPING % round(page_s * 1000)
    index = f"<!doctype html><body>{frames}<script>{script}</script>"
    with _serving(answers, index=index) as url:
        html = run_browser(f"{url}/", profile, "--dump-dom", page_s=page_s + 1.0)
    kept = re.findall(r'<pre id="(\w+)">(.*?)</pre>', html, re.DOTALL)
    assert [name for name, _ in kept] == list(answers)
    return {name: unescape(text) for name, text in kept}


def run_browser(
    url: str,
    profile: Path,
    *actions: str,
    size: tuple[int, int] = (1200, 1300),
    dark: bool = False,
    page_s: float = 3.0,
) -> str:
    """What the browser prints after `page_s` seconds of the page's own time."""
    command = [
        browser(),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
        f"--window-size={size[0]},{size[1]}",
        f"--virtual-time-budget={round(page_s * 1000)}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        *actions,
        url,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=BROWSER_TIMEOUT_S, check=True
    )
    return done.stdout
