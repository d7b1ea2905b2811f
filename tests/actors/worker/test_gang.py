"""What rank 0 says of ranks that do not come; the rest of a gang is in tests/cluster."""

import uuid

import pytest

from actors.lifecycle.deployment import DeploymentSpec
from actors.worker import gang as gang_module
from actors.worker.gang import Gang
from configs.load import load_config
from engine.ranks.plan_ring import PlanRing, RingError


class _Starting:
    def __init__(self, actor: object) -> None:
        pass

    def failure(self) -> None:
        return None


def test_ranks_that_do_not_start_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_module, "ActorStart", _Starting)
    monkeypatch.setattr(gang_module, "START_S", 0.0)
    monkeypatch.setattr(gang_module, "LOOK_AT_STARTS_S", 0.01)
    config = load_config(None, {"workers.unified": 1, "workers.tensor_parallel_size": 4})
    spec = DeploymentSpec(config=config, model="m", hash="h", block_key=bytes(32))
    gang = Gang(spec, "unified-0.h", "unified", "incarnation", lambda _: None, None)
    gang._actors = [object(), object(), object()]
    with (
        PlanRing(f"test-{uuid.uuid4().hex}", 3, 1.0) as ring,
        pytest.raises(RingError, match=r"ranks \[1, 2, 3\] did not start within 0 s"),
    ):
        gang._wait_connected(ring)
