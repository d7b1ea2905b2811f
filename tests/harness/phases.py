"""Where a request of a `VirtualSystem` is in its life, by what its workers hold."""

from enum import Enum
from typing import Any, NamedTuple

from engine.request import Request, RequestKey
from tests.harness.virtual_system import VirtualSystem

NUM_DECODED = 3  # tokens that make a request one that decodes


class Phase(Enum):
    QUEUED = "queued"  # nothing of its prompt is computed
    PREFILL = "prefill"  # some of it is
    IN_LINE = "in line"  # all of it is, and no decode worker has room
    HANDOFF = "handoff"  # there is room, and its KV is on the way
    DECODING = "decoding"  # with some tokens


class Place(NamedTuple):
    phase: Phase
    worker: str  # that holds it; in line and in a handoff, the one that sends


class Watch:
    """Follows all choices of a prompt that nobody else asks."""

    def __init__(self, system: VirtualSystem, prompt: list[int]) -> None:
        self._system = system
        self._prompt = prompt

    @property
    def keys(self) -> set[RequestKey]:
        """Of every attempt so far."""
        return {
            submit.key
            for submit in self._system.submitted
            if submit.token_ids[: submit.num_prompt_tokens] == self._prompt
        }

    def places(self) -> list[Place]:
        """Where the choices are now; those between two phases are left out."""
        found: list[Place] = []
        keys = self.keys
        for name in self._system.names():
            engine: Any = self._system.host(name).engine
            for request in engine.core.scheduler._all_requests():
                if request.key in keys:
                    phase = _phase_in_scheduler(request)
                    found += [Place(phase, name)] if phase else []
            for key, entry in engine.outgoing._entries.items():
                if key in keys and entry.block_ids is not None:
                    phase = Phase.HANDOFF if entry.is_reserved else Phase.IN_LINE
                    found.append(Place(phase, name))
        return found

    def is_in(self, phase: Phase) -> bool:
        return any(place.phase is phase for place in self.places())

    async def reach(self, phase: Phase) -> str:
        """Wait until a choice is in the phase; the worker that holds it."""
        await self._system.until(lambda: self.is_in(phase), f"it is {phase.value}")
        return next(place.worker for place in self.places() if place.phase is phase)


def _phase_in_scheduler(request: Request) -> Phase | None:
    if request.num_computed_tokens == 0:
        return Phase.QUEUED
    num_tokens = len(request.tokens)
    if request.num_computed_tokens < num_tokens - 1:  # also one that goes on after a death
        return Phase.PREFILL
    return Phase.DECODING if num_tokens - request.num_prompt_tokens >= NUM_DECODED else None
