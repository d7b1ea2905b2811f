"""All ranks are stopped while NCCL has an operation of theirs, and go on: nobody ends them."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine.layers.context import Comm
from engine.ranks.meeting import connect_ranks
from tests.harness.gpu_ranks import GPU_RANKS
from tests.harness.rank_processes import RankProcesses

pytestmark = pytest.mark.multi_gpu

TIMEOUT_S = 6.0  # of everything between the ranks; NCCL takes seconds to connect
STOPPED_S = 1.5 * TIMEOUT_S
AGAIN_S = 20.0  # NCCL's watchdog would keep the next operation waiting for 60 s
NUM_CYCLES = 4_000_000_000  # two seconds and more: the sum has not ended when they are stopped
NUM_ROUNDS = 5


@pytest.fixture(params=GPU_RANKS)
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RankProcesses]:
    with RankProcesses(request.param, tmp_path, "cuda") as started:
        yield started


def _stop_all(pids: list[int]) -> "subprocess.Popen[bytes]":
    them = " ".join(map(str, pids))
    script = f"kill -STOP {them}; sleep {STOPPED_S}; kill -CONT {them}"
    return subprocess.Popen(["sh", "-c", script])


def _sum_while_stopped(comm: Comm, path: str) -> tuple[set[float], float]:
    """The numbers of all sums, and how long those took that were queued afterwards."""
    device = torch.device("cuda", comm.rank.index)
    store = dist.FileStore(path, comm.rank.size)
    group = connect_ranks(comm.rank, store, device, TIMEOUT_S, uses_peer_memory=False)
    pids = [int(pid) for pid in comm.gather_bytes(str(os.getpid()).encode())]
    torch.cuda._sleep(NUM_CYCLES)
    sums = [group.all_reduce(torch.ones(2**20, device=device))]
    comm.gather_bytes(b"queued")
    stopping = _stop_all(pids) if comm.rank.index == 0 else None
    torch.cuda.synchronize()
    if stopping is not None:
        assert stopping.wait(10 * STOPPED_S) == 0
    comm.gather_bytes(b"went on")
    began_s = time.monotonic()
    for _ in range(NUM_ROUNDS):
        time.sleep(0.2)  # the watchdog looks ten times a second
        sums.append(group.all_reduce(torch.ones(2**20, device=device)))
    torch.cuda.synchronize()
    took_s = time.monotonic() - began_s
    found = {number for one in sums for number in one.unique().tolist()}
    group.close()
    return found, took_s


def test_sums_go_on_after_all_ranks_were_stopped(ranks: RankProcesses, tmp_path: Path) -> None:
    for found, took_s in ranks.run(_sum_while_stopped, str(tmp_path / "stopped")):
        assert found == {float(ranks.comm.rank.size)}
        assert took_s < AGAIN_S
