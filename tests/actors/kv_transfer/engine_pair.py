"""A prefill and a decode engine in one process, between which whole prompts are moved.

Books, pieces and stores are the real ones; a loop in place of calls and channels moves whole
prompts, as each channel does.
"""

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch

from actors.kv_transfer.channels.worker_channels import Pieces
from actors.kv_transfer.contracts import StagedPiece, StoredBlocks
from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.own_blocks import OwnBlockPieces, OwnBlockSources
from configs.load import load_config
from engine.build import build_engine
from engine.clock import Clock, MonotonicClock
from engine.engine import Engine
from engine.kv.cache import check_blocks
from engine.kv.transfer import HandoffReady, IncomingHandoffs, OutgoingEvent
from engine.layers.context import SINGLE_RANK, Comm
from engine.messages import PieceHeader, Reservation, ReserveRequest, Role, WorkerIdentity
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from tests.harness.led_ranks import LedRanks
from tests.harness.rank_processes import TIMEOUT_S, RankProcesses

SETTINGS: dict[str, Any] = {
    "scheduler.max_num_batched_tokens": 24,  # so that prompts are computed in chunks
    "scheduler.max_num_seqs": 4,
    "scheduler.overlap": True,
    "cache.num_blocks": 64,
    "cache.block_size": 8,
    "workers.unified": 0,
    "workers.prefill": 1,
    "workers.decode": 1,
}
ROLES: tuple[Role, Role] = ("prefill", "decode")
Way = Literal["host", "pulled", "staged"]  # as gloo or the object store, CUDA IPC, NCCL move pieces
REAL_TIME = MonotonicClock()


def _ignore(_: OutgoingEvent) -> None:
    """Only rank 0 sends KV on."""


def build_end(
    comm: Comm,
    folder: Path,
    sizes: tuple[int, int],
    role: Role,
    more: dict[str, object],
    notify: Any = _ignore,
    clock: Clock = REAL_TIME,
) -> Engine:
    """The engine of one role, or one rank of it. sizes: ranks of both roles."""
    config = load_config(
        None,
        SETTINGS
        | more
        | {
            "model.path": str(folder),
            "workers.prefill_tensor_parallel_size": sizes[0],
            "workers.decode_tensor_parallel_size": sizes[1],
        },
    )
    return build_engine(config, "m", clock, notify, bytes(32), role=role, comm=comm)


class Pair:
    """A prefill and a decode engine, whose other ranks follow."""

    def __init__(
        self,
        stack: ExitStack,
        gangs: dict[Role, RankProcesses],
        folder: Path,
        sizes: tuple[int, int],
        more: dict[str, object] | None = None,
        way: Way = "host",
        clock: Clock = REAL_TIME,
    ) -> None:
        """gangs: of the roles that have several ranks. clock: of engines and leases."""
        self._way = way
        self.ready: list[HandoffReady] = []
        self.engines: dict[Role, Engine] = {}
        self.pieces: dict[Role, Pieces] = {}
        for role, size in zip(ROLES, sizes, strict=True):
            given = folder, sizes, role, more or {}
            if size == 1:
                self.engines[role] = engine = build_end(SINGLE_RANK, *given, self._note, clock)
                self.pieces[role] = KvPieces(engine.kv_store, num_threads=1)
                continue
            led = stack.enter_context(LedRanks(gangs[role], build_end, *given))
            self.engines[role] = engine = build_end(gangs[role].comm, *given, self._note, clock)
            led.lead_engine(engine)
            stores = engine.rank_stores
            self.pieces[role] = OwnBlockPieces(stores, led.steps, TIMEOUT_S, num_threads=1)
        decode = self.engines["decode"]
        self.incoming = IncomingHandoffs(
            decode.joining_ranks,
            hasher=decode.hasher,
            identity=self._identity("decode"),
            clock=clock,
            lease_s=60.0,
            max_rows=decode.limits.scheduler.max_num_seqs,
        )

    def _note(self, event: OutgoingEvent) -> None:
        if isinstance(event, HandoffReady):
            self.ready.append(event)

    def _identity(self, role: Role) -> WorkerIdentity:
        engine = self.engines[role]
        return WorkerIdentity(
            name=role,
            incarnation=role,
            role=role,
            model="m",
            layout=engine.whole_layout,
            max_model_len=engine.max_model_len,
            pid=1,
        )

    def answer(self, asked: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
        """As many as fit the decode side at once."""
        found: dict[RequestKey, list[int]] = {}
        for number, (prompt, params) in enumerate(asked):
            key = RequestKey(f"{number + 1000 * self.incoming.statistics().num_reserved:032x}")
            found[key] = []
            request = Request(
                key=key,
                ingress_id="test",
                spec=RequestSpec(params=params),
                tokens=list(prompt),
                num_prompt_tokens=len(prompt),
                arrival_s=0.0,
                decode_worker="decode",
            )
            self.engines["prefill"].core.scheduler.add(request)
        asked_of = dict(zip(found, asked, strict=True))
        self._run("prefill", found)
        for event in self.ready:
            asyncio.run(self._hand_over(event, *asked_of[event.key]))
        self.ready.clear()
        self._run("decode", found)
        self._check_books()
        return list(found.values())

    def _run(self, role: Role, found: dict[RequestKey, list[int]]) -> None:
        core = self.engines[role].core
        while core.has_work:
            output = core.step()
            assert not output.failures
            for _, record in output.tokens:
                found[record.key].append(record.token_id)

    async def _hand_over(
        self, event: HandoffReady, prompt: list[int], params: SamplingParams
    ) -> None:
        reservation = self.incoming.reserve(
            ReserveRequest(
                key=event.key,
                sender=self._identity("prefill"),
                ingress_id="test",
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                spec=RequestSpec(params=params),
            )
        )
        assert isinstance(reservation, Reservation), reservation
        first, end = reservation.num_hit_blocks, reservation.num_blocks
        piece: StagedPiece[Any] = StagedPiece(data=b"", digests=[])
        if first < end:
            piece = await self.pieces["prefill"].read(event.block_ids[first:end])
        header = PieceHeader(
            transfer_id=reservation.transfer_id,
            key=event.key,
            sender="prefill",
            sender_incarnation="prefill",
            epoch=1,
            seq=0,
            first_block=first,
            num_blocks=end - first,
            digests=piece.digests,
            first_token_id=event.first_token_id,
            num_drafter_tokens=event.num_drafter_tokens,
        )
        write = self.incoming.begin_write(header)
        if write.block_ids:
            self.pieces["decode"].fence()
            assert await self._move(piece, write.block_ids)
        assert self.incoming.end_write(event.key, write, is_verified=True)
        self.incoming.commit(header)
        self.engines["prefill"].outgoing.release(event.key)

    async def _move(self, piece: StagedPiece[Any], to_ids: list[int]) -> bool:
        source, target = (self.pieces[role] for role in ROLES)
        if not isinstance(piece.data, StoredBlocks):
            return await target.write(to_ids, piece)
        if self._way == "host":
            data = await source.to_host(piece.data)
            return await target.write(to_ids, StagedPiece(data=data, digests=piece.digests))
        from_ids = list(piece.data.block_ids)
        assert isinstance(source, OwnBlockPieces)
        assert isinstance(target, OwnBlockPieces)
        if self._way == "pulled":
            stores = OwnBlockSources([one.store.tensor for one in source.stores], source.whole)
            return await target.pull(stores, from_ids, to_ids, piece.digests)
        slot = torch.empty(piece.data.nbytes, dtype=torch.uint8, device=source.device)
        loaded = source.queue_load(from_ids, slot)
        if loaded is not None:
            loaded.synchronize()
        taken = target.queue_take(slot, to_ids)
        taken.wait()
        return bool(taken.digests.tolist() == piece.digests)

    def _check_books(self) -> None:
        for role in ROLES:
            engine = self.engines[role]
            held = self.incoming if role == "decode" else engine.outgoing
            check_blocks(engine.cache, [*engine.core.scheduler.owners(), *held.owners()])
            assert engine.cache.num_held == 0
