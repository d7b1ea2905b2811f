"""The books of a KV handoff: who holds which blocks while a prompt moves from worker P to worker D.

    P, `OutgoingHandoffs`   start ------ add --------------------------------------- release
    D, `IncomingHandoffs`      reserve ......... begin_write, end_write, ..., commit
                               |<----------- lease, renewed ----------->|

One import for both sides; knows nothing of its own.
"""

from engine.kv.handoff_incoming import BlockWrite, IncomingHandoffs, IncomingStatistics
from engine.kv.handoff_outgoing import (
    HandoffDropped,
    HandoffReady,
    HandoffStarted,
    OutgoingEvent,
    OutgoingHandoffs,
)

__all__ = [
    "BlockWrite",
    "HandoffDropped",
    "HandoffReady",
    "HandoffStarted",
    "IncomingHandoffs",
    "IncomingStatistics",
    "OutgoingEvent",
    "OutgoingHandoffs",
]
