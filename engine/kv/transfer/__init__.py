"""Tracks block ownership during a KV handoff, while a prompt moves between two workers.

    prefill side, `OutgoingHandoffs`   start .. advance ........... add ................... release
    decode side,  `IncomingHandoffs`      reserve ......... begin_write, end_write, ..., commit
                                          |<----------- lease, renewed ----------->|

Exports the names of both sides; has no code of its own.
"""

from engine.kv.cache import BlockTerms
from engine.kv.transfer.incoming import BlockWrite, IncomingHandoffs, IncomingStatistics
from engine.kv.transfer.outgoing import (
    HandoffDropped,
    HandoffProgress,
    HandoffReady,
    HandoffRetracted,
    HandoffStarted,
    OutgoingEvent,
    OutgoingHandoffs,
)

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
