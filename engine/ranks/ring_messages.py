"""What rank 0 and the other ranks of a worker send each other by the ring, and its encoding.

Orders go from the leader, rank 0, to all followers; reports from a follower to the leader. Knows
nothing of who sends them when (leading.py, following.py, rank_tasks.py).
"""

import hashlib
from collections.abc import Iterator
from typing import Literal

import msgspec

from engine.plan import StepPlan, StepResult
from engine.ranks.plan_ring import MAX_REPORT_BYTES
from engine.request import Constraint

# ---- orders --------------------------------------------------------------------------------------

# Of a task: heads between workers; blocks to host memory, and from there.
TaskKind = Literal["heads", "host save", "host load"]


class LaunchStep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leader -> followers: launch this plan next."""

    plan: StepPlan
    is_compared: bool


class LaunchPass(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leader -> followers: launch this pass of the model that drafts next."""

    plan: StepPlan


class GiveDrafts(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leader -> followers: what the last pass drew is this draft of its rows."""

    place: int


class Compile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leader -> followers: compile this constraint, which a plan will bring."""

    constraint: Constraint


class RankTask(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leader -> followers: do this beside the steps (rank_tasks.py)."""

    number: int
    work: bytes
    kind: TaskKind = "heads"
    num_ended: int = 0  # begin it when so many steps, of those launched, have ended here


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leader -> followers: this is the last order."""


# ---- reports -------------------------------------------------------------------------------------


class StepDigest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Follower -> leader: `step_digest` of a compared step."""

    step: int
    digest: bytes


class ResultPart(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Follower -> leader: the next part of its encoded result of a step with DP attention."""

    step: int  # of the plan of all ranks
    is_draft: bool  # a pass of a model that drafts, which has numbers of its own
    data: bytes
    goes_on: bool


class TaskAnswer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Follower -> leader: the next part of a task's answer, or why there is none."""

    number: int
    data: bytes
    goes_on: bool
    error: str = ""


class RankFailure(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Follower -> leader: why this rank ends."""

    reason: str
    is_config: bool  # a configuration that cannot be used: another try would end alike


_PART_BYTES = MAX_REPORT_BYTES - 64  # beside the rest of a report that has a part


def split_report(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """(part, whether another follows): at least one part, each small enough for a report."""
    for start in range(0, max(1, len(data)), _PART_BYTES):
        end = start + _PART_BYTES
        yield data[start:end], end < len(data)


# ---- encoding ------------------------------------------------------------------------------------

Order = LaunchStep | LaunchPass | GiveDrafts | Compile | RankTask | Stop
Report = StepDigest | ResultPart | TaskAnswer | RankFailure

_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(Order)
_reports = msgspec.msgpack.Decoder(Report)
_results = msgspec.msgpack.Decoder(StepResult)


def encode(message: Order | Report | StepResult) -> bytes:
    return _encoder.encode(message)


def decode_order(data: bytes) -> Order:
    order: Order = _orders.decode(data)
    return order


def decode_report(data: bytes) -> Report:
    """Raises msgspec.DecodeError, of which ValidationError is a kind."""
    report: Report = _reports.decode(data)
    return report


def decode_result(data: bytes) -> StepResult:
    """The result whose encoding all its `ResultPart`s make together."""
    return _results.decode(data)


def step_digest(launch: bytes, result: StepResult) -> bytes:
    """A digest of a `LaunchStep` as it was sent, and of the tokens that came of it."""
    drawn = _encoder.encode((result.tokens, result.is_finite))
    return hashlib.blake2b(drawn, key=hashlib.blake2b(launch).digest(), digest_size=16).digest()
