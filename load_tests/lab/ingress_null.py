"""A worker without an engine: takes requests, and gives each a token a step, computing nothing.

What an ingress sees of it is real: the calls of a worker actor, its load reports, and one message
per step and ingress. So a benchmark of the ingress measures the ingress.
"""

import asyncio
import os
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from actors.lifecycle.deployment import DeploymentSpec
from actors.rpc.server import CallServer, listen_address
from actors.worker.token_streams import TokenStreams
from engine.clock import MonotonicClock
from engine.kv.layout import KvLayout
from engine.messages import (
    CacheReport,
    LoadReport,
    Role,
    Submit,
    TokenRecord,
    WorkerIdentity,
    WorkerStatus,
    decode,
    encode,
)
from engine.request import RequestKey

MAX_MODEL_LEN = 4096
NUM_BLOCKS = 100_000
HOUSEKEEPING_S = 0.25


@dataclass(slots=True, eq=False)
class _Open:
    """A request under way."""

    submit: Submit
    next_index: int = 0

    def next_token(self) -> TokenRecord:
        """The prompt's tokens again and again: text as the model's own tokenizer writes it."""
        submit, index = self.submit, self.next_index
        self.next_index += 1
        is_last = self.next_index == submit.spec.params.max_tokens
        return TokenRecord(
            key=submit.key,
            index=index,
            token_id=submit.token_ids[index % submit.num_prompt_tokens],
            num_cached_tokens=0 if index == 0 else None,
            finish="length" if is_last else None,
        )


class NullWorker:
    """The remote surface of a unified worker (see `WorkerActor`), with nothing below it."""

    def __init__(self, spec: DeploymentSpec, name: str, role: Role, step_s: float) -> None:
        """Starts stepping at once: a token for every open request each `step_s`."""
        self._role = role
        self._spec = spec
        self._name = name
        self._step_s = step_s
        self._incarnation = uuid.uuid4().hex
        self._open: dict[RequestKey, _Open] = {}
        self._streams = TokenStreams(
            worker=name,
            incarnation=self._incarnation,
            config=spec.config.lifetimes,
            clock=MonotonicClock(),
            load=self._load,
            on_silent=self._drop_ingress,
            on_overflow=lambda ingress_id, key: self._drop(key),
        )
        self._server = CallServer(
            listen_address(spec.config),
            {"submit": self.submit, "abort": self.abort, "acknowledge": self.acknowledge},
            {"read": self.read},
        )
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._step()), loop.create_task(self._keep_house())]

    async def heartbeat(self) -> bytes:
        config = self._spec.config
        layout = KvLayout.with_heads(
            num_layers=1,
            block_size=config.cache.block_size,
            num_kv_heads=1,
            head_dim=1,
            dtype="float32",
        )
        identity = WorkerIdentity(
            name=self._name,
            incarnation=self._incarnation,
            role=self._role,
            model=self._spec.model,
            layout=layout,
            max_model_len=MAX_MODEL_LEN,
            pid=os.getpid(),
            block_key=self._spec.block_key,
        )
        return encode(WorkerStatus(identity=identity, state="ready"))

    async def address(self) -> bytes:
        return await self._server.address()

    async def submit(self, request: bytes) -> bytes:
        submit = decode(request, Submit)
        self._open[submit.key] = _Open(submit)
        return b""

    async def abort(self, key: bytes) -> bytes:
        self._drop(decode(key, RequestKey))
        return b""

    async def acknowledge(self, progress: bytes) -> bytes:
        self._streams.acknowledge(*decode(progress, tuple[str, int]))
        return b""

    async def read(self, ingress_id: bytes) -> AsyncGenerator[bytes, None]:
        async for message in self._streams.read(ingress_id.decode()):
            yield message

    async def news(self, after: int | None) -> bytes:
        return encode(CacheReport())

    async def _step(self) -> None:
        """For ever: a token for each open request, then a step's pause."""
        while True:
            await asyncio.sleep(self._step_s)
            tokens = [(o.submit.ingress_id, o.next_token()) for o in self._open.values()]
            for _, record in tokens:
                if record.finish is not None:
                    self._drop(record.key)
            self._streams.publish(tokens, [])

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self._streams.expire_silent()

    def _drop(self, key: RequestKey) -> None:
        self._open.pop(key, None)

    def _drop_ingress(self, ingress_id: str) -> None:
        for key in [k for k, o in self._open.items() if o.submit.ingress_id == ingress_id]:
            self._drop(key)

    def _load(self) -> LoadReport:
        return LoadReport(
            queued_tokens=0,
            num_waiting=0,
            num_running=len(self._open),
            num_free_blocks=NUM_BLOCKS,
            num_blocks=NUM_BLOCKS,
        )
