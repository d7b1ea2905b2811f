"""`Comm` between GPUs that map each other's memory: our sums where they are fast, NCCL elsewhere.

Each rank allocates one piece of memory, once, and maps the others' by CUDA IPC handles, which the
ranks tell each other through host memory. All ranks decide alike, by a tensor's size: which of the
two computes a sum, and whether peer memory is used at all.

Operations have an order, the same on every rank; one queued in another stream than the one before
waits for that. Two at once could use one slot, or keep each other from the multiprocessors, on one
rank this and on another rank that one. Multicast is never used.
"""

import logging
from collections.abc import Sequence
from enum import Enum

import msgspec
import torch
from torch import Tensor

from engine.errors import WorkerError
from engine.kv.device_offer import DeviceOffer, map_tensor, offer_tensor
from engine.layers.context import Comm, FusedSums
from engine.ranks.agreement import BUILD_PATIENCE_S
from engine.ranks.comm import NcclRanks
from engine.ranks.rank import Rank
from kernels.comm.gather_stream import fits_gather_stream, gather_stream
from kernels.comm.limits import SumLimits, limits_of
from kernels.comm.packets import fits_packets, sum_by_packets, sum_by_packets_add_norm
from kernels.comm.peer_memory import SUM_DTYPES, PeerMemory, fits_norm
from kernels.comm.share_stream import fits_share_stream, share_stream_add_norm
from kernels.comm.shares import gather_shares, scatter_sum
from kernels.comm.signals import DATA_BEGINS, NUM_SLOTS
from kernels.comm.stream import fits_stream, stream_add_norm
from kernels.comm.sums import needed_bytes, sum_add_norm, sum_over_ranks

logger = logging.getLogger(__name__)

SLOT_BYTES = 64 * 2**20  # a slot; there are NUM_SLOTS
# The first sums: of numbers whose end cuts a vector, or does not.
_FIRST_SUMS = (
    (33, torch.int32),
    (33, torch.float32),
    (4096, torch.float32),
    (4096, torch.bfloat16),
)


class _Way(Enum):
    """How a sum goes through peer memory."""

    PACKETS = "each number says that it is new"
    ONE_SHOT = "everybody to everybody, one barrier"
    TWO_SHOTS = "to the owner of a row and back, two barriers"
    STREAM = "everybody to everybody, in pieces"


class PeerRanks:
    """Not thread-safe. Operations run in the stream that is current when they are called."""

    def __init__(self, others: NcclRanks, memory: PeerMemory, limits: SumLimits) -> None:
        """others: for what is larger than `limits`, and for exchanges between pairs of ranks."""
        self.rank: Rank = others.rank
        self.fused_sums: FusedSums | None = self
        self.gather_bytes = others.gather_bytes
        self.others = others
        self.memory = memory
        self.limits = limits  # may be set between steps, on all ranks alike
        self._compiled: set[tuple[object, ...]] = set()  # kinds of lines
        self._stream: torch.cuda.Stream | None = None  # of the operation before

    def all_reduce(self, x: Tensor) -> Tensor:
        self._follow()
        summed = x.contiguous()
        match self._way(summed):
            case None:
                return self.others.all_reduce(summed)
            case _Way.PACKETS:
                return sum_by_packets(summed, self.memory)
            case way:
                two_shots = way is _Way.TWO_SHOTS
                return sum_over_ranks(summed, self.memory, two_shots=two_shots)

    def all_gather(self, x: Tensor) -> Tensor:
        self._follow()
        num_bytes = x.nbytes * self.rank.size
        if self._shares(x, num_bytes):
            return gather_shares(x.contiguous(), self.memory)
        if num_bytes <= self.limits.gather_stream and fits_gather_stream(x, self.memory):
            return gather_stream(x, self.memory)
        return self.others.all_gather(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self._follow()
        if not self._shares(x, x.nbytes):
            return self.others.reduce_scatter(x)
        return scatter_sum(x.contiguous(), self.memory)

    def all_to_all(self, x: Tensor) -> Tensor:
        self._follow()
        return self.others.all_to_all(x)

    def exchange_rows(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        self._follow()
        return self.others.exchange_rows(x, sent, received)

    def fits(self, x: Tensor) -> bool:
        is_line = x.is_contiguous() and fits_norm(x)
        return is_line and self._way_of_norm(x) is not None

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        self._follow()
        self._compile_norms(x, weight, eps)
        given = x, residual.contiguous(), weight, eps, self.memory
        match self._way_of_norm(x):
            case _Way.PACKETS:
                return sum_by_packets_add_norm(*given)
            case _Way.STREAM:
                return stream_add_norm(*given)
            case way:
                return sum_add_norm(*given, two_shots=way is _Way.TWO_SHOTS)

    def fits_share(self, x: Tensor) -> bool:
        is_line = x.is_contiguous() and fits_norm(x)
        is_long = not self._shares(x, x.nbytes) and x.nbytes <= self.limits.share_stream
        return is_line and is_long and fits_share_stream(x, self.memory)

    def share_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        self._follow()
        return share_stream_add_norm(x, residual.contiguous(), weight, eps, self.memory)

    def _compile_norms(self, like: Tensor, weight: Tensor, eps: float) -> None:
        """All ways at the first line of a kind: the next one may be a request's, and late."""
        kind = like.shape[1], like.dtype, weight.dtype, eps
        if kind in self._compiled:
            return
        self._compiled.add(kind)
        x, residual = (torch.zeros_like(like[:1]) for _ in range(2))
        given = x, residual, weight, eps, self.memory
        for two_shots in (False, True):
            sum_add_norm(*given, two_shots=two_shots)
        if self.limits.stream:
            stream_add_norm(*given)
        if fits_packets(x, self.rank.size):
            sum_by_packets_add_norm(*given)

    def close(self) -> None:
        self.others.close()

    def check(self) -> None:
        """Compile, and compare first sums with what they must be. Raises WorkerError."""
        size, index = self.rank.size, self.rank.index
        sums = []
        for numel, dtype in _FIRST_SUMS:
            x = torch.full((numel,), index + 1, dtype=dtype, device=self.memory.count.device)
            sums.append(sum_over_ranks(x.clone(), self.memory))
            if dtype is torch.bfloat16:
                sums.append(sum_over_ranks(x.clone(), self.memory, two_shots=True))
                sums.append(sum_by_packets(x, self.memory))
        self.others.wait_queued("its first sums through peer memory")
        found = {value for one in sums for value in one.tolist()}
        if found != {size * (size + 1) // 2}:
            raise WorkerError(
                f"rank {index} of {size}: the first sums through peer memory are {sorted(found)}"
            )

    def describe(self) -> str:
        """For the log."""
        limits = self.limits
        measured = "measured" if limits.is_measured else "not measured on this GPU"
        return (
            f"sums of up to {limits.plain / 2**20:g} MiB ({measured}), with a norm of up to"
            f" {max(limits.norm, limits.stream) / 2**20:g}, go through peer memory, larger ones"
            " through NCCL"
        )

    def _shares(self, x: Tensor, num_bytes: int) -> bool:
        """num_bytes: of all ranks' shares together."""
        limit = min(self.limits.shares, self.memory.slot_bytes)
        return num_bytes <= limit and x.dtype in SUM_DTYPES

    def _way(self, x: Tensor, *, has_norm: bool = False) -> _Way | None:
        """Of a sum in packets or shots; None = through NCCL."""
        limits, size = self.limits, self.rank.size
        if x.nbytes > (limits.norm if has_norm else limits.plain) or x.dtype not in SUM_DTYPES:
            return None
        if x.nbytes <= limits.packets and fits_packets(x, size):
            return _Way.PACKETS
        way = _Way.ONE_SHOT if x.nbytes <= limits.one_shot else _Way.TWO_SHOTS
        two_shots = way is _Way.TWO_SHOTS
        needed = needed_bytes(x, size, two_shots=two_shots, has_norm=has_norm)
        return way if needed <= self.memory.slot_bytes else None

    def _way_of_norm(self, x: Tensor) -> _Way | None:
        """Of a sum with residual and norm; None = they are apart."""
        way = self._way(x, has_norm=True)
        streams = way is None and x.nbytes <= self.limits.stream and fits_stream(x, self.memory)
        return _Way.STREAM if streams else way

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
    gpu: str = ""  # its name and size, by which ways and grids are chosen


def _map_memories(comm: Comm, device: torch.device) -> tuple[PeerMemory | None, str]:
    """The memory of all ranks; or None and why, which is the same decision on every rank."""
    num_words = (DATA_BEGINS + NUM_SLOTS * SLOT_BYTES) // 8
    mine = torch.zeros(num_words, dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)
    try:
        offer = _Offer(memory=offer_tensor(mine), gpu=_kind_of(device))
    except RuntimeError as error:
        offer = _Offer(memory=None, why_not=f"memory cannot be offered: {error}")
    offers = _exchange(comm, offer)
    if (reason := _first_reason(offers) or _unlike(offers)) is not None:
        return None, reason
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


def _kind_of(device: torch.device) -> str:
    found = torch.cuda.get_device_properties(device)
    return f"{found.name} of {found.multi_processor_count} multiprocessors"


def _unlike(offers: Sequence[_Offer]) -> str | None:
    """Why ranks would choose other grids: blocks wait for those of their own number alone."""
    kinds = sorted({one.gpu for one in offers})
    return None if len(kinds) == 1 else f"the GPUs are not alike: {', '.join(kinds)}"


def _first_reason(offers: Sequence[_Offer]) -> str | None:
    reasons = (f"rank {i}: {one.why_not}" for i, one in enumerate(offers) if one.why_not)
    return next(reasons, None)
