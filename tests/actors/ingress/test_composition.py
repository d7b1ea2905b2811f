"""A replica put together as Serve does it, but for the actors it would find on Ray."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.ingress import composition
from actors.ingress.composition import Edge, build_edge
from actors.ingress.routes import Api
from actors.lifecycle.deployment import DeploymentSpec
from configs.load import load_config
from engine.errors import CapacityError, ConfigError
from engine.kv.layout import KvLayout
from engine.messages import (
    LapsStatus,
    StepMessage,
    Topology,
    WorkerIdentity,
    WorkerLimits,
    WorkerStatus,
)
from tests.actors.ingress.edge_app import IDLE, MODEL_FOLDER
from tests.harness.tiny_models import edit_config

WORKER = "unified-0"


class _Worker:
    """Reports that it is idle, once."""

    async def read(self, ingress_id: str) -> AsyncGenerator[StepMessage, None]:
        yield StepMessage(worker=WORKER, incarnation="i", step_seq=0, load=IDLE)
        await asyncio.Event().wait()

    async def acknowledge(self, ingress_id: str, step_seq: int) -> None: ...


class _Peers:
    """`Peers` without Ray."""

    state: Any = "ready"

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    async def worker(self, name: str) -> _Worker:
        return _Worker()

    allocator = batcher = worker

    async def topology(self) -> Topology:
        layout = KvLayout.with_heads(
            num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32"
        )
        identity = WorkerIdentity(
            name=WORKER,
            incarnation="i",
            role="unified",
            model="m",
            layout=layout,
            max_model_len=77,
            pid=1,
            block_key=b"k" * 32,
            limits=WorkerLimits(max_step_ms=30.0, max_queued_tokens=4321),
        )
        status = WorkerStatus(identity=identity, state=self.state, detail="no such model")
        return Topology(
            workers={WORKER: status}, roles={WORKER: "unified"}, batchers=["t"], allocator="a"
        )

    async def laps_status(self, topology: Callable[[], Topology | None]) -> LapsStatus:
        assert topology() is not None
        raise CapacityError("the allocator does not answer")


def spec(overrides: dict[str, object]) -> DeploymentSpec:
    config = load_config(None, {"model.path": str(MODEL_FOLDER)} | overrides)
    return DeploymentSpec(config=config, model="m", hash="h", block_key=b"", namespace="app")


async def close(edge: Edge) -> None:
    for task in edge.tasks:
        task.cancel()
    await asyncio.gather(*edge.tasks, return_exceptions=True)
    await edge.generations.close()


def test_a_replica_serves_once_its_workers_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "Peers", _Peers)

    async def main() -> None:
        edge = await build_edge(spec({"api.served_model_names": ["tiny", "small"]}))
        edge.check()
        assert edge.generations.queue_limit.num_tokens == 200_000, "the configuration's"
        assert (edge.model.max_model_len, edge.model.names) == (77, ("tiny", "small"))
        transport = httpx.ASGITransport(app=Api(edge).app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/ready")).status_code == 200
            text = (await client.get("/metrics")).text
            assert f'laps_worker_up{{model_name="tiny",role="unified",worker="{WORKER}"}} 1' in text
            assert (await client.get("/laps_status")).status_code == 503
        edge.tasks[0].cancel()
        await asyncio.gather(edge.tasks[0], return_exceptions=True)
        with pytest.raises(RuntimeError, match="cancelled"):
            edge.check()
        await close(edge)

    asyncio.run(main())


def test_ids_end_where_the_models_embeddings_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(composition, "Peers", _Peers)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_FOLDER / name, tmp_path)
    edit_config(tmp_path, vocab_size=3000)  # of a tokenizer with 3072

    async def main() -> None:
        edge = await build_edge(spec({"model.path": str(tmp_path)}))
        assert edge.model.vocab_size == edge.tokenizing.vocab_size == 3000
        await close(edge)

    asyncio.run(main())


def test_a_worker_that_cannot_start_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "Peers", _Peers)
    monkeypatch.setattr(_Peers, "state", "failed")

    async def main() -> None:
        with pytest.raises(ConfigError, match="unified-0 cannot start: no such model"):
            await build_edge(spec({}))

    asyncio.run(main())


def test_with_auto_the_queue_is_bounded_by_what_the_workers_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(composition, "Peers", _Peers)

    async def main() -> None:
        edge = await build_edge(spec({"edge.max_queued_tokens": "auto"}))
        assert edge.generations.queue_limit.num_tokens == 4321
        refused = pytest.raises(CapacityError, match="the limit is 4321")
        with edge.admission.admitted(1), refused, edge.admission.admitted(4321):
            pass
        await close(edge)

    asyncio.run(main())
