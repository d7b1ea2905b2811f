"""A worker without Ray around it, whose grace is over while a request runs."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from actors.deployment import describe_deployment
from actors.logs import ROOMS
from actors.worker import engine_host
from actors.worker.engine_host import EngineHost
from actors.worker.role_side import RoleSide
from configs.load import config_from_environment, load_config
from configs.schema import AppConfig
from engine.errors import CapacityError
from engine.messages import StepMessage, Submit, decode
from engine.request import RequestKey, SamplingParams

INGRESS = "ingress-0"
PROMPT = [5, 6, 7, 8, 9]
# Nobody beats for it, and its lifeline must not end these tests.
OVERRIDES = {"lifetimes.supervisor_silence_s": 1e6, "cache.num_blocks": 64}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """A worker sets up the logging of its process; here that is the tests'."""
    loggers = [logging.getLogger(room) for room in ROOMS]
    before = [(lg.handlers, lg.level, lg.propagate) for lg in loggers]
    yield
    for lg, (handlers, level, propagate) in zip(loggers, before, strict=True):
        lg.handlers, lg.level, lg.propagate = handlers, level, propagate


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
        key=RequestKey("a" * 32, 0, attempt),
        ingress_id=INGRESS,
        token_ids=PROMPT + emitted,
        num_prompt_tokens=len(PROMPT),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )


async def _start() -> tuple[EngineHost, Heard, "asyncio.Task[None]"]:
    spec = describe_deployment(_config())
    host = EngineHost(spec, "unified-0.test", "unified", lambda _, __: RoleSide())
    while host.heartbeat().state != "ready":
        assert host.heartbeat().state == "starting", host.heartbeat().detail
        await asyncio.sleep(0.01)
    heard = Heard()

    async def follow() -> None:
        async for message in host.read(INGRESS):
            heard.hear(decode(message, StepMessage))
            host.acknowledge(INGRESS, decode(message, StepMessage).step_seq)

    return host, heard, asyncio.ensure_future(follow())


def _config() -> AppConfig:
    path = config_from_environment({}, {}).model.path
    return load_config(None, {**OVERRIDES, "model.path": path})


async def _close(host: EngineHost, reader: "asyncio.Task[None]") -> None:
    assert host._thread is not None
    reader.cancel()
    host._housekeeper.cancel()
    await asyncio.gather(reader, host._housekeeper, return_exceptions=True)
    await asyncio.to_thread(host._thread.close)


def test_what_runs_when_the_grace_is_over_goes_on_elsewhere_without_a_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = asyncio.Event()

    def leave() -> None:
        left.set()
        raise asyncio.CancelledError  # the process would be gone

    monkeypatch.setattr(engine_host, "exit_for_good", leave)

    async def scenario() -> None:
        host, heard, reader = await _start()
        first = _submit(0, [], max_tokens=500)
        await host.submit(first)
        while len(heard.tokens.get(first.key, [])) < 3:
            heard.news.clear()
            await heard.news.wait()
        host.drain(0.0)
        assert host.heartbeat().state == "draining"
        with pytest.raises(CapacityError, match="draining"):
            await host.submit(_submit(0, [], max_tokens=1))
        await left.wait()
        assert heard.failed == {first.key: True}
        tokens = heard.tokens[first.key]
        assert heard.indices[first.key] == list(range(len(tokens)))
        assert not await host.call(lambda: host.engine.core.scheduler.has_work)
        await _close(host, reader)

        again, heard, reader = await _start()  # another worker
        rest, whole = _submit(1, tokens, len(tokens) + 5), _submit(2, [], len(tokens) + 5)
        await again.submit(rest)
        await again.submit(whole)
        while heard.finished != {rest.key, whole.key}:
            heard.news.clear()
            await heard.news.wait()
        assert tokens + heard.tokens[rest.key] == heard.tokens[whole.key]
        await _close(again, reader)

    async def bounded() -> None:
        async with asyncio.timeout(60):  # a hang is a failure, not a wait
            await scenario()

    asyncio.run(bounded())
