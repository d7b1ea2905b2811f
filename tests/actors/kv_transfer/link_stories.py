"""Heads that one process gets from another by a link of each kind; what both of them do.

Other processes import this file.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.rank_links import Giver, GiversOffer, HeadGiver, Wires
from actors.kv_transfer.rank_pieces import whole_part
from actors.kv_transfer.rank_pulls import DropSource, Linking, LinkSource, PullBlocks, RankPuller
from configs.schema import HandoffConfig
from engine.kv.layout import KvLayout, KvPart
from engine.kv.store import KvStore
from engine.layers.context import Comm
from engine.messages import ChannelKind
from engine.ranks.rank import Rank
from engine.ranks.shared_stores import part_of
from tests.actors.kv_transfer.rank_workers import layout_of_part

NUM_BLOCKS = 11
WHOLE = KvLayout.with_heads(
    num_layers=3, block_size=16, num_kv_heads=4, head_dim=128, dtype="bfloat16"
)
READER = Rank(1, 2)  # of a worker of two ranks, whose other one is not here
_END = b"end"


class FileBoard:
    """A `RendezvousClient` of processes that share a file."""

    def __init__(self, path: str) -> None:
        self._store = dist.FileStore(path)

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        self._store.wait(list(keys), timedelta(seconds=timeout_s))
        return [self._store.get(key) for key in keys]

    def has(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def num_keys(self) -> int:
        return self._store.num_keys()

    def delete(self, key: str) -> bool:
        return self._store.delete_key(key)

    def delete_prefix(self, prefix: str) -> int:
        return 0  # the file goes with the test


class _Calls:
    """Of the first process by the second: each sends an order and waits for its end, in turn."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._is_under_way = False

    def ask(self, order: bytes) -> Callable[[], Any]:
        if self._is_under_way:
            self._wait()
        self._comm.gather_bytes(order)
        self._is_under_way = True
        return self._wait

    def end(self) -> None:
        self.ask(_END)

    def _wait(self) -> Any:
        self._is_under_way = False
        return np.frombuffer(self._comm.gather_bytes(b"")[0], np.uint8)


def drawn_blocks() -> Tensor:
    """[NUM_BLOCKS, *block_shape], the same in both processes."""
    generator = torch.Generator().manual_seed(11)
    return torch.randn(NUM_BLOCKS, *WHOLE.block_shape, generator=generator).bfloat16()


def _filled(part: KvPart, device: torch.device) -> KvStore:
    store = KvStore(layout_of_part(WHOLE, part.num_heads), num_blocks=NUM_BLOCKS, device=device)
    store.hold_part(part)
    store.scatter(range(NUM_BLOCKS), drawn_blocks()[..., part.heads, :].contiguous())
    return store


def link_twice(comm: Comm, kind: ChannelKind, device: str, path: str) -> Tensor | None:
    """The second process's store, on the CPU, once it has got its heads in reverse order.

    By two channels, one after the other. The first process has all heads.
    """
    on = torch.device(device)
    wires = Wires(
        rendezvous=FileBoard(path),
        address="127.0.0.1",
        config=HandoffConfig(transfer_deadline_s=20.0),
        device=on,
    )
    if comm.rank.index == 0:
        _give(comm, HeadGiver(whole_part(WHOLE), KvPieces(_filled(whole_part(WHOLE), on)), wires))
        return None
    part, calls = part_of(READER, WHOLE), _Calls(comm)
    linking = Linking(wires=wires, find=lambda _: calls.ask, reader="reader")
    store = _filled(part, on)
    puller = RankPuller(part, KvPieces(store), index=READER.index, linking=linking)
    ids = list(range(NUM_BLOCKS))
    expected = [store.digest([block_id])[0] for block_id in ids]
    for epoch in (1, 2):
        store.tensor.zero_()
        torch.zeros(1, device=on).cpu()  # it is zeroed
        offer = GiversOffer(NUM_BLOCKS, [Giver(whole_part(WHOLE), "first")])
        order = LinkSource(epoch, offer, kind, epoch, f"{epoch}/")
        assert puller.do(msgspec.msgpack.encode(order)) == b""
        pull = PullBlocks(epoch, ids, ids[::-1])
        found = np.frombuffer(puller.do(msgspec.msgpack.encode(pull)), np.int64)
        assert found.tolist() == expected
        puller.do(msgspec.msgpack.encode(DropSource(epoch)))
    calls.end()
    return store.tensor.cpu()


def _give(comm: Comm, giver: HeadGiver) -> None:
    while (order := comm.gather_bytes(b"")[1]) != _END:
        given = giver.do(order)
        comm.gather_bytes(b"" if given is None else given.tobytes())
    assert not giver._open, "a wire stays open"
