"""The mixed load is the peer's for the same seed, and times count from when a request was due."""

import gc
import itertools
import random
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from actors.lifecycle.threads import SWITCH_S
from engine.messages import LoadReport, TokenRecord
from engine.request import RequestKey
from load_tests.lab.mixed_http import Asking, HttpClients, serve_over_http
from load_tests.lab.open_loop import TokenReader, serve_load
from load_tests.mixed_load import Arrival, MixedLoad, OverloadError, Served, Stamps
from tests.harness.seeds import seed_of
from tests.load_tests.http_load.fake_openai import FakeOpenAI, Reply, running

SEED = seed_of(__name__)
NO_LOAD = LoadReport(queued_tokens=0, num_waiting=0, num_running=0, num_free_blocks=1, num_blocks=1)


def peers_arrivals(rate: float, duration_s: float, seed: int) -> list[tuple[float, int]]:
    """As the peer's script draws them, written down once more."""
    rng, now, out = random.Random(seed), 0.0, []
    while (now := now + rng.expovariate(rate)) <= duration_s:
        is_long = rng.random() < 0.2
        short = max(8, min(256, int(rng.lognormvariate(4.3, 0.8)))) if not is_long else 0
        out.append((now, rng.randrange(2048, 8192) if is_long else short))
    return out


# ---- arrivals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.5, 16.0, 24.0])
@pytest.mark.parametrize("seed", [7, SEED], ids=["7", "fresh"])
def test_arrivals_are_the_peers(rate: float, seed: int) -> None:
    ours = MixedLoad(rate=rate, duration_s=20, seed=seed).arrivals()
    assert [(a.at_s, a.num_tokens) for a in ours] == peers_arrivals(rate, 20, seed), f"seed {seed}"
    assert all((a.num_tokens > 256) == (a.length_class == "long") for a in ours)


def test_seed_seven_at_sixteen_a_second_is_known() -> None:
    arrivals = MixedLoad(rate=16.0, duration_s=20, seed=7).arrivals()
    assert (len(arrivals), sum(a.length_class == "long" for a in arrivals)) == (311, 61)
    assert [a.num_tokens for a in arrivals[:4]] == [7380, 19, 27, 18]


def test_shrinking_keeps_times_and_classes() -> None:
    load = MixedLoad(rate=8.0, duration_s=20, seed=SEED)
    small = MixedLoad(rate=8.0, duration_s=20, seed=SEED, shrink=50)
    for one, other in zip(load.arrivals(), small.arrivals(), strict=True):
        assert (one.at_s, one.length_class) == (other.at_s, other.length_class)
        assert other.num_tokens == max(1, one.num_tokens // 50)


def test_prompts_have_the_arrivals_lengths_and_are_their_loads_own() -> None:
    load = MixedLoad(rate=8.0, duration_s=10, seed=SEED, shrink=8)
    prompts = load.prompts(load.arrivals(), 300)
    assert [len(prompt) for prompt in prompts] == [a.num_tokens for a in load.arrivals()]
    assert 10 <= min(map(min, prompts)) <= max(map(max, prompts)) < 300
    assert prompts == load.prompts(load.arrivals(), 300)
    other = MixedLoad(rate=8.0, duration_s=10, seed=SEED + 1, shrink=8)
    assert max(prompts, key=len) not in other.prompts(other.arrivals(), 300)


# ---- what became of a request --------------------------------------------------------------------


def arrival(at_s: float) -> Arrival:
    return Arrival(at_s=at_s, num_tokens=5, length_class="short")


def test_the_first_token_counts_from_when_the_request_was_due() -> None:
    stamps = Stamps([arrival(1.0), arrival(2.0)])
    stamps.add(1, 2.5)
    stamps.add(0, 2.6)
    stamps.add(1, 2.7, 2)
    stamps.add(0, 3.0, 2)
    first, second = stamps.served(3)
    assert (first.ttft_s, second.ttft_s) == pytest.approx((1.6, 0.5))
    assert (first.tpot_s, second.tpot_s) == pytest.approx((0.2, 0.1))


def test_a_single_token_has_no_time_per_token() -> None:
    assert Served(arrival=arrival(0.0), first_s=1.0, last_s=1.0, num_tokens=1).tpot_s == 0.0


def test_requests_without_all_their_tokens_are_an_error() -> None:
    stamps = Stamps([arrival(1.0), arrival(2.0)])
    stamps.add(0, 2.0, 2)
    with pytest.raises(AssertionError, match="request 1 got no token"):
        stamps.served(2)
    stamps.add(1, 2.0)
    with pytest.raises(AssertionError, match="request 1 got 1 tokens"):
        stamps.served(2)


# ---- the reader ----------------------------------------------------------------------------------


def records(num: int) -> list[tuple[str, TokenRecord]]:
    keys = [RequestKey(f"{i:032x}") for i in range(num)]
    return [("", TokenRecord(key=key, index=0, token_id=i)) for i, key in enumerate(keys)]


def test_the_reader_has_read_everything_when_it_ends() -> None:
    seen: list[tuple[int, float]] = []
    with TokenReader(
        NO_LOAD, lambda record, now_s: seen.append((record.token_id, now_s))
    ) as reader:
        for num in (3, 0, 2):
            reader.publish(records(num))
    assert [token_id for token_id, _ in seen] == [0, 1, 2, 0, 1]
    assert seen[0][1] == seen[2][1] < seen[3][1]  # one message a step


def test_what_fails_in_the_reader_is_raised() -> None:
    def fail(record: TokenRecord, now_s: float) -> None:
        raise KeyError(record.token_id)

    with pytest.raises(KeyError, match="0"), TokenReader(NO_LOAD, fail) as reader:
        reader.publish(records(1))


class OneStep:
    """In place of an engine in this process: a request has its one token after a step."""

    def __init__(self) -> None:
        self.engine = self.core = self
        self.spec = SimpleNamespace(vocab_size=100)
        self.steps: list[tuple[float, int]] = []  # switch interval; objects no collection looks at
        self._keys: list[RequestKey] = []

    @property
    def has_work(self) -> bool:
        return bool(self._keys)

    def defer_s(self) -> float:
        return 0.0

    def load(self) -> LoadReport:
        return NO_LOAD

    def add(self, prompt: list[int], num_tokens: int) -> RequestKey:
        self._keys.append(RequestKey(f"{len(self._keys) + len(self.steps):032x}"))
        return self._keys[-1]

    def step(self) -> SimpleNamespace:
        self.steps.append((sys.getswitchinterval(), gc.get_freeze_count()))
        records = [TokenRecord(key=self._keys.pop(), index=0, token_id=3)]
        return SimpleNamespace(tokens=[("", one) for one in records], has_progressed=True)


def test_threads_and_garbage_of_an_engine_in_process_are_as_in_a_worker() -> None:
    """Else a first token waits up to 5 ms for the host's part of the step behind it."""
    interval_s, num_frozen = sys.getswitchinterval(), gc.get_freeze_count()
    ours = OneStep()
    load = MixedLoad(rate=1000.0, duration_s=0.001, seed=7, num_output_tokens=1)
    assert len(serve_load(ours, load)) == len(ours.steps) > 0  # type: ignore[arg-type]
    for step_interval_s, num_left_out in ours.steps:
        assert step_interval_s == pytest.approx(SWITCH_S)
        assert num_left_out > num_frozen
    assert sys.getswitchinterval() == interval_s
    gc.freeze()  # as these tests began


# ---- over HTTP -----------------------------------------------------------------------------------


class Answers(BaseHTTPRequestHandler):
    """Two events with tokens, one without, and an end where `num_tokens` asks for it.

    Below /refuses a request is refused, below /fourth the fourth client is.
    """

    protocol_version = "HTTP/1.1"
    tokens = ("[1]", "[2, 3]")
    clients = itertools.count(1)

    def do_GET(self) -> None:
        if self.path == "/fourth/v1/models" and next(self.clients) % 4 == 0:
            self.send_error(503)
            return
        self._answer(b'{"data": [{"id": "model"}]}', "application/json")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.startswith("/refuses"):
            self.send_error(429)
            return
        events = [f'{{"choices": [{{"text": "a", "token_ids": {ids}}}]}}' for ids in self.tokens]
        lines = [f"data: {event}\n\n" for event in [*events, '{"choices": []}', "[DONE]"]]
        self._answer("".join(lines).encode(), "text/event-stream")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests are quiet."""

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing of clients that left."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@pytest.fixture
def url() -> Iterator[str]:
    with QuietServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def short_load(num_output_tokens: int) -> MixedLoad:
    return MixedLoad(rate=100.0, duration_s=0.1, seed=7, num_output_tokens=num_output_tokens)


def test_a_load_is_served_over_http(url: str) -> None:
    served = serve_over_http(url, short_load(3), 100)
    assert [one.arrival for one in served] == short_load(3).arrivals()
    assert all(one.ttft_s > 0 and one.num_tokens == 3 for one in served)


def test_several_clients_serve_one_load_together(url: str) -> None:
    served = serve_over_http(url, short_load(3), 100, num_clients=2)
    assert [one.arrival for one in served] == short_load(3).arrivals()
    assert all(one.ttft_s > 0 and one.num_tokens == 3 for one in served)


def test_the_reason_of_a_client_that_fails_is_told(url: str) -> None:
    with pytest.raises(AssertionError, match="got 3 tokens"):
        serve_over_http(url, short_load(4), 100, num_clients=2)


def test_the_reason_comes_before_those_who_waited_for_the_one_that_failed(url: str) -> None:
    with pytest.raises(ConnectionError, match="HTTP 503"):
        serve_over_http(f"{url}fourth", short_load(3), 100, num_clients=4)


def test_clients_that_failed_serve_the_next_load(url: str) -> None:
    with HttpClients(2) as clients:
        with pytest.raises(ConnectionError, match="429"):
            clients.serve(f"{url}refuses", short_load(3), 100, Asking())
        served = clients.serve(url, short_load(3), 100, Asking())
    assert [one.arrival for one in served] == short_load(3).arrivals()


@pytest.mark.parametrize("says_priority", [True, False])
def test_a_server_is_told_priorities_where_it_takes_them(says_priority: bool) -> None:
    load = MixedLoad(rate=100.0, duration_s=0.3, seed=7, num_output_tokens=1, shrink=64)
    with running(FakeOpenAI()) as fake, HttpClients(1) as clients:
        clients.serve(fake.url, load, 100, Asking(says_priority=says_priority))
    told = sorted((len(one.body["prompt"]), one.body.get("priority")) for one in fake.seen)
    ranks = {"short": 0, "long": 1}
    assert told == sorted(
        (a.num_tokens, ranks[a.length_class] if says_priority else None) for a in load.arrivals()
    )


def test_an_answer_without_an_end_is_not_waited_for_for_ever() -> None:
    held = FakeOpenAI(script=lambda number, body: Reply(waits_for=lambda: False))
    with running(held), HttpClients(1) as clients, pytest.raises(ConnectionError, match="Timeout"):
        clients.serve(held.url, short_load(1), 100, Asking(patience_s=0.05))


@pytest.mark.parametrize("num_clients", [1, 2])
def test_a_refused_request_is_an_error(url: str, num_clients: int) -> None:
    with pytest.raises(ConnectionError, match=r"429: .*Too Many Requests") as caught:
        serve_over_http(f"{url}refuses", short_load(3), 100, num_clients=num_clients)
    assert not isinstance(caught.value, OverloadError), "it does not say when to come back"


@pytest.mark.parametrize("num_clients", [1, 2])
def test_a_server_without_room_is_overloaded_and_says_why(num_clients: int) -> None:
    full = Reply(status=503, headers=("Retry-After: 7",), message="300 tokens are queued")
    with (
        running(FakeOpenAI(script=lambda number, body: full)) as fake,
        pytest.raises(OverloadError, match=r"HTTP 503: 300 tokens are queued \(retry after 7 s\)"),
    ):
        serve_over_http(fake.url, short_load(3), 100, num_clients=num_clients)


@pytest.mark.parametrize("num_clients", [1, 2])
def test_a_server_that_is_not_there_is_an_error(num_clients: int) -> None:
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9: UnreachableError"):
        serve_over_http("http://127.0.0.1:9", short_load(3), 100, num_clients=num_clients)


def test_a_server_that_gives_fewer_tokens_is_an_error(url: str) -> None:
    with pytest.raises(AssertionError, match="request 0 got 3 tokens"):
        serve_over_http(url, short_load(4), 100)
