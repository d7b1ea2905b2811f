"""A client that leaves in any phase of its request leaves nothing behind, on any worker.

Once a phase on a real cluster; every combination is in tests/actors/test_disconnects_virtual.py,
and at night here.
Phases are recognised by what the workers say they hold, never by the time that passed.
"""

import asyncio
import concurrent.futures
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from load_tests.testbed.deployed import Application, wait_until
from load_tests.testbed.moments import Pause, before_piece, before_step

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CONTEXT = 2048  # tokens, of the model
LONG = 1900  # tokens of a prompt that computes, and then moves, for a while
MIDDLE = 100  # of its 238 steps and 475 pieces
SHORT = 9
LEAVE_S = 60.0

Holdings = Mapping[str, Mapping[str, int]]


class Client:
    """Requests under way from the start of the block until `leave`, which hangs up on all."""

    def __init__(
        self, application: Application, *prompts: list[int], is_stream: bool, **params: object
    ) -> None:
        self._application = application
        self._body: dict[str, Any] = {
            "model": application.model,
            "max_tokens": CONTEXT - max(map(len, prompts)),
            "temperature": 0.0,
            "stream": is_stream,
            "extra_body": {"ignore_eos": True, "return_token_ids": True},
            "prompt": list(prompts) if len(prompts) > 1 else prompts[0],
        } | params
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._request: concurrent.futures.Future[None] | None = None
        self.num_tokens = 0  # of all choices

    def __enter__(self) -> Self:
        self._thread.start()
        self._request = asyncio.run_coroutine_threadsafe(self._ask(), self._loop)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._request is not None
        if not self._request.done():
            self.leave()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LEAVE_S)
        self._loop.close()

    def leave(self) -> None:
        """Hang up in the middle; fails if the request has ended by itself."""
        assert self._request is not None
        assert not self._request.done(), f"it is over: {self._request}, {self.num_tokens} tokens"
        self._request.cancel()
        asyncio.run_coroutine_threadsafe(self._wait_hung_up(), self._loop).result(LEAVE_S)

    async def _ask(self) -> None:
        async with self._application.async_client(timeout=120.0) as client:
            answer = await client.completions.create(**self._body)
            if not self._body["stream"]:
                return
            async for chunk in answer:
                for choice in chunk.choices:
                    self.num_tokens += len(choice.model_extra["token_ids"])

    async def _wait_hung_up(self) -> None:
        mine = {asyncio.current_task()}
        await asyncio.gather(*(asyncio.all_tasks() - mine), return_exceptions=True)


def make_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(10, 3000) for _ in range(num_tokens)]


def look(application: Application, role: str, part: str) -> Mapping[str, int]:
    """One part of the statistics of the only worker of a role."""
    [name] = application.workers(role)
    seen: Mapping[str, int] = application.statistics()[name][part]
    return seen


@pytest.fixture(scope="module")
def baselines() -> dict[str, Holdings]:
    """Per application, once its workers have met."""
    return {}


@pytest.fixture(
    params=["over_gloo_pairs", pytest.param("over_object_store", marks=pytest.mark.nightly)]
)
def application(request: pytest.FixtureRequest, baselines: dict[str, Holdings]) -> Application:
    return warm(request.getfixturevalue(request.param), baselines)


@pytest.fixture
def over_one_channel(over_gloo_pairs: Application, baselines: dict[str, Holdings]) -> Application:
    """For phases in which no KV moves."""
    return warm(over_gloo_pairs, baselines)


def warm(application: Application, baselines: dict[str, Holdings]) -> Application:
    if application.name not in baselines:
        application.complete("import os")
        baselines[application.name] = application.baseline()
    return application


@contextmanager
def restored(
    application: Application, baselines: dict[str, Holdings], num_clients: int = 1
) -> Iterator[None]:
    """After a block in which so many clients left, nothing is left of them; answers are right."""
    expected = application.complete("import os")
    num_left = application.metric("laps_clients_left_total") + num_clients
    yield
    application.wait_restored(baselines[application.name])
    assert application.metric("laps_clients_left_total") == num_left
    assert application.complete("import os") == expected
    application.wait_restored(baselines[application.name])


@contextmanager
def decode_worker_full(application: Application, rng: random.Random) -> Iterator[None]:
    """Two long streams hold both of its rows."""
    prompts = [make_prompt(rng, SHORT) for _ in range(2)]
    with Client(application, *prompts, is_stream=True) as occupants:
        wait_until(
            lambda: look(application, "decode", "scheduler")["num_running"] == 2, "both rows held"
        )
        yield
        occupants.leave()


@pytest.fixture
def pause(tmp_path: Path) -> Iterator[Pause]:
    """In the middle of a long prompt: no client can be too late for that."""
    pause = Pause(number=MIDDLE, begun=tmp_path / "begun", over=tmp_path / "over")
    yield pause
    pause.over.touch()


def is_forgotten(application: Application) -> bool:
    """The ingress waits for nobody's tokens."""
    return application.metric("laps_open_attempts") == 0


def num_committed(application: Application) -> int:
    """Handoffs that the decode worker took over."""
    return look(application, "decode", "incoming")["num_committed"]


def num_decoded(application: Application) -> int:
    """Tokens that the decode worker has sampled."""
    return look(application, "decode", "scheduler")["num_output_tokens"]


def is_in_line(application: Application) -> bool:
    """A reservation waits at the decode worker."""
    return look(application, "decode", "receiver")["num_waiting"] > 0


both_modes = pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
mostly_streams = pytest.mark.parametrize(
    "is_stream", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["stream", "unary"]
)
mostly_unary = pytest.mark.parametrize(
    "is_stream", [pytest.param(True, marks=pytest.mark.nightly), False], ids=["stream", "unary"]
)


@mostly_streams
def test_leaving_while_queued(
    over_one_channel: Application,
    baselines: dict[str, Holdings],
    rng: random.Random,
    is_stream: bool,
) -> None:
    application = over_one_channel

    def is_queued() -> bool:
        return look(application, "prefill", "scheduler")["num_waiting"] == 1

    with (
        restored(application, baselines, num_clients=3),
        decode_worker_full(application, rng),
        Client(application, make_prompt(rng, SHORT), is_stream=True),
    ):
        wait_until(lambda: is_in_line(application), "a prompt that waits holds back the next")
        with Client(application, make_prompt(rng, SHORT), is_stream=is_stream) as client:
            wait_until(is_queued, "the request is queued")
            client.leave()
            wait_until(lambda: not is_queued(), "the queue is empty")
            assert is_in_line(application), "only the one that left has gone"


@mostly_unary
def test_leaving_during_prefill(
    over_one_channel: Application,
    baselines: dict[str, Holdings],
    rng: random.Random,
    is_stream: bool,
    pause: Pause,
) -> None:
    application = over_one_channel
    with restored(application, baselines):
        before = look(application, "prefill", "scheduler")["num_prompt_tokens_computed"]
        application.call_in_workers(before_step(pause), "prefill")
        with Client(application, make_prompt(rng, LONG), is_stream=is_stream) as client:
            wait_until(pause.begun.exists, "the prompt computes")
            client.leave()
            wait_until(lambda: is_forgotten(application), "the ingress has given it up")
            pause.over.touch()
            wait_until(
                lambda: look(application, "prefill", "scheduler")["num_running"] == 0,
                "the prompt is given up",
            )
        after = look(application, "prefill", "scheduler")["num_prompt_tokens_computed"]
        assert 0 < after - before < LONG, "the rest of the prompt was not computed"


@mostly_streams
def test_leaving_while_the_reservation_waits_in_line(
    application: Application,
    baselines: dict[str, Holdings],
    rng: random.Random,
    is_stream: bool,
) -> None:
    with restored(application, baselines, num_clients=2):
        with (
            decode_worker_full(application, rng),
            Client(application, make_prompt(rng, SHORT), is_stream=is_stream) as client,
        ):
            committed = num_committed(application)
            wait_until(lambda: is_in_line(application), "its reservation waits")
            wait_until(lambda: client.num_tokens == int(is_stream), "the first token came anyway")
            client.leave()
            wait_until(lambda: not is_in_line(application), "the line is empty")
        application.wait_quiet()
        assert num_committed(application) == committed, "room came, but nobody took it"


@mostly_unary
def test_leaving_while_pieces_move(
    application: Application,
    baselines: dict[str, Holdings],
    rng: random.Random,
    is_stream: bool,
    pause: Pause,
) -> None:
    with restored(application, baselines):
        committed = num_committed(application)
        application.call_in_workers(before_piece(pause), "decode")
        with Client(application, make_prompt(rng, LONG), is_stream=is_stream) as client:
            wait_until(pause.begun.exists, "pieces arrive")
            client.leave()
            wait_until(
                lambda: look(application, "decode", "incoming")["num_reservations"] == 0,
                "the reservation is given up",
            )
            pause.over.touch()
        assert num_committed(application) == committed, "the last piece never came"


@both_modes
def test_leaving_while_decoding(
    application: Application,
    baselines: dict[str, Holdings],
    rng: random.Random,
    is_stream: bool,
) -> None:
    with restored(application, baselines):
        before = num_decoded(application)
        with Client(application, make_prompt(rng, SHORT), is_stream=is_stream) as client:
            wait_until(lambda: num_decoded(application) > before + 3, "it decodes")
            wait_until(lambda: not is_stream or client.num_tokens > 3, "tokens came")
            client.leave()
        application.wait_quiet()
        assert num_decoded(application) - before < CONTEXT - SHORT - 1, (
            "it did not go on to its end"
        )


@mostly_streams
def test_leaving_with_choices_in_every_phase(
    over_one_channel: Application,
    baselines: dict[str, Holdings],
    rng: random.Random,
    is_stream: bool,
) -> None:
    """n = 3 for each of two prompts: two decode, one or two are in line, the rest is queued."""
    application = over_one_channel
    prompts = [make_prompt(rng, SHORT) for _ in range(2)]

    def is_everywhere() -> bool:
        num_decoding = look(application, "decode", "scheduler")["num_running"]
        num_queued = look(application, "prefill", "scheduler")["num_waiting"]
        return num_decoding == 2 and num_queued > 0 and is_in_line(application)

    with (
        restored(application, baselines),
        Client(application, *prompts, is_stream=is_stream, n=3) as client,
    ):
        wait_until(is_everywhere, "choices decode, wait in line and are queued")
        assert application.metric("laps_open_attempts") == 6
        before = num_decoded(application)
        client.leave()
        application.wait_quiet()
        # Two decode and fill both rows; none of the six may have been taken to its end.
        assert num_decoded(application) - before < CONTEXT - SHORT - 1
