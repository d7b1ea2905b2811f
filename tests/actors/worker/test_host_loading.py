"""A worker whose model is loaded, and which all the same cannot start."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from actors.lifecycle.deployment import describe_deployment
from actors.worker import engine_host
from actors.worker.engine_host import EngineHost
from actors.worker.kv_connector import KvConnector
from configs.load import config_from_environment, load_config
from engine.errors import ConfigError, WorkerError
from engine.kv.host.shared_file import FOLDER, PREFIX, name_for
from engine.ranks.rank_reports import RankEnd

OVERRIDES = {
    "lifetimes.supervisor_silence_s": 1e6,  # nobody beats for it
    "cache.num_blocks": 64,
    "cache.host_gib": 0.02,
}


def _make_none(*_: object) -> KvConnector:
    raise ConfigError("no channel of these can be opened")


@pytest.mark.parametrize("culprit", ["the connector", "another rank"])
def test_one_that_cannot_start_is_read_by_nobody_and_leaves_the_arena(
    culprit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaders: list[Any] = []

    def hold(_: str, **given: Callable[..., Any]) -> SimpleNamespace:
        loaders.append(SimpleNamespace(**given))
        return SimpleNamespace(start=lambda: None)

    monkeypatch.setattr(engine_host, "EngineLoader", hold)
    path = config_from_environment({}, {}).model.path
    spec = describe_deployment(load_config(None, {**OVERRIDES, "model.path": path}))
    arena = FOLDER / f"{PREFIX}{name_for(spec.block_key)}"
    is_ours = culprit == "the connector"

    async def scenario() -> None:
        make = _make_none if is_ours else lambda _, __: KvConnector()
        host = EngineHost(spec, "unified-0.test", "unified", make)
        engine = await asyncio.to_thread(loaders[0].build)
        try:
            assert arena.exists()
            if not is_ours:
                host._on_rank_end(RankEnd(rank=1, reason="has no room", is_config=True))
            loaders[0].on_loaded(engine)
            await asyncio.sleep(0)  # what the loader leaves to the event loop
            status = host.heartbeat()
            assert status.state == "failed"
            with pytest.raises(WorkerError, match=status.detail):
                host.read("ingress-0")
            assert not arena.exists()
        finally:
            host._housekeeper.cancel()
            if host._running is not None:
                host._running.thread.close()
            engine.close()

    asyncio.run(scenario())
