"""Which operations go through peer memory and which through NCCL: by size and kind alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ranks import peer_ranks
from engine.ranks.peer_ranks import PeerRanks
from engine.ranks.rank import Rank
from kernels.comm.limits import SumLimits, limits_of, sequence_parallel_tokens
from kernels.comm.peer_memory import PeerMemory
from kernels.comm.signals import DATA_BEGINS, MAX_BLOCKS

LIMITS = SumLimits(packets=64, one_shot=1024, plain=4096, norm=2048, stream=2**18, shares=512)
SLOT_BYTES = 256 * 1024


class _Nccl:
    """Says what reached it."""

    rank = Rank(1, 2)
    gather_bytes = None

    def all_reduce(self, x: Tensor) -> Any:
        return "NCCL"

    all_gather = reduce_scatter = all_to_all = all_reduce


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> PeerRanks:
    def say(way: str) -> Any:
        return lambda *_, two_shots=False: "two shots" if two_shots else way

    monkeypatch.setattr(PeerRanks, "_follow", lambda _: None)
    for name in ("sum_over_ranks", "sum_add_norm"):
        monkeypatch.setattr(peer_ranks, name, say("one shot"))
    for name in ("sum_by_packets", "sum_by_packets_add_norm"):
        monkeypatch.setattr(peer_ranks, name, say("packets"))
    monkeypatch.setattr(peer_ranks, "stream_add_norm", say("stream"))
    monkeypatch.setattr(peer_ranks, "share_stream_add_norm", say("share stream"))
    monkeypatch.setattr(peer_ranks, "gather_stream", say("stream"))
    for name in ("gather_shares", "scatter_sum"):
        monkeypatch.setattr(peer_ranks, name, say("shares"))
    count = torch.zeros(MAX_BLOCKS, dtype=torch.int64)
    memory = PeerMemory(rank=1, memories=_memories(), count=count, max_blocks=4)
    nccl: Any = _Nccl()
    return PeerRanks(nccl, memory, LIMITS)


def _memories() -> tuple[Tensor, ...]:
    num_words = (DATA_BEGINS + 2 * SLOT_BYTES) // 8
    return tuple(torch.empty(num_words, dtype=torch.int64) for _ in range(2))


def _lines(num_bytes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(num_bytes // dtype.itemsize // 8, 8, dtype=dtype)


@pytest.mark.parametrize(
    ("num_bytes", "way"),
    [(64, "packets"), (80, "one shot"), (1024, "one shot"), (1040, "two shots"), (4112, "NCCL")],
)
def test_the_size_of_a_sum_says_how_it_is_taken(ranks: PeerRanks, num_bytes: int, way: str) -> None:
    found: Any = ranks.all_reduce(_lines(num_bytes))
    assert found == way


def test_packets_are_of_16_bits_and_sums_of_kinds_that_kernels_know(ranks: PeerRanks) -> None:
    found: list[Any] = [
        ranks.all_reduce(_lines(64, dtype))
        for dtype in (torch.float16, torch.float32, torch.int64, torch.float64, torch.uint8)
    ]
    assert found == ["packets", "one shot", "one shot", "NCCL", "NCCL"]


def test_a_sum_goes_with_its_norm_only_where_it_may(ranks: PeerRanks) -> None:
    assert ranks.fits(_lines(2**18))
    assert not ranks.fits(_lines(2**18 + 16)), "larger than the limit"
    assert not ranks.fits(_lines(1024).T), "no lines"
    assert not ranks.fits(torch.zeros(4, 9, dtype=torch.bfloat16)), "no whole vectors"
    weight = torch.ones(8, dtype=torch.bfloat16)
    ways = {64: "packets", 512: "one shot", 2048: "two shots", 2064: "stream", 2**18: "stream"}
    for num_bytes, way in ways.items():
        x = _lines(num_bytes)
        found: Any = ranks.add_norm(x, x, weight, 1e-6)
        assert found == way


def test_shares_of_a_sum_go_with_their_norm_only_where_they_may(ranks: PeerRanks) -> None:
    assert not ranks.fits_share(_lines(1024)), "in no stream unless the limit says so"
    ranks.limits = replace(LIMITS, share_stream=2**20)
    assert ranks.fits_share(_lines(2**20))
    assert not ranks.fits_share(_lines(512)), "so few are scattered at once"
    assert not ranks.fits_share(_lines(2**20 + 16)), "larger than the limit"
    assert not ranks.fits_share(_lines(1024).T), "no lines"
    x, weight = _lines(64), torch.ones(8, dtype=torch.bfloat16)
    found: Any = ranks.share_add_norm(x, x[:2], weight, 1e-6)
    assert found == "share stream"


def test_shares_count_together_and_exchanges_of_pairs_are_nccls(ranks: PeerRanks) -> None:
    found: list[Any] = [
        ranks.all_gather(_lines(256)),
        ranks.all_gather(_lines(272)),
        ranks.reduce_scatter(_lines(512)),
        ranks.reduce_scatter(_lines(528)),
        ranks.all_to_all(_lines(16)),
    ]
    assert found == ["shares", "NCCL", "shares", "NCCL", "NCCL"]
    ranks.limits = replace(LIMITS, gather_stream=1024)
    shares = [_lines(256), _lines(272), _lines(512), _lines(528), _lines(512).T]
    found = [ranks.all_gather(share) for share in shares]
    assert found == ["shares", "stream", "stream", "NCCL", "NCCL"]


def test_what_has_no_room_in_a_slot_goes_through_nccl(ranks: PeerRanks) -> None:
    ranks.limits = replace(LIMITS, plain=2**20, one_shot=2**20)
    found: list[Any] = [ranks.all_reduce(_lines(n)) for n in (SLOT_BYTES // 2, SLOT_BYTES)]
    assert found == ["one shot", "NCCL"]
    few = replace(ranks.memory, memories=tuple(m[: DATA_BEGINS // 8 + 16] for m in _memories()))
    ranks.memory = few
    assert not ranks.fits(_lines(4096)), "no room for the pieces of one block"


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_an_unknown_gpu_has_limits_that_say_so(num_ranks: int) -> None:
    assert not limits_of("NVIDIA Z9000", num_ranks).is_measured
    assert all(limits_of("NVIDIA H200", measured).is_measured for measured in (2, 4))


def test_a_step_is_sequence_parallel_from_as_many_tokens_as_were_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sequence_parallel_tokens("NVIDIA H200", 4, row_bytes=2 * 5120) == 4096
    assert sequence_parallel_tokens("NVIDIA H200", 2, row_bytes=2 * 5120) is None, "not measured"
    limits = {("NVIDIA Z9000", 4): replace(LIMITS, sequence_parallel=2**20)}
    monkeypatch.setattr("kernels.comm.limits._MEASURED", limits)
    assert sequence_parallel_tokens("NVIDIA Z9000", 4, row_bytes=2**10) == 2**10
    assert sequence_parallel_tokens("NVIDIA Z9000", 4, row_bytes=1000) == 1049
    assert sequence_parallel_tokens("NVIDIA Z9000", 2, row_bytes=1000) is None, "not measured"


def test_gpus_that_are_not_alike_map_no_memory() -> None:
    offers = [
        peer_ranks._Offer(memory=None, gpu=gpu)
        for gpu in ("H200 of 132 multiprocessors", "H100 PCIe of 114 multiprocessors")
    ]
    reason = peer_ranks._unlike(offers)
    assert reason is not None
    assert all(offer.gpu in reason for offer in offers)
    assert peer_ranks._unlike(offers[:1] * 2) is None
