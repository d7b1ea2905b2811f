"""A worker actor of the product on virtual time: an engine over integers, stepped by the loop.

The actor class, its engine host, streams, scheduler, caches and KV connectors are the product's.
Not taken part: the model (a `FakeExecutor` computes), the engine's thread (a task turns in its
place), the bytes' way (`FakeChannels`), and what ends a process by itself.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np

from actors import workers
from actors.kv_transfer import connectors
from actors.kv_transfer.contracts import PieceBytes, StagedPiece
from actors.lifecycle.deployment import DeploymentSpec
from actors.worker import engine_host
from actors.worker.engine_host import EngineHost
from actors.worker.engine_thread import EngineThread
from actors.worker.worker_actor import WorkerActor
from configs.resolved import resolve_scheduler
from engine.build_host_tier import BelowDevice
from engine.clock import Clock
from engine.core import EngineCore
from engine.engine import Engine
from engine.errors import WorkerError
from engine.kv.cache import BlockCache
from engine.kv.hashes import RequestHasher
from engine.kv.layout import KvLayout
from engine.kv.transfer import OutgoingEvent, OutgoingHandoffs
from engine.messages import ChannelKind, PairRequest, Role
from engine.models.spec import load_spec
from engine.runner.auto import StepSizes, choose_limits
from engine.scheduling.contracts import StepOutput
from engine.scheduling.finish import FinishRules
from engine.scheduling.scheduler import Scheduler
from tests.harness.fakes import EOS_TOKEN_ID, FakeExecutor, Written
from tests.harness.handoff_network import FakeChannel, FakeChannels, Faults
from tests.harness.processes import Network, Process

STEP_S = 0.002  # what a step takes the device
COPY_S = 0.001  # what a piece takes in and out of a store
MAX_MODEL_LEN = 256
NUMBERS_PER_TOKEN = 3  # of a `Written`, 64 bits each

WORKERS: dict[Role, Callable[[DeploymentSpec, str, Role], WorkerActor]] = {
    "prefill": workers.PrefillWorker,
    "decode": workers.DecodeWorker,
    "unified": workers.UnifiedWorker,
}


# ---- the engine ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoStatistics:
    """A fake executor measures nothing."""


class IntegerExecutor(FakeExecutor):
    """Whose blocks can be read and written as bytes, as a handoff does."""

    expert_loads = None
    may_split = False

    @property
    def kv_store(self) -> "IntegerExecutor":
        """Itself: `IntegerPieces` reads and writes blocks by it."""
        return self

    def statistics(self) -> NoStatistics:
        return NoStatistics()

    def read_blocks(self, block_ids: Sequence[int]) -> PieceBytes:
        """Raises AssertionError if a step in flight writes one of them."""
        in_use = self.blocks_unsettled.intersection(block_ids)
        assert not in_use, f"a step in flight writes blocks {in_use}, which are read"
        slots = [slot for block_id in block_ids for slot in self._store[block_id]]
        numbers = [(slot.token_id, slot.position, slot.history) for slot in slots]
        return np.array(numbers, dtype=np.int64).view(np.uint8).reshape(-1)

    def write_blocks(self, block_ids: Sequence[int], data: PieceBytes) -> None:
        """Raises AssertionError if a step in flight touches one of them."""
        in_use = self.blocks_in_flight.intersection(block_ids)
        assert not in_use, f"a step in flight uses blocks {in_use}, which are written"
        rows = data.view(np.int64).reshape(-1, NUMBERS_PER_TOKEN).tolist()
        slots = [Written(*row) for row in rows]
        for i, block_id in enumerate(block_ids):
            self._store[block_id] = slots[i * self._block_size : (i + 1) * self._block_size]


class IntegerPieces:
    """In place of `KvPieces`."""

    is_on_gpu = False

    def __init__(self, executor: IntegerExecutor, *, names_blocks: bool = False) -> None:
        assert not names_blocks, "no ranks here that would ask for them"
        self._executor = executor

    def fence(self) -> None:
        """There is no device that runs behind."""

    async def read(self, block_ids: Sequence[int]) -> StagedPiece[PieceBytes]:
        data = self._executor.read_blocks(block_ids)
        await asyncio.sleep(COPY_S)
        return StagedPiece(data=data, digests=_digests(data, len(block_ids)))

    async def write(self, block_ids: Sequence[int], piece: StagedPiece[PieceBytes]) -> bool:
        await asyncio.sleep(COPY_S)
        if _digests(piece.data, len(block_ids)) != piece.digests:
            return False
        self._executor.write_blocks(block_ids, piece.data)
        return True


def _digests(data: PieceBytes, num_blocks: int) -> list[int]:
    return [hash(block.tobytes()) for block in data.reshape(num_blocks, -1)]


def kv_layout(block_size: int) -> KvLayout:
    """Of blocks with room for a `Written` a token."""
    layout = KvLayout.with_heads(
        num_layers=1, block_size=block_size, num_kv_heads=1, head_dim=3, dtype="float32"
    )
    assert layout.block_bytes == block_size * NUMBERS_PER_TOKEN * 8
    return layout


def build_integer_engine(
    spec: DeploymentSpec, clock: Clock, notify: Callable[[OutgoingEvent], None]
) -> Engine:
    """As `engine.build.build_engine` puts it together, over a `FakeExecutor`."""
    config = spec.config
    block_size, num_blocks = config.cache.block_size, config.cache.num_blocks
    assert num_blocks is not None, "a test says how many blocks there are"
    overlap = bool(config.scheduler.overlap)
    scheduler_config = resolve_scheduler(config.scheduler, {})
    sizes = StepSizes(
        max_rows=scheduler_config.max_num_seqs,
        max_tokens=scheduler_config.max_num_batched_tokens,
        max_graph_rows=1,
    )
    executor = IntegerExecutor(
        num_blocks=num_blocks,
        block_size=block_size,
        max_rows=sizes.max_rows,
        max_num_batched_tokens=sizes.max_tokens,
        max_model_len=MAX_MODEL_LEN,
        max_in_flight=1 + int(overlap),
    )
    cache = BlockCache(
        num_blocks,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        protected_share=config.cache.protected_share,
    )
    layout = kv_layout(block_size)
    hasher = RequestHasher(
        spec.block_key, model=spec.model, dtype=layout.dtype, block_size=block_size
    )
    outgoing = OutgoingHandoffs(cache, notify)
    scheduler = Scheduler(
        config.scheduler,
        cache=cache,
        hasher=hasher,
        handoff_queue=outgoing,
        block_size=block_size,
        finish_rules=FinishRules((EOS_TOKEN_ID,), MAX_MODEL_LEN),
        laps=config.laps,
    )
    return Engine(
        spec=load_spec(Path(config.model.path)),
        layout=layout,
        whole_layout=layout,
        rank_stores=(),
        below_device=BelowDevice(),
        max_model_len=MAX_MODEL_LEN,
        limits=choose_limits(config, sizes, None),
        cache=cache,
        hasher=hasher,
        executor=cast("Any", executor),
        grammars=cast("Any", None),
        outgoing=outgoing,
        core=EngineCore(scheduler, executor, clock, overlap=overlap),
        draft_passes=None,
        compilations=cast("Any", None),
    )


class TurningEngine(EngineThread):
    """In place of the engine's thread: the same turns, by a task, each step taking `STEP_S`."""

    def __init__(
        self,
        core: EngineCore,
        *,
        on_step: Callable[[StepOutput], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        super().__init__(core, on_step=on_step, on_failure=on_failure)
        self._has_calls = asyncio.Event()

    def start(self) -> None:
        self._turning = asyncio.get_running_loop().create_task(self._turn())

    def _post(self, call: Any) -> None:
        if self._is_closing:
            raise WorkerError("the engine is closing")
        self._calls.append(call)
        self._has_calls.set()

    async def _turn(self) -> None:
        try:
            while True:
                if not self._calls and not self._core.has_work:
                    await self._wait_for_calls(None)
                self._run_calls()
                while (left_s := self._core.defer_s()) > 0.0:
                    await self._wait_for_calls(left_s)
                    self._run_calls()
                output = self._core.step()
                await asyncio.sleep(STEP_S)
                self._on_step(output)
                if not output.has_progressed and not self._core.waits_for_others:
                    await self._wait_for_calls(STEP_S)
        except Exception as error:  # noqa: BLE001 - as the thread does
            self._is_closing = True
            self._on_failure(error)
            self._drop_calls()

    async def _wait_for_calls(self, timeout_s: float | None) -> None:
        if self._calls:
            return
        self._has_calls.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_calls.wait()
        except TimeoutError:
            return


# ---- the network of KV ---------------------------------------------------------------------------


class ProcessChannels(FakeChannels):
    """Of one process: when it dies, all its channels close, at both ends."""

    def __init__(self, shared: FakeChannels, process: Process) -> None:
        super().__init__(shared._faults)
        self.wires = shared.wires
        self._mine: list[str] = []
        process.when_dead(self._close_all)

    async def _open(self, request: PairRequest) -> FakeChannel:
        channel = await super()._open(request)
        self._mine.append(request.rendezvous_key)
        return channel

    def offer(self, kind: ChannelKind) -> bytes:
        return b""

    def _close_all(self) -> None:
        for key in self._mine:
            self.wires[key].close()


# ---- the worker ----------------------------------------------------------------------------------


class NoLifeline:
    """In place of a thread that ends a process which nobody needs."""

    def __init__(self, *_: object) -> None:
        """Of the same arguments."""

    @classmethod
    def of(cls, *_: object) -> "NoLifeline":
        return cls()

    def start(self) -> "NoLifeline":
        return self

    def beat(self) -> None:
        """Nobody counts."""


class Workshop:
    """Makes worker processes of one deployment; `problems` is what should have ended one."""

    def __init__(self, spec: DeploymentSpec, network: Network, clock: Clock) -> None:
        self.spec = spec
        self.problems: list[str] = []
        self.kv_network = FakeChannels(Faults())
        self._network = network
        self._clock = clock
        self._process: Process | None = None  # that is being made

    def start(self, name: str, role: Role) -> Process:
        """A worker that has loaded, and is found by its name from now on."""
        process = self._process = Process(name)
        process.run(lambda: self._build(process, role))
        self._network.processes[name] = process
        return process

    def _build(self, process: Process, role: Role) -> None:
        worker = process.worker = WORKERS[role](self.spec, process.name, role)
        host = worker._host
        host._begin(build_integer_engine(self.spec, self._clock, host._on_outgoing))
        assert host.heartbeat().state == "ready", host.heartbeat()

    @contextmanager
    def instead_of_a_cluster(self) -> Iterator[None]:
        """The product's ways out of a process lead here."""
        nothing = {
            "set_up_logging": lambda level: None,
            "Lifeline": NoLifeline,
            "StallWatch": NoLifeline,
        }
        ours = {
            engine_host: nothing
            | {
                "EngineThread": TurningEngine,
                "MonotonicClock": lambda: self._clock,
                "exit_failed": self._fail,
                "exit_for_good": lambda: self.problems.append("a worker left for good"),
            },
            connectors: {
                "KvPieces": IntegerPieces,
                "find_actor": self._network.find_actor,
                "_channels": lambda *_: self._channels(),
            },
        }
        with ExitStack() as stack:
            stack.enter_context(patch.object(EngineHost, "_load", lambda host: None))
            stack.enter_context(patch("actors.rpc.handles.connect", self._network.connect))
            for module, names in ours.items():
                for name, value in names.items():
                    stack.enter_context(patch.object(module, name, value))
            yield

    def _channels(self) -> ProcessChannels:
        assert self._process is not None, "a connector is built with its worker"
        return ProcessChannels(self.kv_network, self._process)

    def _fail(self, who: str, error: BaseException) -> None:
        self.problems.append(f"{who}: the engine failed: {error!r}")
