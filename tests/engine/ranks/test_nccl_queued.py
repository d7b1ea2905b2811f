"""Operations that torch queues in the current stream itself give back no work to wait for."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.ranks.comm import NcclRanks
from engine.ranks.rank import Rank

CPU = torch.device("cpu")


class _Options:
    _timeout: timedelta

    def __init__(self, *, is_high_priority_stream: bool) -> None: ...


class _QueuedGroup:
    """Stands for NCCL's group with `asyncOp` false: every operation returns None."""

    Options = _Options

    def __init__(self, *given: object) -> None:
        self.options = given[-1]

    def allreduce(self, *_: object) -> None: ...

    def _allgather_base(self, *_: object) -> None: ...

    def _reduce_scatter_base(self, *_: object) -> None: ...

    def alltoall_base(
        self, to: Tensor, x: Tensor, received: list[int], sent: list[int], options: Any
    ) -> None:
        assert not options.asyncOp, "in a stream of the group's own"
        assert sum(received or [len(to)]) == len(to), f"{received} of {len(to)}"
        assert sum(sent or [len(x)]) == len(x), f"{sent} of {len(x)}"


def test_nccls_watchdog_never_comes_before_a_deadline_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would take a gang that was stopped and goes on for one that hangs."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", _QueuedGroup, raising=False)
    nothing: Any = None
    ranks = NcclRanks(Rank(0, 2), nothing, nothing, CPU, timeout_s=60.0)
    assert ranks._group.options._timeout > timedelta(days=99)


def test_no_operation_waits_for_work_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", _QueuedGroup, raising=False)
    nothing: Any = None
    ranks = NcclRanks(Rank(0, 2), nothing, nothing, CPU, 1.0)
    x = torch.zeros(6, 3)
    assert ranks.all_reduce(x).shape == (6, 3)
    assert ranks.all_gather(x).shape == (12, 3)
    assert ranks.reduce_scatter(x).shape == (3, 3)
    assert ranks.all_to_all(x).shape == (6, 3)
    assert ranks.exchange_rows(x, sent=[2, 4], received=[5, 0]).shape == (5, 3)
