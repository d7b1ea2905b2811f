"""The limit of the queue: the configuration's number, or the sum of what workers report."""

from actors.ingress.queue_limit import QueueLimit
from engine.kv.layout import KvLayout
from engine.messages import Role, Topology, WorkerIdentity, WorkerLimits, WorkerStatus

STARTING = WorkerStatus(identity=None, state="starting")


def _ready(name: str, role: Role, max_queued_tokens: int) -> WorkerStatus:
    layout = KvLayout.with_heads(
        num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32"
    )
    identity = WorkerIdentity(
        name=name,
        incarnation="one",
        role=role,
        model="m",
        layout=layout,
        max_model_len=99,
        pid=1,
        limits=WorkerLimits(max_step_ms=30.0, max_queued_tokens=max_queued_tokens),
    )
    return WorkerStatus(identity=identity, state="ready")


def _topology(**workers: WorkerStatus) -> Topology:
    roles: dict[str, Role] = {n: "decode" if n.startswith("d") else "prefill" for n in workers}
    return Topology(workers=workers, roles=roles, batchers=[], allocator="a")


def test_a_number_stays_whatever_workers_report() -> None:
    limit = QueueLimit(77)
    limit.update(_topology(p0=_ready("p0", "prefill", 5000)))
    assert limit.num_tokens == 77


def test_auto_is_the_sum_of_the_workers_that_prefill() -> None:
    limit = QueueLimit("auto")
    assert limit.num_tokens is None, "nobody can have a queue yet"
    first = _ready("p0", "prefill", 5000)
    limit.update(_topology(p0=first, p1=STARTING, d0=_ready("d0", "decode", 900)))
    assert limit.num_tokens == 5000
    limit.update(_topology(p0=first, p1=_ready("p1", "prefill", 2500)))
    assert limit.num_tokens == 7500
    limit.update(_topology(p0=STARTING, p1=_ready("p1", "prefill", 2600)))
    assert limit.num_tokens == 7600, "a worker that restarts counts with what it reported last"
    limit.update(_topology(p1=_ready("p1", "prefill", 2600)))
    assert limit.num_tokens == 2600
