"""A worker without Ray around it, whose grace is over while a request runs."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import pytest
import ray
from msgspec import structs

from actors.lifecycle.deployment import describe_deployment
from actors.worker import engine_host
from actors.worker.engine_host import EngineHost
from actors.worker.kv_connector import KvConnector
from configs.load import config_from_environment, load_config
from configs.schema import AppConfig
from engine.errors import CapacityError, RequestError
from engine.host_id import host_id
from engine.messages import StepMessage, Submit, WorkerLimits, decode
from engine.request import RequestKey, RequestSpec, SamplingParams

INGRESS = "ingress-0"
PROMPT = [5, 6, 7, 8, 9]
# Nobody beats for it, and its lifeline must not end these tests.
OVERRIDES = {"lifetimes.supervisor_silence_s": 1e6, "cache.num_blocks": 64}


@dataclass
class Heard:
    """What the ingress has of each attempt."""

    tokens: dict[RequestKey, list[int]] = field(default_factory=dict)
    indices: dict[RequestKey, list[int]] = field(default_factory=dict)
    failed: dict[RequestKey, bool] = field(default_factory=dict)  # whether it may go elsewhere
    finished: set[RequestKey] = field(default_factory=set)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, message: StepMessage) -> None:
        for record in message.tokens:
            assert record.key not in self.failed, "a token after the end"
            self.tokens.setdefault(record.key, []).append(record.token_id)
            self.indices.setdefault(record.key, []).append(record.index)
            if record.finish is not None:
                self.finished.add(record.key)
        for failure in message.failures:
            self.failed[failure.key] = failure.retryable
        self.news.set()


def _submit(attempt: int, emitted: list[int], max_tokens: int) -> Submit:
    return Submit(
        spec=RequestSpec(
            params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        ),
        key=RequestKey("a" * 32, 0, attempt),
        ingress_id=INGRESS,
        token_ids=PROMPT + emitted,
        num_prompt_tokens=len(PROMPT),
    )


async def _start() -> tuple[EngineHost, Heard, "asyncio.Task[None]"]:
    host = _create()
    await _wait_loaded(host)
    return host, *_follow(host)


def _create(**overrides: float) -> EngineHost:
    spec = describe_deployment(_config(overrides))
    return EngineHost(spec, "unified-0.test", "unified", lambda _, __: KvConnector())


async def _wait_loaded(host: EngineHost) -> None:
    while (status := host.heartbeat()).identity is None:
        assert status.state == "starting", status.detail
        await asyncio.sleep(0.01)


def _follow(host: EngineHost) -> tuple[Heard, "asyncio.Task[None]"]:
    heard = Heard()

    async def follow() -> None:
        async for message in host.read(INGRESS):
            heard.hear(decode(message, StepMessage))
            host.acknowledge(INGRESS, decode(message, StepMessage).step_seq)

    return heard, asyncio.ensure_future(follow())


def _config(overrides: Mapping[str, float]) -> AppConfig:
    path = config_from_environment({}, {}).model.path
    return load_config(None, {**OVERRIDES, **overrides, "model.path": path})


async def _close(host: EngineHost, *readers: "asyncio.Task[None]") -> None:
    tasks = [*readers, host._housekeeper]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(host.running.thread.close)


def _run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):  # a hang is a failure, not a wait
            await scenario()

    asyncio.run(bounded())


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when the worker exits for good."""
    left = asyncio.Event()

    def leave() -> None:
        left.set()
        raise asyncio.CancelledError  # the process would be gone

    monkeypatch.setattr(engine_host, "exit_for_good", leave)
    monkeypatch.setattr(engine_host, "HOUSEKEEPING_S", 0.001)  # it may leave at any time
    return left


def test_what_runs_when_the_grace_is_over_goes_on_elsewhere_without_a_gap(
    left: asyncio.Event,
) -> None:
    async def scenario() -> None:
        host, heard, reader = await _start()
        first = _submit(0, [], max_tokens=500)
        await host.running.requests.submit(first)
        while len(heard.tokens.get(first.key, [])) < 3:
            heard.news.clear()
            await heard.news.wait()
        host.drain(0.0)
        assert host.heartbeat().state == "draining"
        with pytest.raises(CapacityError, match="draining"):
            await host.running.requests.submit(_submit(0, [], max_tokens=1))
        await left.wait()
        assert heard.failed == {first.key: True}
        tokens = heard.tokens[first.key]
        assert heard.indices[first.key] == list(range(len(tokens)))
        assert not await host.call(lambda: host.engine.core.scheduler.has_work)
        await _close(host, reader)

        again, heard, reader = await _start()  # another worker
        rest, whole = _submit(1, tokens, len(tokens) + 5), _submit(2, [], len(tokens) + 5)
        await again.running.requests.submit(rest)
        await again.running.requests.submit(whole)
        while heard.finished != {rest.key, whole.key}:
            heard.news.clear()
            await heard.news.wait()
        assert tokens + heard.tokens[rest.key] == heard.tokens[whole.key]
        await _close(again, reader)

    _run(scenario)


@pytest.mark.parametrize(
    ("token_ids", "params"),
    [
        ([5, 3072], SamplingParams(max_tokens=2)),
        ([-1, 5], SamplingParams(max_tokens=2)),
        ([5], SamplingParams(max_tokens=2, logit_bias={1: 1.0, 3072: 1.0})),
        ([5], SamplingParams(max_tokens=0, label_token_ids=(3072,))),
    ],
    ids=["prompt", "negative", "bias", "label"],
)
def test_an_id_without_an_embedding_fails_its_request_and_not_the_worker(
    token_ids: list[int], params: SamplingParams
) -> None:
    """Whatever the edge let pass: the step that computes it would end every request."""

    async def scenario() -> None:
        host, heard, reader = await _start()
        assert host.identity_of(host.engine).host == host_id()
        assert host.identity_of(host.engine).limits == WorkerLimits(
            max_step_ms=50.0, max_queued_tokens=200_000
        )
        good = _submit(0, [], max_tokens=3)
        bad = structs.replace(
            good,
            key=RequestKey("b" * 32),
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            spec=RequestSpec(params=params),
        )
        with pytest.raises(RequestError, match=r"not a token id\. .* from 0 to 3071"):
            await host.running.requests.submit(bad)
        await host.running.requests.submit(good)
        while good.key not in heard.finished:
            heard.news.clear()
            await heard.news.wait()
        await _close(host, reader)

    _run(scenario)


def test_one_that_died_and_is_told_to_leave_while_it_loads_serves_those_who_wait_for_it(
    left: asyncio.Event,
) -> None:
    """A redeploy's supervisor drained the successor of a dead worker before anybody found it."""

    async def scenario() -> None:
        host = _create(**{"lifetimes.ingress_silence_s": 20.0})
        host.drain(60.0)
        assert host.heartbeat().state == "starting"
        await _wait_loaded(host)
        assert host.heartbeat().state == "draining"
        heard, reader = _follow(host)
        again = _submit(1, [], max_tokens=3)
        await host.running.requests.submit(again)
        while again.key not in heard.finished:
            heard.news.clear()
            await heard.news.wait()
        assert not left.is_set()
        await _close(host, reader)

    _run(scenario)


def test_one_that_nobody_comes_back_to_leaves(left: asyncio.Event) -> None:
    async def scenario() -> None:
        host = _create(
            **{"lifetimes.ingress_silence_s": 0.1, "lifetimes.acknowledge_every_s": 0.05}
        )
        host.drain(60.0)
        await _wait_loaded(host)
        await left.wait()
        await _close(host)

    _run(scenario)


def test_one_that_cannot_start_again_is_not_tried_for_ever_once_it_is_to_leave(
    left: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_told = threading.Event()

    def fail(*_: object, **__: object) -> None:
        is_told.wait()
        raise OSError("its model folder is gone")

    class Restarted:
        was_current_actor_reconstructed = True

    monkeypatch.setattr("engine.build.build_engine", fail)
    monkeypatch.setattr(ray, "get_runtime_context", Restarted)

    async def scenario() -> None:
        host = _create()
        host.drain(60.0)
        is_told.set()
        await left.wait()
        assert "its model folder is gone" in (host._failure or "")

    _run(scenario)
