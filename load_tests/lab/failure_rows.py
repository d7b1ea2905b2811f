"""The rows of the failure matrix that need no GPU and no second machine: what to do to a system.

A row is done in each of its phases. Most are done from outside, by a signal to a process; the
others are faults on demand (configs/faults.py) of a deployment of their own.
"""

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from load_tests.lab.failure_stage import Ask, Phase, Stage
from load_tests.testbed.system import signal_process

Deed = Callable[[Stage, Ask], None]
EVERY_PHASE = (Phase.BEFORE, Phase.MOVE, Phase.STREAM)
FROZEN_S = 10.0  # longer than an ingress waits for a silent worker
SLOW_S = 10.0

# Two rows in the decode worker's batch, prompts that take many steps, and KV in many pieces.
TIGHT: Mapping[str, object] = {
    "workers.prefill": 2,
    "workers.decode": 1,
    "cache.block_size": 4,
    "cache.num_blocks": 1024,
    "scheduler.max_num_seqs": 2,
    "scheduler.max_num_batched_tokens": 8,
    "scheduler.unreserved_share": 0.001,
    "scheduler.short_share": 0.0,  # who holds a row gives way to nobody
    "handoff.piece_bytes": 1,
    "handoff.channel": "gloo_pair",
    "handoff.transfer_deadline_s": 5.0,
    "lifetimes.ingress_silence_s": 5.0,
}
ONE_EACH: Mapping[str, object] = {**TIGHT, "workers.prefill": 1}


def nothing(stage: Stage, ask: Ask) -> None:
    """The deployment does it by itself."""


def wait_only(stage: Stage, ask: Ask) -> None:
    """Once it is in its phase, time does the rest."""


def kill(role: str) -> Deed:
    """SIGKILL to the worker of that role that has the request."""

    def deed(stage: Stage, ask: Ask) -> None:
        stage.kill(stage.worker_of(role))

    return deed


def kill_service(prefix: str) -> Deed:
    """SIGKILL to the actor of that name."""

    def deed(stage: Stage, ask: Ask) -> None:
        stage.kill(stage.system.names(prefix)[0])

    return deed


def kill_ingress(stage: Stage, ask: Ask) -> None:
    stage.kill(stage.system.replicas()[0])


def kill_supervisor(stage: Stage, ask: Ask) -> None:
    stage.kill(stage.system.supervisors()[0])


def freeze(role: str) -> Deed:
    """SIGSTOP, and SIGCONT after a while, to the worker of that role that has the request."""

    def deed(stage: Stage, ask: Ask) -> None:
        name = stage.worker_of(role)
        pid = stage.system.send(name, signal.SIGSTOP)
        assert pid is not None, f"{name} is away"
        try:
            time.sleep(FROZEN_S)
        finally:
            signal_process(pid, signal.SIGCONT)

    return deed


def freeze_for_good(role: str) -> Deed:
    """SIGSTOP: whoever is to help must do it from outside."""

    def deed(stage: Stage, ask: Ask) -> None:
        stage.kill(stage.worker_of(role), signal.SIGSTOP)

    return deed


def leave(stage: Stage, ask: Ask) -> None:
    ask.leave()


def read_slowly(stage: Stage, ask: Ask) -> None:
    with ask.slow():
        time.sleep(SLOW_S)


def redeploy(stage: Stage, ask: Ask) -> None:
    blocks = stage.system.application.config.cache.num_blocks
    assert blocks is not None, "the table sets it"
    stage.system.redeploy({"cache.num_blocks": blocks - 1})


class Sees(Enum):
    """The worst that a client may see; a wrong token is never allowed."""

    WHOLE = "every token"
    ERROR = "an error in words"
    CUT = "a connection that breaks off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault. `number` is that of the matrix."""

    number: str
    fault: str
    how: str
    deed: Deed = nothing
    phases: tuple[Phase, ...] = EVERY_PHASE
    sees: Sees = Sees.WHOLE
    num_asks: int = 1  # at once, where the fault is one of load
    deployment: Mapping[str, object] = field(default_factory=lambda: TIGHT)


def by_fault(faults: str, base: Mapping[str, object] = TIGHT) -> Mapping[str, object]:
    return {**base, "debug": True, "faults": faults}


FROM_OUTSIDE = (
    Row(number="1, 2", fault="prefill worker dies", how="SIGKILL", deed=kill("prefill")),
    Row(number="4, 5", fault="decode worker dies", how="SIGKILL", deed=kill("decode")),
    Row(number="6", fault="client goes away", how="closes its connection", deed=leave),
    Row(
        number="12",
        fault="prefill worker freezes",
        how=f"SIGSTOP, SIGCONT after {FROZEN_S:g} s",
        deed=freeze("prefill"),
    ),
    Row(
        number="12",
        fault="decode worker freezes",
        how=f"SIGSTOP, SIGCONT after {FROZEN_S:g} s",
        deed=freeze("decode"),
    ),
    Row(number="14", fault="allocator dies", how="SIGKILL", deed=kill_service("allocator")),
    Row(number="15", fault="tokenizer dies", how="SIGKILL", deed=kill_service("tokenizer")),
    Row(number="17", fault="rendezvous dies", how="SIGKILL", deed=kill_service("rendezvous")),
    Row(number="-", fault="supervisor dies", how="SIGKILL", deed=kill_supervisor),
    Row(
        number="23",
        fault="slow reader",
        how=f"reads nothing for {SLOW_S:g} s",
        deed=read_slowly,
        phases=(Phase.STREAM,),
    ),
    Row(
        number="16",
        fault="ingress replica dies",
        how="SIGKILL",
        deed=kill_ingress,
        sees=Sees.CUT,
    ),
    Row(number="19", fault="redeploy", how="another config hash", deed=redeploy),
)

ON_DEMAND = (
    Row(
        number="12",
        fault="decode worker freezes for good",
        how="SIGSTOP, lifetimes.supervisor_silence_s: 20",
        deed=freeze_for_good("decode"),
        phases=(Phase.STREAM,),
        deployment={**TIGHT, "lifetimes.supervisor_silence_s": 20.0},
    ),
    Row(
        number="3",
        fault="a piece of KV is lost",
        how="prefill:piece=20:drop",
        phases=(Phase.MOVE,),
        deployment=by_fault("prefill:piece=20:drop", ONE_EACH),
    ),
    Row(
        number="3",
        fault="a piece of KV arrives with other bytes",
        how="prefill:piece=20:corrupt",
        phases=(Phase.MOVE,),
        deployment=by_fault("prefill:piece=20:corrupt", ONE_EACH),
    ),
    Row(
        number="3",
        fault="a piece of KV comes after the deadline",
        how="prefill:piece=20:delay=8",
        phases=(Phase.MOVE,),
        deployment=by_fault("prefill:piece=20:delay=8", ONE_EACH),
    ),
    Row(
        number="10",
        fault="NaN logits, prefill",
        how="prefill:step=80:nan",
        phases=(Phase.MOVE,),
        sees=Sees.ERROR,
        deployment=by_fault("prefill:step=80:nan", ONE_EACH),
    ),
    Row(
        number="10",
        fault="NaN logits, decode",
        how="decode:step=30:nan",
        phases=(Phase.STREAM,),
        sees=Sees.ERROR,
        deployment=by_fault("decode:step=30:nan", ONE_EACH),
    ),
    Row(
        number="11",
        fault="a step of the prefill worker raises",
        how="prefill-0:step=20:raise",
        phases=(Phase.MOVE,),
        deployment=by_fault("prefill-0:step=20:raise"),
    ),
    Row(
        number="11",
        fault="a step of the decode worker raises",
        how="decode:step=650:raise",
        phases=(Phase.STREAM,),
        deployment=by_fault("decode:step=650:raise"),
    ),
    Row(
        number="12",
        fault="a step of the prefill worker hangs",
        how="prefill-0:step=20:hang, workers.stall_s: 5",
        phases=(Phase.MOVE,),
        deployment={**by_fault("prefill-0:step=20:hang"), "workers.stall_s": 5.0},
    ),
    Row(
        number="12",
        fault="a step of the decode worker hangs",
        how="decode:step=650:hang, workers.stall_s: 5",
        phases=(Phase.STREAM,),
        deployment={**by_fault("decode:step=650:hang"), "workers.stall_s": 5.0},
    ),
    Row(
        number="13",
        fault="poison: workers die under it",
        how="prefill:step=20:die on both workers",
        phases=(Phase.MOVE,),
        sees=Sees.ERROR,
        deployment=by_fault("prefill:step=20:die"),
    ),
    Row(
        number="7",
        fault="no KV blocks left",
        how="cache.num_blocks: 300, 4 streams of 103 blocks",
        phases=(Phase.STREAM,),
        num_asks=4,
        deployment={**TIGHT, "cache.num_blocks": 300, "scheduler.max_num_seqs": 8},
    ),
    Row(
        number="8",
        fault="queue full",
        how="edge.max_queued_tokens: 20, 3 prompts at once",
        phases=(Phase.BEFORE,),
        sees=Sees.ERROR,
        num_asks=3,
        deployment={**TIGHT, "edge.max_queued_tokens": 20},
    ),
    Row(
        number="9",
        fault="deadline passes",
        how="edge.request_timeout_s: 2",
        deed=wait_only,
        phases=(Phase.BEFORE, Phase.STREAM),
        sees=Sees.ERROR,
        deployment={**TIGHT, "edge.request_timeout_s": 2.0},
    ),
    Row(
        number="9",
        fault="deadline passes",
        how="edge.request_timeout_s: 2, prefill:piece=20:delay=4",
        phases=(Phase.MOVE,),
        sees=Sees.ERROR,
        deployment={
            **by_fault("prefill:piece=20:delay=4", ONE_EACH),
            "edge.request_timeout_s": 2.0,
        },
    ),
    Row(
        number="21",
        fault="object store is short of room",
        how="handoff.max_in_flight_bytes: 1, 4 prompts at once",
        phases=(Phase.MOVE,),
        num_asks=4,
        deployment={**TIGHT, "handoff.channel": "object_store", "handoff.max_in_flight_bytes": 1},
    ),
)

NOT_RUN: Mapping[str, str] = {
    "11 CUDA error, XID": "needs a GPU; a step that raises takes the same way out",
    "18 head node dies": "needs Redis and several nodes",
    "19 node drain": "needs several nodes; a redeploy drains the same workers",
    "20 P and D differ": "two versions never meet in one deployment, whose hash is in every name;"
    " the refusal is tested between two workers in tests/actors",
    "22 duplicate request id": "clients cannot choose one: the ingress draws 128 random bits",
    "any, over cuda_ipc or nccl_pair": "needs GPUs; killed peers are tested there",
}
