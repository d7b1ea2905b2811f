"""How ranks meet: by a file that nobody else finds, and that ends with rank 0."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.errors import WorkerError
from engine.ranks.board import open_board
from engine.ranks.meeting import join_ranks
from engine.ranks.rank import Rank

CPU = torch.device("cpu")
NOBODY = 65534
JOIN = """
import sys, torch
from engine.ranks.meeting import join_ranks
from engine.ranks.rank import Rank
comm = join_ranks(Rank(1, 2), sys.argv[1], "a", torch.device("cpu"), start_s=60, timeout_s=60)
print(comm.gather_bytes(b"one"))
"""


def test_two_processes_meet_and_nothing_of_it_listens() -> None:
    board = open_board()
    before = listening()
    with subprocess.Popen(
        [sys.executable, "-c", JOIN, board], stdout=subprocess.PIPE, text=True
    ) as other:
        comm = join_ranks(Rank(0, 2), board, "a", CPU, start_s=60, timeout_s=60)
        assert len(listening() - before) <= 1  # gloo's connections to the other rank
        assert comm.gather_bytes(b"zero") == [b"zero", b"one"]
        said, _ = other.communicate(timeout=60)
        comm.close()
    assert said == "[b'zero', b'one']\n"


def listening() -> set[str]:
    """TCP sockets on which this process listens, by inode."""
    links = Path("/proc/self/fd").iterdir()
    own = {os.readlink(link) for link in links if link.exists()}
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {line[9] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own}


def test_ranks_of_another_incarnation_are_not_met() -> None:
    board = open_board()
    with pytest.raises(WorkerError, match="not all ranks were here"):
        join_ranks(Rank(1, 2), board, "b", CPU, start_s=0.05, timeout_s=1)
    with pytest.raises(WorkerError, match="not all ranks were here"):
        join_ranks(Rank(0, 2), board, "a", CPU, start_s=0.05, timeout_s=1)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_come_in() -> None:
    board = open_board()
    opening = ["/bin/sh", "-c", 'exec 3<>"$0"', board]
    assert subprocess.run(opening, check=False).returncode == 0
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    theirs = subprocess.run(opening, capture_output=True, text=True, check=False, **user)
    assert theirs.returncode != 0
    assert "Permission denied" in theirs.stderr
