"""What a soak would not let pass: wrong tokens, streams cut off, too many errors, growth."""

import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from load_tests.http_load.client import Server
from load_tests.lab.soak import SoakOptions, SoakReport
from load_tests.lab.soak_cases import Case
from load_tests.lab.soak_clients import Clients, Outcomes
from load_tests.lab.soak_record import Look, Track
from load_tests.testbed.system import ProcessId

CASE = Case(
    prompt_ids=[1, 2, 3], text=None, sampling={}, num_tokens=5, expected=[11, 12, 13, 14, 15]
)
ERROR = '{"error": {"message": "the request failed on 3 tries"}}'


class _Answers(BaseHTTPRequestHandler):
    """Answers as its server was told to: tokens, then an end of some kind."""

    def do_POST(self) -> None:
        asked = msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"])))
        tokens, end = self.server.script  # type: ignore[attr-defined]
        if end == "refuse":
            return self._send(503, ERROR.encode())
        if not asked["stream"]:
            return self._send(200, msgspec.json.encode({"choices": [{"token_ids": tokens}]}))
        events = [msgspec.json.encode({"choices": [{"token_ids": [t]}]}).decode() for t in tokens]
        events += {"done": ["[DONE]"], "error": [ERROR], "cut": []}[end]
        return self._send(200, "".join(f"data: {event}\n\n" for event in events).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def http_server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _ask(server: ThreadingHTTPServer, tokens: list[int], end: str, *, is_stream: bool) -> Outcomes:
    """One request, whose client does not leave."""
    server.script = (tokens, end)  # type: ignore[attr-defined]
    url = f"http://127.0.0.1:{server.server_port}"
    clients = Clients(
        Server(url=url), "m", [CASE], num_clients=0, leave_share=0.0, timeout_s=10.0, seed=0
    )
    clients.ask(CASE, is_stream=is_stream, leave_at=None, salt=None)
    return clients.outcomes


def _violations(outcomes: Outcomes) -> list[str]:
    report = SoakReport(
        options=SoakOptions(seconds=1.0, seed=0, leave_share=0.0), outcomes=outcomes
    )
    report.judge()
    return report.violations


@pytest.mark.parametrize("is_stream", [True, False])
def test_the_right_tokens_are_right(http_server: ThreadingHTTPServer, is_stream: bool) -> None:
    outcomes = _ask(http_server, CASE.expected, "done", is_stream=is_stream)
    assert outcomes.num_right == 1
    assert not _violations(outcomes)


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    "tokens",
    [[11, 12, 99, 14, 15], CASE.expected[:-1], [*CASE.expected, 16], [11, 11, 12, 13, 14], []],
)
def test_one_wrong_missing_or_doubled_token_is_a_violation(
    http_server: ThreadingHTTPServer, tokens: list[int], is_stream: bool
) -> None:
    outcomes = _ask(http_server, tokens, "done", is_stream=is_stream)
    assert len(outcomes.wrong) == 1
    assert "wrong tokens" in _violations(outcomes)[0]


def test_a_stream_that_is_cut_off_is_a_violation_even_after_all_its_tokens(
    http_server: ThreadingHTTPServer,
) -> None:
    outcomes = _ask(http_server, CASE.expected, "cut", is_stream=True)
    assert any("without a word" in text for text in _violations(outcomes))


@pytest.mark.parametrize(
    ("end", "is_stream"), [("error", True), ("refuse", True), ("refuse", False)]
)
def test_an_error_in_words_is_counted_and_too_many_are_a_violation(
    http_server: ThreadingHTTPServer, end: str, is_stream: bool
) -> None:
    outcomes = _ask(http_server, CASE.expected[:2], end, is_stream=is_stream)
    assert outcomes.errors.total() == 1
    assert not outcomes.broken
    assert any("1 of 1 failed" in text for text in _violations(outcomes))
    outcomes.num_right = 1000
    assert not _violations(outcomes)


def _track(rss_mib: list[float], num_fds: list[int]) -> Track:
    looks = [
        Look(at_s=5.0 * i, rss_mib=rss, num_fds=fds)
        for i, (rss, fds) in enumerate(zip(rss_mib, num_fds, strict=True))
    ]
    return Track(process=ProcessId(name="decode-0.abc", pid=7), looks=looks)


def test_memory_and_files_that_stay_are_no_offence_and_a_start_is_not_judged() -> None:
    rng = random.Random(random.randrange(2**32))
    num = 90
    rss = [500.0 + 6 * min(i, 20) + rng.uniform(-2, 2) for i in range(num)]
    assert not _track(rss, [60 + rng.randrange(4) for _ in range(num)]).offences()
    assert not _track([100.0 * i for i in range(1, 30)], [i * 9 for i in range(1, 30)]).offences()


def test_memory_and_files_that_grow_are_offences() -> None:
    num = 90
    [memory] = _track([500.0 + 3 * i for i in range(num)], [60] * num).offences()
    assert "memory grew" in memory
    [files] = _track([500.0] * num, [60 + i for i in range(num)]).offences()
    assert "open files grew" in files


@pytest.mark.parametrize(("num_answers", "is_violation"), [(6, True), (7, False)])
def test_a_redeploy_that_answers_only_whom_it_found_is_a_violation(
    num_answers: int, is_violation: bool
) -> None:
    options = SoakOptions(seconds=1.0, seed=0, num_clients=6, leave_share=0.0)
    report = SoakReport(
        options=options, outcomes=Outcomes(num_right=99), num_in_redeploy=num_answers
    )
    report.judge()
    assert bool(report.violations) == is_violation
