"""Two ranks in one process in place of NCCL: bytes through queues, and faults on demand."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor


@dataclass(eq=False)
class Sent:
    """Bytes on their way. A flag, because their sender asks for them in another thread."""

    data: Tensor
    is_taken: bool = False


@dataclass
class Wires:
    """What both ranks share; `is_silent`: nothing is ever over, as with a peer that died."""

    is_silent: bool = False
    rate_bytes_s: float = float("inf")
    num_aborts: int = 0
    has_posted: threading.Event = field(default_factory=threading.Event)  # since it is silent
    flips: tuple[int, int] | None = None  # of each piece: which byte, which bits
    sent: dict[int, deque[Sent]] = field(default_factory=lambda: {0: deque(), 1: deque()})

    def make_group(self, _: dist.Store, rank: int) -> "FakeGroup":
        return FakeGroup(self, rank)


class FakeGroup:
    def __init__(self, wires: Wires, rank: int) -> None:
        self._wires = wires
        self._rank = rank
        self._is_aborted = False

    def send(self, data: Tensor, loaded: object = None) -> Callable[[], bool]:
        sent = Sent(data.clone())
        self._wires.sent[self._rank].append(sent)

        def is_over() -> bool:
            return self._is_aborted or (sent.is_taken and not self._wires.is_silent)

        return is_over

    def receive(self, data: Tensor) -> Callable[[], bool]:
        queue = self._wires.sent[1 - self._rank]
        if self._wires.is_silent:
            self._wires.has_posted.set()

        def is_over() -> bool:
            if self._is_aborted:
                return True  # as on a GPU: what is cut off ends, too
            if self._wires.is_silent or not queue:
                return False
            sent = queue.popleft()
            data.copy_(sent.data)
            if self._wires.flips is not None:
                byte, bits = self._wires.flips
                data[byte] ^= bits
            sent.is_taken = True
            return True

        return is_over

    def abort(self) -> None:
        self._wires.num_aborts += 1
        self._is_aborted = True
