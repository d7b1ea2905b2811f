"""Tracks block ownership during a KV handoff, while a prompt moves between two workers.

    prefill side, `OutgoingHandoffs`   start .. advance ........... add ................... release
    decode side,  `IncomingHandoffs`      reserve ......... begin_write, end_write, ..., commit
                                          |<----------- lease, renewed ----------->|

Exports the names of both sides; has no code of its own.
"""

from engine.kv.transfer.incoming import (
    BlockWrite,
    DecodeScheduler,
    IncomingHandoffs,
    IncomingStatistics,
    JoiningRank,
)
from engine.kv.transfer.outgoing import (
    HandoffDropped,
    HandoffProgress,
    HandoffReady,
    HandoffRetracted,
    HandoffStarted,
    OutgoingEvent,
    OutgoingHandoffs,
    OutgoingOfRanks,
)

__all__ = [
    "BlockWrite",
    "DecodeScheduler",
    "HandoffDropped",
    "HandoffProgress",
    "HandoffReady",
    "HandoffRetracted",
    "HandoffStarted",
    "IncomingHandoffs",
    "IncomingStatistics",
    "JoiningRank",
    "OutgoingEvent",
    "OutgoingHandoffs",
    "OutgoingOfRanks",
]
