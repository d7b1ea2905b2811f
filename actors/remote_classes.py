"""The classes of the actors that the supervisor creates, in the form Ray starts.

Ray pickles a decorated class by value, which fails for a module with a module-level encoder. So the
classes are plain and importable, and are wrapped only here.
"""

from typing import Any

import ray
from ray.actor import ActorClass

from actors.kv_transfer.rendezvous import Rendezvous
from actors.laps_allocator import LapsAllocator
from actors.tokenizer_batcher import TokenizerBatcher
from actors.workers import DecodeWorker, PrefillWorker, UnifiedWorker
from engine.messages import Role

TokenizerBatcherCls: ActorClass[Any] = ray.remote(TokenizerBatcher)
LapsAllocatorCls: ActorClass[Any] = ray.remote(LapsAllocator)
RendezvousCls: ActorClass[Any] = ray.remote(Rendezvous)
WORKERS: dict[Role, ActorClass[Any]] = {
    "prefill": ray.remote(PrefillWorker),
    "decode": ray.remote(DecodeWorker),
    "unified": ray.remote(UnifiedWorker),
}
