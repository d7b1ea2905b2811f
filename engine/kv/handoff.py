"""The books of a KV handoff: who holds which blocks while a prompt moves from worker P to worker D.

    P, `OutgoingHandoffs`   start .. advance ........... add ..................... release
    D, `IncomingHandoffs`      reserve ......... begin_write, end_write, ..., commit
                               |<----------- lease, renewed ----------->|

One import for both sides; knows nothing of its own.
"""

from engine.kv.block_cache import BlockTerms
from engine.kv.handoff_incoming import IncomingHandoffs, IncomingStatistics
from engine.kv.handoff_outgoing import (
    HandoffDropped,
    HandoffProgress,
    HandoffReady,
    HandoffRetracted,
    HandoffStarted,
    OutgoingEvent,
    OutgoingHandoffs,
)
from engine.kv.incoming_transfer import BlockWrite

__all__ = [
    "BlockTerms",
    "BlockWrite",
    "HandoffDropped",
    "HandoffProgress",
    "HandoffReady",
    "HandoffRetracted",
    "HandoffStarted",
    "IncomingHandoffs",
    "IncomingStatistics",
    "OutgoingEvent",
    "OutgoingHandoffs",
]
