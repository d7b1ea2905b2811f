"""A rank beside the first, in a process that is none of its own; the rest is in tests/cluster."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from actors.lifecycle.deployment import DeploymentSpec
from actors.lifecycle.threads import SWITCH_S
from actors.worker import rank_worker
from actors.worker.rank_worker import RankPlace, RankWorker
from configs.load import load_config
from engine.messages import encode


class _Idle:
    """Stands for what would run beside: a ring, a loader, a heartbeat."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.fixture
def kept_interval() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.usefixtures("kept_interval")
def test_a_rank_launches_steps_while_other_threads_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """What moves blocks beside the steps gives the interpreter away within a tenth of a ms."""
    nothing = {"set_up_logging": lambda level: None, "_exit": lambda code: None}
    idle = dict.fromkeys(("PlanRingReader", "EngineLoader", "Heartbeat"), _Idle)
    for name, stand_in in (nothing | idle).items():
        monkeypatch.setattr(rank_worker, name, stand_in)
    config = load_config(None, {"workers.unified": 1, "workers.tensor_parallel_size": 2})
    spec = DeploymentSpec(config=config, model="m", hash="h", block_key=bytes(32))
    place = RankPlace(
        worker="unified-0.h", role="unified", rank=1, size=2, incarnation="i", board="b"
    )
    sys.setswitchinterval(5e-3)
    RankWorker(spec, "unified-0.h-rank-1", encode(place))
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
