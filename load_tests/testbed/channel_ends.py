"""Two processes that move KV between them over one channel, each with a store and a device.

In place of the actors: a folder is the board where ends meet, a Unix socket carries the calls. The
channels, the connection by which their headers go, the copies and the digests are those of the
workers; there is no scheduler and no Ray.
"""

import asyncio
import fcntl
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch

from actors.kv_transfer.channel_choice import piece_bytes_of
from actors.kv_transfer.channels.cuda_ipc import CudaIpcSender, offer_store, open_receiver
from actors.kv_transfer.channels.gloo_pair import GlooConnection, GlooReceiver, GlooSender
from actors.kv_transfer.channels.handshake import RECEIVER_RANK, SENDER_RANK
from actors.kv_transfer.channels.host_staging import HostStagedSender
from actors.kv_transfer.channels.nccl_pair import NcclPairs, NcclSettings
from actors.kv_transfer.contracts import IncomingData, ReceiveChannel, SendChannel, StagedPiece
from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.pieces_out import MAX_PIECES_UNDER_WAY
from actors.rpc.connection import CallConnection, connect
from actors.rpc.server import CallServer
from configs.schema import HandoffConfig
from engine.errors import HandoffError, WorkerError
from engine.kv.layout import KvLayout
from engine.kv.store import KvStore
from engine.messages import (
    ChannelKind,
    PairRequest,
    PieceHeader,
    PieceReply,
    WorkerIdentity,
    decode,
    encode,
)
from engine.request import RequestKey

POLL_S = 0.002
NUM_LANES = 2  # handoffs under way at a time, where a channel is to be kept busy
MEET_S = 120.0  # for the other process to start
LOOPBACK = "127.0.0.1"

Answer = Callable[..., Awaitable[Any]]


class FileBoard:
    """The channels' `RendezvousClient` over files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = folder / "lock"

    def set(self, key: str, value: bytes) -> None:
        written = self._path(key).with_suffix(f".{os.getpid()}.new")
        written.write_bytes(value)
        written.rename(self._path(key))

    def add(self, key: str, amount: int) -> int:
        with self._lock.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            total = amount + (int(self._path(key).read_bytes()) if self.has([key]) else 0)
            self.set(key, str(total).encode())
        return total

    def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        until_s = time.monotonic() + timeout_s
        while not self.has(keys):
            if time.monotonic() > until_s:
                raise HandoffError(f"nobody wrote all of {list(keys)} within {timeout_s} s")
            time.sleep(POLL_S)
        return [self._path(key).read_bytes() for key in keys]

    def has(self, keys: Sequence[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def num_keys(self) -> int:
        return len(list(self._folder.glob("*.key")))

    def delete(self, key: str) -> bool:
        is_there = self.has([key])
        self._path(key).unlink(missing_ok=True)
        return is_there

    def delete_prefix(self, prefix: str) -> int:
        paths = list(self._folder.glob(f"{prefix.encode().hex()}*.key"))
        for path in paths:
            path.unlink(missing_ok=True)
        return len(paths)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key.encode().hex()}.key"


class End:
    """One process's store and what its channels need."""

    def __init__(
        self,
        folder: Path,
        layout: KvLayout,
        num_blocks: int,
        config: HandoffConfig,
        device: str,
        address: str = LOOPBACK,
    ) -> None:
        """folder: both ends have it. address: where this end listens; the other one reaches it."""
        self.config = config
        self.address = address
        self.store = KvStore(layout, num_blocks=num_blocks, device=torch.device(device))
        self.pieces = KvPieces(self.store)
        self._board = FileBoard(folder)
        self._nccl = NcclPairs(
            self.pieces,
            NcclSettings(
                deadline_s=config.transfer_deadline_s,
                piece_bytes=config.device_piece_bytes,
                max_ctas=config.nccl_max_ctas,
                max_pairs=config.max_nccl_pairs,
                floor_gb_s=config.floors_gb_s.nccl_pair,
            ),
        )

    def fill(self) -> None:
        """With random numbers, and their digests: as if steps had written all blocks."""
        if self.store.tensor.dtype is torch.uint8:
            self.store.tensor.random_()
        else:
            self.store.tensor.normal_()
        block_ids = range(self.store.num_blocks)
        self.store.digests.keep(block_ids, self.store.digest(block_ids))

    def request(self, kind: ChannelKind, epoch: int) -> PairRequest:
        identity = WorkerIdentity(
            name="sender",
            incarnation="1",
            role="prefill",
            model="bench",
            layout=self.store.layout,
            max_model_len=1,
            pid=os.getpid(),
        )
        offer = offer_store(self.store.tensor) if kind == "cuda_ipc" else b""
        key = f"{os.getpid()}/{epoch}/"
        return PairRequest(
            sender=identity, channel=kind, epoch=epoch, rendezvous_key=key, offer=offer
        )

    async def open_send(self, request: PairRequest) -> SendChannel:
        match request.channel:
            case "cuda_ipc":
                return CudaIpcSender(request.epoch, self.config.transfer_deadline_s)
            case "nccl_pair":
                return await self._nccl.open_send(request, self._board)
            case "gloo_pair":
                sender = GlooSender(await self._gloo(request, SENDER_RANK))
                return HostStagedSender(sender, self.pieces.to_host)
            case "object_store":
                raise HandoffError("the object store needs Ray")

    async def open_receive(self, request: PairRequest) -> ReceiveChannel:
        match request.channel:
            case "cuda_ipc":
                floor_gb_s = self.config.floors_gb_s.cuda_ipc
                return await open_receiver(
                    request.epoch, request.offer, self.pieces, floor_gb_s=floor_gb_s
                )
            case "nccl_pair":
                return await self._nccl.open_receive(request, self._board)
            case "gloo_pair":
                return GlooReceiver(await self._gloo(request, RECEIVER_RANK))
            case "object_store":
                raise HandoffError("the object store needs Ray")

    async def _gloo(self, request: PairRequest, rank: int) -> GlooConnection:
        config = self.config
        connection = GlooConnection(
            request.epoch,
            rank,
            config.transfer_deadline_s,
            address=self.address,
            floor_gb_s=config.floors_gb_s.gloo_pair,
            empty=self.pieces.empty,
        )
        try:
            await connection.open(self._board, request.rendezvous_key)
        except BaseException:
            await connection.close()
            raise
        return connection


# ---- the receiver's process ---------------------------------------------------------------------


class ReceivingProcess:
    """Answers a sender's calls, and takes its pieces."""

    def __init__(self, end: End, folder: Path, more: Mapping[str, Answer] | None = None) -> None:
        """`more`: calls to answer besides those of the channel."""
        self._end = end
        self._more = dict(more or {})
        self._listener = Listener(str(folder / "calls"), "AF_UNIX")
        self._server = CallServer(end.address, {"take": self._take})
        self._channel: ReceiveChannel | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """One sender after the other, without end."""
        while True:
            connection = await asyncio.to_thread(self._listener.accept)
            task = asyncio.create_task(self._serve_one(connection))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve_one(self, connection: "Connection[Any, Any]") -> None:
        try:
            while True:
                verb, arguments = await asyncio.to_thread(connection.recv)
                connection.send(await self.answer(verb, *arguments))
        except (EOFError, OSError):
            await self.close_channel()
        finally:
            connection.close()  # or the sender would wait for an answer that failed

    async def answer(self, verb: str, *arguments: Any) -> Any:  # noqa: ANN401
        match verb:
            case "open":
                return await self._open(decode(arguments[0], PairRequest))
            case "address":
                return await self._server.address()
            case "digests":
                return self._end.store.digest(arguments[0])
        return await self._more[verb](*arguments)

    async def close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _open(self, request: PairRequest) -> str:
        """ "" or why it did not open."""
        await self.close_channel()
        try:
            self._channel = await self._end.open_receive(request)
        except WorkerError as error:
            return error.message
        return ""

    async def _take(self, piece: bytes) -> bytes:
        """(PieceHeader, blocks to write to, payload) -> PieceReply, encoded."""
        return encode(await self._write(*decode(piece, tuple[PieceHeader, list[int], list[Any]])))

    async def _write(
        self, header: PieceHeader, block_ids: list[int], payload: list[Any]
    ) -> PieceReply:
        channel, block_bytes = self._channel, self._end.store.layout.block_bytes
        if channel is None or not channel.claim(header.seq):
            return _failed("no channel, or a piece that came before")
        try:
            num_bytes = len(block_ids) * block_bytes
            data = await channel.receive(header.seq, num_bytes, payload, block_ids)
        except WorkerError as error:
            return _failed(error.message)
        piece: StagedPiece[IncomingData] = StagedPiece(data=data, digests=header.digests)
        if not await self._end.pieces.write(block_ids, piece):
            return _failed("wrong digests")
        return PieceReply(outcome="accepted")


# ---- the sender's process -----------------------------------------------------------------------


class SendingProcess:
    """Opens channels to the other process and hands blocks over."""

    def __init__(self, end: End, folder: Path, first_epoch: int = 0) -> None:
        """first_epoch: of several that send from one process, each has epochs of its own."""
        self.end = end
        self._calls = _meet(folder / "calls")
        self._calling = asyncio.Lock()
        self._epoch = first_epoch
        self._channel: SendChannel | None = None
        self._pieces: CallConnection | None = None

    @property
    def channel(self) -> SendChannel:
        assert self._channel is not None, "no channel is open"
        return self._channel

    async def call(self, verb: str, *arguments: Any) -> Any:  # noqa: ANN401
        """Raises EOFError or OSError when the other process is gone."""
        async with self._calling:
            return await asyncio.to_thread(_call, self._calls, verb, arguments)

    async def open(self, kind: ChannelKind) -> float:
        """Replace the channel; the seconds it took. Raises HandoffError."""
        await self.close_channel()
        self._epoch += 1
        request = self.end.request(kind, self._epoch)
        started_s = time.perf_counter()
        theirs = asyncio.ensure_future(self.call("open", encode(request)))
        try:
            self._channel = await self.end.open_send(request)
        finally:
            reason: str = await theirs
        if reason:
            raise HandoffError(f"the receiver did not open {kind}: {reason}")
        self._pieces = await connect("receiver", await self.call("address"), MEET_S)
        return time.perf_counter() - started_s

    async def hand_over(self, from_ids: Sequence[int], to_ids: Sequence[int]) -> float:
        """Move blocks, in pieces, with digests; the seconds it took. Raises HandoffError."""
        piece_bytes = piece_bytes_of(self.end.config, self.channel.kind)
        num_blocks = max(1, piece_bytes // self.end.store.layout.block_bytes)
        places = asyncio.Semaphore(MAX_PIECES_UNDER_WAY)

        async def send(part: slice) -> None:
            async with places:
                await self.send_piece(list(from_ids[part]), list(to_ids[part]))

        started_s = time.perf_counter()
        firsts = range(0, len(from_ids), num_blocks)
        parts = [slice(first, first + num_blocks) for first in firsts]
        ended = await asyncio.gather(*map(send, parts), return_exceptions=True)
        for failure in filter(None, ended):
            raise failure
        return time.perf_counter() - started_s

    async def send_piece(
        self, from_ids: list[int], to_ids: list[int], digests: list[int] | None = None
    ) -> None:
        """One piece; `digests`: others than those of the blocks. Raises HandoffError."""
        piece = await self.end.pieces.read(from_ids)
        pieces, digests = self._pieces, piece.digests if digests is None else digests
        assert pieces is not None, "no channel is open"

        async def deliver(seq: int, payload: list[Any]) -> PieceReply:
            header = _header(self._epoch, seq, digests)
            answer = await pieces.call("take", encode((header, to_ids, payload)))
            return decode(answer, PieceReply)

        reply = await self.channel.send(piece.data, deliver)
        if reply.outcome != "accepted":
            raise HandoffError(reply.reason)

    async def close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
        pieces, self._pieces = self._pieces, None
        if pieces is not None:
            await pieces.close()

    def close(self) -> None:
        self._calls.close()


def _header(epoch: int, seq: int, digests: list[int]) -> PieceHeader:
    """Of one piece of nobody's request."""
    return PieceHeader(
        transfer_id="",
        key=RequestKey("bench"),
        sender="sender",
        sender_incarnation="1",
        epoch=epoch,
        seq=seq,
        first_block=0,
        num_blocks=len(digests),
        digests=digests,
    )


def _failed(reason: str) -> PieceReply:
    return PieceReply(outcome="failed", reason=reason)


def _call(connection: "Connection[Any, Any]", verb: str, arguments: tuple[Any, ...]) -> Any:  # noqa: ANN401
    connection.send((verb, arguments))
    return connection.recv()


def _meet(address: Path) -> "Connection[Any, Any]":
    until_s = time.monotonic() + MEET_S
    while True:
        try:
            return Client(str(address), "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > until_s:
                raise
            time.sleep(POLL_S)
