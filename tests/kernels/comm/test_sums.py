"""Sums over ranks: their arithmetic and places under the interpreter; compiled for another GPU."""

import random

import pytest
import torch

from kernels.comm import gather_stream, packets, share_stream, shares, signals, stream, sums
from kernels.comm.packets import sum_by_packets_add_norm
from kernels.comm.peer_memory import PeerMemory, grid_of
from kernels.comm.share_stream import share_stream_add_norm
from kernels.comm.shares import gather_shares, scatter_sum
from kernels.comm.signals import DATA_BEGINS, MAX_BLOCKS
from kernels.comm.stream import stream_add_norm
from kernels.comm.sums import sum_add_norm, sum_over_ranks
from kernels.device import DeviceProperties
from tests.harness.seeds import seed_of
from tests.kernels.cross_compile import compiled_for
from tests.kernels.interpreter import run_interpreted

CHECKS = "tests.kernels.comm.interpreted"
SEED = str(seed_of(__name__))
H200 = DeviceProperties(
    name="NVIDIA H200",
    capability=(9, 0),
    memory_bytes=141 * 2**30,
    num_sms=132,
    shared_memory_per_block_bytes=227 * 1024,
)


def test_every_rank_has_the_sum_in_rank_order() -> None:
    run_interpreted(f"{CHECKS}:check_sums", SEED, random.choice(("2", "4")))


def test_residual_and_norm_follow_the_sum() -> None:
    run_interpreted(f"{CHECKS}:check_norms", SEED, random.choice(("2", "4")))


def test_a_stream_of_pieces_is_added_while_others_come() -> None:
    run_interpreted(f"{CHECKS}:check_stream", SEED, random.choice(("2", "4")))


def test_shares_are_gathered_and_sums_scattered() -> None:
    run_interpreted(f"{CHECKS}:check_shares", SEED, random.choice(("2", "4", "8")))


def test_packets_are_added_and_taken_away() -> None:
    run_interpreted(f"{CHECKS}:check_packets", SEED, random.choice(("2", "4")))


@pytest.mark.parametrize("two_shots", [False, True])
def test_it_compiles_for_an_h200(two_shots: bool) -> None:
    memories = tuple(torch.zeros((DATA_BEGINS + 2**22) // 8, dtype=torch.int64) for _ in range(4))
    count = torch.zeros(MAX_BLOCKS, dtype=torch.int64)
    memory = PeerMemory(rank=1, memories=memories, count=count, max_blocks=H200.num_sms)
    x = torch.zeros(16, 5120, dtype=torch.bfloat16)
    with compiled_for(
        H200, packets, sums, shares, signals, stream, share_stream, gather_stream
    ) as shared_bytes:
        if not two_shots:
            sum_by_packets_add_norm(x, x.clone(), x[0], 1e-6, memory)
            gather_shares(x, memory)
            scatter_sum(x, memory)
            stream_add_norm(x, x.clone(), x[0], 1e-6, memory)
            gather_stream.gather_stream(x, memory)
            share_stream_add_norm(x, x[:4].clone(), x[0], 1e-6, memory)
        sum_over_ranks(x, memory, two_shots=two_shots)
        sum_add_norm(x, x.clone(), x[0], 1e-6, memory, two_shots=two_shots)
    assert shared_bytes


def test_a_grid_shares_rows_out_evenly_among_no_more_blocks_than_run_at_once() -> None:
    for num_rows in (1, 131, 132, 133, 256, 2048):
        grid = grid_of(num_rows, 132)
        assert grid <= 132
        assert -(-num_rows // grid) == -(-num_rows // 132)
