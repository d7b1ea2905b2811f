"""`Comm` between GPUs that map each other's memory: our sums where they are fast, NCCL elsewhere.

Each rank allocates one piece of memory, once, and maps the others' by CUDA IPC handles, which the
ranks tell each other through host memory. All ranks decide alike, by a tensor's size: which of the
two computes a sum, and whether peer memory is used at all.

Operations on peer memory have an order, the same on every rank; one queued in another stream than
the one before waits for that. Multicast is never used.
"""

import itertools
import logging
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from engine.errors import WorkerError
from engine.kv.device_offer import DeviceOffer, map_tensor, offer_tensor
from engine.layers.context import Comm, FusedSums
from engine.ranks.agreement import BUILD_PATIENCE_S
from engine.ranks.comm import NcclRanks
from engine.ranks.rank import Rank
from kernels.comm.limits import SumLimits, limits_of
from kernels.comm.signals import NUM_SLOTS, SIGNAL_BYTES
from kernels.comm.sums import (
    SUM_DTYPES,
    PeerMemory,
    fits_norm,
    needed_bytes,
    sum_add_norm,
    sum_over_ranks,
)

logger = logging.getLogger(__name__)

SLOT_BYTES = 64 * 2**20
# The first sums: of numbers whose end cuts a vector, or does not.
_FIRST_SUMS = (
    (33, torch.int32),
    (33, torch.float32),
    (4096, torch.float32),
    (4096, torch.bfloat16),
)


class PeerRanks:
    """Not thread-safe. Operations run in the stream that is current when they are called."""

    def __init__(self, others: NcclRanks, memory: PeerMemory, limits: SumLimits) -> None:
        """others: for what is larger than `limits`, and for what is not a sum."""
        self.rank: Rank = others.rank
        self.fused_sums: FusedSums | None = self
        self.gather_bytes = others.gather_bytes
        self.all_gather = others.all_gather
        self.reduce_scatter = others.reduce_scatter
        self.all_to_all = others.all_to_all
        self.exchange_rows = others.exchange_rows
        self.others = others
        self.memory = memory
        self._limits = limits
        self._stream: torch.cuda.Stream | None = None  # of the operation before

    def all_reduce(self, x: Tensor) -> Tensor:
        summed = x.contiguous()
        two_shots = self._takes_two_shots(summed)
        is_small = summed.nbytes <= max(self._limits.one_shot, self._limits.two_shots)
        if not is_small or x.dtype not in SUM_DTYPES or not self._has_room(summed, two_shots):
            return self.others.all_reduce(summed)
        self._follow()
        return sum_over_ranks(summed, self.memory, two_shots=two_shots)

    def fits(self, x: Tensor) -> bool:
        return (
            x.nbytes <= self._limits.norm
            and x.is_contiguous()
            and fits_norm(x)
            and x.dtype in SUM_DTYPES
            and self._has_room(x, self._takes_two_shots(x), has_norm=True)
        )

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        self._follow()
        two_shots = self._takes_two_shots(x)
        return sum_add_norm(x, residual.contiguous(), weight, eps, self.memory, two_shots=two_shots)

    def close(self) -> None:
        self.others.close()

    def check(self) -> None:
        """Compile, and compare first sums with what they must be. Raises WorkerError."""
        size, index = self.rank.size, self.rank.index
        ways = (False, True) if self._limits.two_shots > 0 else (False,)
        sums = []
        for (numel, dtype), two_shots in itertools.product(_FIRST_SUMS, ways):
            x = torch.full((numel,), index + 1, dtype=dtype, device=self.memory.count.device)
            sums.append(sum_over_ranks(x, self.memory, two_shots=two_shots))
        self.others.wait_queued("its first sums through peer memory")
        found = {value for one in sums for value in one.tolist()}
        if found != {size * (size + 1) // 2}:
            raise WorkerError(
                f"rank {index} of {size}: the first sums through peer memory are {sorted(found)}"
            )

    def describe(self) -> str:
        """For the log."""
        limits = self._limits
        measured = "measured" if limits.is_measured else "not measured on this GPU"
        return (
            f"sums of up to {max(limits.one_shot, limits.two_shots) / 2**20:g} MiB go through peer"
            f" memory ({measured}), larger ones through NCCL"
        )

    def _takes_two_shots(self, x: Tensor) -> bool:
        return x.nbytes > self._limits.one_shot

    def _has_room(self, x: Tensor, two_shots: bool, *, has_norm: bool = False) -> bool:
        size = self.rank.size
        needed = needed_bytes(x, size, two_shots=two_shots, has_norm=has_norm)
        return needed <= self.memory.slot_bytes

    def _follow(self) -> None:
        """Let the current stream wait for the operation before, if that is in another one.

        One recorded in a graph follows none that was not: steps do not overlap.
        """
        current, before = torch.cuda.current_stream(), self._stream
        self._stream = current
        if before is None or before == current:
            return
        if _is_capturing(before) == _is_capturing(current):
            current.wait_stream(before)


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def open_peer_ranks(others: NcclRanks, device: torch.device) -> Comm:
    """`others`, with sums through peer memory where the GPUs allow it; says which in the log.

    Every rank calls it at the same time. Raises WorkerError if a rank dies or sums wrongly.
    """
    limits = limits_of(torch.cuda.get_device_name(device), others.rank.size)
    memory, why_not = _map_memories(others, device)
    if memory is None:
        logger.warning("rank %d: NCCL sums alone: %s", others.rank.index, why_not)
        return others
    ranks = PeerRanks(others, memory, limits)
    ranks.check()
    logger.info("rank %d: %s", others.rank.index, ranks.describe())
    return ranks


class _Offer(msgspec.Struct, frozen=True, kw_only=True):
    memory: DeviceOffer | None
    why_not: str = ""


def _map_memories(comm: Comm, device: torch.device) -> tuple[PeerMemory | None, str]:
    """The memory of all ranks; or None and why, which is the same decision on every rank."""
    num_words = (SIGNAL_BYTES + NUM_SLOTS * SLOT_BYTES) // 8
    mine = torch.zeros(num_words, dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)
    try:
        offer = _Offer(memory=offer_tensor(mine))
    except RuntimeError as error:
        offer = _Offer(memory=None, why_not=f"memory cannot be offered: {error}")
    offers = _exchange(comm, offer)
    if (why_not := _first_reason(offers)) is not None:
        return None, why_not
    memories, why_not = [], ""
    try:
        for index, one in enumerate(offers):
            assert one.memory is not None, "there was no reason not to"
            is_own = index == comm.rank.index
            memories.append(mine if is_own else map_tensor(one.memory, mine))
    except RuntimeError as error:
        why_not = f"memory of another GPU cannot be mapped: {error}"
    found = _exchange(comm, _Offer(memory=None, why_not=why_not))
    reason = _first_reason(found)
    if reason is not None:
        return None, reason
    return PeerMemory.of(comm.rank.index, memories), ""


def _exchange(comm: Comm, offer: _Offer) -> list[_Offer]:
    encoded = comm.gather_bytes(msgspec.msgpack.encode(offer), BUILD_PATIENCE_S)
    return [msgspec.msgpack.decode(data, type=_Offer) for data in encoded]


def _first_reason(offers: Sequence[_Offer]) -> str | None:
    reasons = (f"rank {i}: {one.why_not}" for i, one in enumerate(offers) if one.why_not)
    return next(reasons, None)
