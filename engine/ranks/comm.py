"""Communication between the ranks of one model on one host: gloo on a CPU, NCCL between GPUs.

Ranks meet, and choose which of these they use, in meeting.py. Where GPUs map each other's memory,
smaller sums between them are ours (peer_ranks.py).

The groups are objects of their own: there is no default process group and nothing global. Gloo
listens on the loopback interface only.

A sum has the same bits on every rank. On a CPU every rank gets all parts and adds them in rank
order, 16-bit floats in fp32. NCCL's algorithms (ring, tree, in the switch) compute each element
once and hand it to all ranks, but the order of more than two parts depends on the tensor's size and
the element's place in it. Where a row's sum must not, parts are gathered and added as on a CPU.

On a CPU an operation has ended when its method returns, or WorkerError is raised after `timeout_s`.
On a GPU it is queued in the current stream, and can be captured in a CUDA graph. One that a peer
never joins does not end: whoever waits for a step needs a deadline of its own.
"""

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import WorkerError
from engine.layers.context import FusedSums
from engine.ranks.nccl_deadlines import NO_WATCHDOG
from engine.ranks.rank import Rank

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_CONNECT_PATIENCE = 5  # gloo waits for a peer's connection this many times its timeout
_POLL_S = 1e-3
_ABORT_PATIENCE_S = 5.0
_SUMMED_IN_FP32 = (torch.bfloat16, torch.float16)


class GlooRanks:
    """`Comm` for tensors in host memory. Not thread-safe: one thread calls it."""

    fused_sums: FusedSums | None = None

    def __init__(self, rank: Rank, store: dist.Store, timeout_s: float) -> None:
        """Connect to the other ranks. Raises WorkerError."""
        self.rank = rank
        self._timeout = timedelta(seconds=timeout_s)
        self._store = store  # the group calls it as long as it lives
        self._group: Any = None  # ProcessGroupGloo; None = not connected, or closed
        gloo: Any = dist.ProcessGroupGloo  # its stubs lack half of it
        options = gloo._Options()
        options._timeout = self._timeout / _CONNECT_PATIENCE
        options._threads = 1
        options._devices = [gloo.create_device(hostname=_LOOPBACK)]
        try:
            self._group = gloo(store, rank.index, rank.size, options)
        except RuntimeError as error:
            raise WorkerError(
                f"{rank}: not all ranks came within {timeout_s:g} s: {error}"
            ) from error

    def all_reduce(self, x: Tensor) -> Tensor:
        return _add_in_rank_order(self.all_gather(x), like=x, num_ranks=self.rank.size)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._all_gather(x, self._timeout)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        own = x[: x.shape[0] // self.rank.size]
        return _add_in_rank_order(self.all_to_all(x), like=own, num_ranks=self.rank.size)

    def all_to_all(self, x: Tensor) -> Tensor:
        assert x.shape[0] % self.rank.size == 0, f"{list(x.shape)} for {self.rank.size} ranks"
        sent = x.contiguous()
        received = torch.empty_like(sent)
        if x.numel() > 0:
            options = _within(dist.distributed_c10d.AllToAllOptions(), self._timeout)
            self._run(
                "all_to_all",
                lambda group: group.alltoall_base(received, sent, [], [], options),
                self._timeout,
            )
        return received

    def exchange_rows(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        lines = x.contiguous()
        arrived = x.new_empty((sum(received), *x.shape[1:]))
        options = _within(dist.distributed_c10d.AllToAllOptions(), self._timeout)
        self._run(
            "exchange_rows",
            lambda group: group.alltoall_base(arrived, lines, received, sent, options),
            self._timeout,
        )
        return arrived

    def gather_bytes(self, data: bytes, timeout_s: float | None = None) -> list[bytes]:
        limit = self._timeout if timeout_s is None else timedelta(seconds=timeout_s)
        lengths: list[int] = self._all_gather(torch.tensor([len(data)]), limit).tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        lines = self._all_gather(padded.unsqueeze(0), limit).numpy()
        return [line[:length].tobytes() for line, length in zip(lines, lengths, strict=True)]

    def close(self) -> None:
        self._group = None  # hangs up

    def _all_gather(self, x: Tensor, limit: timedelta) -> Tensor:
        gathered = x.new_empty((self.rank.size * x.shape[0], *x.shape[1:]))
        if x.numel() > 0:
            sent = x.contiguous()
            options = _within(dist.distributed_c10d.AllgatherOptions(), limit)
            self._run(
                "all_gather", lambda group: group._allgather_base(gathered, sent, options), limit
            )
        return gathered

    def _run(self, verb: str, post: Callable[[Any], Any], limit: timedelta) -> None:
        """Post an operation and wait for its end. Raises WorkerError."""
        if self._group is None:
            raise WorkerError(f"{self.rank}: {verb} after the ranks were disconnected")
        try:
            is_done = post(self._group).wait(limit)
        except RuntimeError as error:  # what torch raises: a closed connection, a deadline
            raise WorkerError(
                f"{self.rank}: {verb} failed; another rank died, or did not take part within"
                f" {limit.total_seconds():g} s: {error}"
            ) from error
        if not is_done:
            raise WorkerError(
                f"{self.rank}: {verb}: another rank did not take part within"
                f" {limit.total_seconds():g} s"
            )


def _add_in_rank_order(parts: Tensor, like: Tensor, num_ranks: int) -> Tensor:
    """parts: [n T, ...], one after the other; returns their sum [T, ...]."""
    first, *others = parts.view(num_ranks, *like.shape).unbind()
    total: Tensor = first.float() if like.dtype in _SUMMED_IN_FP32 else first.clone()
    for part in others:
        total += part
    return total.to(like.dtype, copy=False)


class NcclRanks:
    """`Comm` for tensors on GPUs, one GPU a rank; bytes go through host memory.

    Not thread-safe. Operations run in the stream that is current when they are called.
    """

    fused_sums: FusedSums | None = None

    def __init__(
        self,
        rank: Rank,
        store: dist.Store,
        host: GlooRanks,
        device: torch.device,
        timeout_s: float,
        *,
        in_rank_order: bool = False,
    ) -> None:
        """NCCL itself connects with the first operation.

        timeout_s: of `wait_queued`. in_rank_order: see `connect_ranks` (meeting.py).
        """
        self.rank = rank
        self._host = host
        self._store = store
        self._device = device
        self._timeout_s = timeout_s
        self._gathers_sums = in_rank_order and rank.size > 2  # two parts have one sum
        nccl: Any = dist.ProcessGroupNCCL  # not in every build of torch, and its stubs lack half
        options = nccl.Options(is_high_priority_stream=False)
        options._timeout = NO_WATCHDOG
        self._group: Any = nccl(store, rank.index, rank.size, options)

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._gathers_sums:
            return _add_in_rank_order(self.all_gather(x), like=x, num_ranks=self.rank.size)
        summed = x.contiguous()
        if x.numel() > 0:
            options = _queued(dist.distributed_c10d.AllreduceOptions())
            _follow(self._group.allreduce([summed], options))
        return summed

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.rank.size * x.shape[0], *x.shape[1:]))
        if x.numel() > 0:
            options = _queued(dist.distributed_c10d.AllgatherOptions())
            _follow(self._group._allgather_base(gathered, x.contiguous(), options))
        return gathered

    def reduce_scatter(self, x: Tensor) -> Tensor:
        scattered = x.new_empty((x.shape[0] // self.rank.size, *x.shape[1:]))
        if self._gathers_sums:
            parts = self.all_to_all(x)
            return _add_in_rank_order(parts, like=scattered, num_ranks=self.rank.size)
        if x.numel() > 0:
            options = _queued(dist.distributed_c10d.ReduceScatterOptions())
            _follow(self._group._reduce_scatter_base(scattered, x.contiguous(), options))
        return scattered

    def all_to_all(self, x: Tensor) -> Tensor:
        sent = x.contiguous()
        received = torch.empty_like(sent)
        if x.numel() > 0:
            options = _queued(dist.distributed_c10d.AllToAllOptions())
            _follow(self._group.alltoall_base(received, sent, [], [], options))
        return received

    def exchange_rows(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        lines = x.contiguous()
        arrived = x.new_empty((sum(received), *x.shape[1:]))
        options = _queued(dist.distributed_c10d.AllToAllOptions())
        _follow(self._group.alltoall_base(arrived, lines, received, sent, options))
        return arrived

    def gather_bytes(self, data: bytes, timeout_s: float | None = None) -> list[bytes]:
        return self._host.gather_bytes(data, timeout_s)

    def wait_queued(self, what: str) -> None:
        """Block until the current stream has ended. Raises WorkerError after the timeout."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        end_s = time.monotonic() + self._timeout_s
        while not event.query():
            if time.monotonic() > end_s:
                raise WorkerError(f"{self.rank}: {what}: not done in {self._timeout_s:g} s")
            time.sleep(_POLL_S)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            abort(group)
        self._host.close()


def abort(group: Any) -> None:  # noqa: ANN401 - torch types it loosely
    """End a group of NCCL's; whoever closes waits no longer than a moment.

    NCCL's own call waits until all CUDA graphs that hold operations of the group are freed, for
    ever if something still refers to one: an engine in use, the frames of an error.
    """
    thread = threading.Thread(target=group.abort, name="nccl-abort", daemon=True)
    thread.start()
    thread.join(_ABORT_PATIENCE_S)
    if thread.is_alive():
        logger.warning(
            "NCCL has not ended a group in %g s: CUDA graphs of its operations are still there",
            _ABORT_PATIENCE_S,
        )


def _within(options: Any, limit: timedelta) -> Any:  # noqa: ANN401 - torch types it loosely
    """Options of an operation that fails after `limit`."""
    options.timeout = limit
    return options


def _queued(options: Any) -> Any:  # noqa: ANN401 - torch types it loosely
    """Options of an operation in the current stream, instead of one of the group's own."""
    options.asyncOp = False
    return options


def _follow(work: Any) -> None:  # noqa: ANN401 - torch types it loosely
    """Lets the current stream wait for an operation; None = torch ran it in that stream itself."""
    if work is not None:
        work.wait()
