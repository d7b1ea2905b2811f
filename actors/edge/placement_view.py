"""Snapshots for placement: reported load plus what was placed since, or placement would herd.

Both the allocator and the ingress's fallback (while the allocator is away) look through this.
"""

from collections import deque
from dataclasses import dataclass

from actors.edge.worker_links import WorkerLink, WorkerLinks
from engine.clock import Clock
from engine.messages import Assign
from engine.scheduling.placement import WorkerSnapshot

# A report this much younger than a placement has counted it: submitting takes milliseconds.
COUNTED_AFTER_S = 0.2


@dataclass(frozen=True, slots=True)
class _Placed:
    at_s: float
    num_tokens: int


class PlacementView:
    """What placement may know of the workers now."""

    def __init__(self, links: WorkerLinks, clock: Clock) -> None:
        self._links = links
        self._clock = clock
        self._placed: dict[str, deque[_Placed]] = {}  # worker -> placements not yet reported

    def snapshots(self) -> list[WorkerSnapshot]:
        return [self._snapshot(link) for link in self._links.links()]

    def note(self, assign: Assign, num_prompt_tokens: int) -> None:
        """Count a placement until a report of the worker must have seen it."""
        now_s = self._clock.now_s()
        for worker, num_tokens in (
            (assign.prefill_worker, num_prompt_tokens),
            (assign.decode_worker, 0),
        ):
            if worker is not None:
                self._placed.setdefault(worker, deque()).append(_Placed(now_s, num_tokens))

    def _snapshot(self, link: WorkerLink) -> WorkerSnapshot:
        load = link.load
        if load is None or not link.is_up:
            return WorkerSnapshot(
                name=link.name,
                role=link.role,
                is_alive=False,
                queued_tokens=0,
                num_running=0,
                num_free_blocks=0,
                num_blocks=0,
            )
        placed = self._placed.setdefault(link.name, deque())
        while placed and placed[0].at_s + COUNTED_AFTER_S < link.load_at_s:
            placed.popleft()
        return WorkerSnapshot(
            name=link.name,
            role=link.role,
            is_alive=True,
            queued_tokens=load.queued_tokens + sum(p.num_tokens for p in placed),
            num_running=load.num_running + load.num_waiting + len(placed),
            num_free_blocks=load.num_free_blocks,
            num_blocks=load.num_blocks,
        )
