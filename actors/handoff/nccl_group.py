"""Two ranks of NCCL as a pair uses them: operations that are posted and go on by themselves.

Knows no pieces, no threads and no deadlines.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from actors.handoff.waits import IsOver


class PairGroup(Protocol):
    """The two ranks as torch sees them.

    Each operation is posted and returns whether it is over. One end's operations run in the order
    in which they were posted, each behind the end of the one before.
    """

    def send(self, data: Tensor, loaded: torch.cuda.Event | None = None) -> IsOver:
        """As soon as `loaded` has happened on the device; None = it is there."""
        ...

    def receive(self, data: Tensor) -> IsOver: ...

    def abort(self) -> None:
        """End what is under way, from any thread; no operation of this end touches memory after."""
        ...


GroupFactory = Callable[[dist.Store, int], PairGroup]


class NcclGroup:
    """A `ProcessGroupNCCL` of two, with a stream of its own."""

    def __init__(
        self, store: dist.Store, rank: int, device: torch.device, max_ctas: int, timeout_s: float
    ) -> None:
        nccl: Any = dist.ProcessGroupNCCL  # not in every build of torch, and its stubs lack half
        options = nccl.Options(is_high_priority_stream=False)
        options._timeout = timedelta(seconds=timeout_s)
        options.config.blocking = 0  # or an abort would wait for the peer
        options.config.max_ctas = max_ctas
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._peer = 1 - rank
        self._group = nccl(store, rank, 2, options)

    def send(self, data: Tensor, loaded: torch.cuda.Event | None = None) -> IsOver:
        if loaded is not None:
            self._stream.wait_event(loaded)
        return self._post(lambda: self._group.send([data], self._peer, 0))

    def receive(self, data: Tensor) -> IsOver:
        return self._post(lambda: self._group.recv([data], self._peer, 0))

    def abort(self) -> None:
        self._group.abort()

    def _post(self, post: Callable[[], Any]) -> IsOver:
        with torch.cuda.stream(self._stream):
            work = post()
            work.wait()  # queues: the group works on a stream of its own, ours waits for it
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return lambda: bool(event.query())  # type: ignore[no-untyped-call]
