"""A small Hugging Face Hub on this machine: as much of its API as a download of a model asks."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = hashlib.sha1(b"the only commit").hexdigest()
REVISIONS = ("main", "v2", COMMIT)
Files = Mapping[str, bytes]


@dataclass(slots=True)
class FakeHub:
    """Repositories by name; None = gated. `asked` has (method, path, authorization)."""

    models: Mapping[str, Files | None]
    url: str = ""
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers."""
        words = path.partition("?")[0].strip("/").split("/")
        is_api = words[:2] == ["api", "models"]
        org, name, verb, revision, *rest = [*(words[2:] if is_api else words), "", "", "", ""]
        files = self.models.get(f"{org}/{name}", {})
        if files is None:
            return _refusal(403, "GatedRepo")
        if not files:
            return _refusal(404, "RepoNotFound")
        if revision not in REVISIONS:
            return _refusal(404, "RevisionNotFound")
        if verb == "resolve":
            content = files["/".join(word for word in rest if word)]
            return 200, content, {"ETag": f'"{_sha1(content)}"', "X-Repo-Commit": COMMIT}
        siblings = [{"rfilename": file} for file in files]
        tree = [
            {"type": "file", "path": file, "size": len(content), "oid": _sha1(content)}
            for file, content in files.items()
        ]
        info = {"id": f"{org}/{name}", "sha": COMMIT, "siblings": siblings}
        return 200, json.dumps(tree if verb == "tree" else info).encode(), {}


def _refusal(status: int, code: str) -> tuple[int, bytes, dict[str, str]]:
    return status, b'{"error": "no"}', {"X-Error-Code": code, "X-Error-Message": "no"}


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    """Serves until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.asked.append((self.command, self.path, self.headers["Authorization"]))
            status, body, headers = hub.answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815  # the server's name for it

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
