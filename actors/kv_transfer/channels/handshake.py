"""Opens a pair before it carries KV: both ends compare epochs, then measure its bandwidth.

The sender measures and judges. Both sizes must arrive whole; the rate is judged by the larger one,
because latency decides the smaller. Runs in the pair's thread. Knows no kind of channel.
"""

import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actors.kv_transfer.contracts import UnfitError
from engine.errors import HandoffError

SENDER_RANK, RECEIVER_RANK = 0, 1

PROBE_BYTES = (2**20, 64 * 2**20)
PROBE_ROUNDS = 2  # rounds of each size; the better one counts


class Wire(Protocol):
    """A pair's operations; both return when the bytes have moved, or raise at a deadline."""

    def send(self, data: Tensor) -> None: ...

    def receive(self, data: Tensor) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """What one end sends when a channel opens."""

    epoch: int
    rank: int
    device: torch.device  # where the wire needs its tensors
    floor_gb_s: float  # the sender's value decides; 0 = not measured


def exchange_handshakes(wire: Wire, mine: Handshake) -> None:
    """Meet the other end. Raises HandoffError if it is of another epoch, UnfitError if too slow."""
    words = torch.tensor([mine.epoch, int(mine.floor_gb_s > 0)], device=mine.device)
    answer = torch.full_like(words, -1)
    _wait_until_made(words)
    if mine.rank == SENDER_RANK:
        wire.send(words)
        wire.receive(answer)
    else:
        wire.receive(answer)
        wire.send(words)
    epoch, is_proven = answer.tolist()
    if epoch != mine.epoch:
        raise HandoffError(f"epoch {epoch} met epoch {mine.epoch}")
    if mine.rank == RECEIVER_RANK and is_proven:
        _answer_proof(wire, mine)
    elif mine.rank == SENDER_RANK and mine.floor_gb_s > 0:
        _probe(wire, mine)


def probe_bandwidth(num_bytes: int, seconds: float, floor_gb_s: float) -> None:
    """Raises UnfitError when so many bytes in so long are less than the floor."""
    rate_gb_s = num_bytes / seconds / 1e9
    if rate_gb_s < floor_gb_s:
        raise UnfitError(
            f"it moves {rate_gb_s:.3g} GB/s ({num_bytes} bytes), and handoff.floors_gb_s asks for"
            f" {floor_gb_s:g}"
        )


def _probe(wire: Wire, mine: Handshake) -> None:
    best_s = 0.0
    for num_bytes in PROBE_BYTES:
        data = _pattern(num_bytes, mine)
        best_s = min(_round_s(wire, data) for _ in range(PROBE_ROUNDS))
    probe_bandwidth(PROBE_BYTES[-1], best_s, mine.floor_gb_s)


def _round_s(wire: Wire, data: Tensor) -> float:
    echo = torch.empty_like(data[:1])
    started_s = time.perf_counter()
    wire.send(data)
    wire.receive(echo)
    return time.perf_counter() - started_s


def _answer_proof(wire: Wire, mine: Handshake) -> None:
    for num_bytes in PROBE_BYTES:
        data = torch.zeros(num_bytes, dtype=torch.uint8, device=mine.device)
        _wait_until_made(data)
        for _ in range(PROBE_ROUNDS):  # no other work in this loop: the sender measures it
            wire.receive(data)
            wire.send(data[-1:])
        if not torch.equal(data, _pattern(num_bytes, mine)):
            raise HandoffError(f"{num_bytes} bytes came, and not those that were sent")


def _pattern(num_bytes: int, mine: Handshake) -> Tensor:
    value = mine.epoch % 251 + 1
    pattern = torch.full((num_bytes,), value, dtype=torch.uint8, device=mine.device)
    _wait_until_made(pattern)
    return pattern


def _wait_until_made(data: Tensor) -> None:
    """Waits for the tensor on the host, because a wire works on a stream of its own."""
    if data.is_cuda:
        torch.cuda.current_stream(data.device).synchronize()
