"""Snapshots for placement: reported load plus what was placed since; without it placement herds.

Used by the allocator, and by an ingress while the allocator is away.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from actors.routing.worker_links import WorkerLink, WorkerLinks
from engine.clock import Clock
from engine.length_class import LengthClass
from engine.messages import Assign, LoadReport, WorkerStatus
from engine.routing.placement import (
    COUNTED_AFTER_S,
    DEFAULT_RULES,
    DONE_AFTER_S,
    ShortQueue,
    WorkerSnapshot,
)
from engine.routing.tier_hits import NOTHING_STORED, StoredHit

NO_HITS: Mapping[str, int] = {}
NO_STORED_HITS: Mapping[str, StoredHit] = {}
NO_LABELS: Mapping[str, LengthClass] = {}


@dataclass(frozen=True, slots=True)
class _Placed:
    at_s: float
    num_tokens: int  # to compute
    work_s: float
    is_short: bool
    done_s: float  # from then on it counts as load no more


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A prompt placed on a decode worker, which hears of it when its first chunk is computed."""

    at_s: float
    num_tokens: int
    starts_s: float  # predicted; then it gets blocks there
    arrives_s: float  # predicted; then it runs there


class PlacementView:
    """What placement knows of the workers now."""

    def __init__(self, links: WorkerLinks, clock: Clock) -> None:
        self._links = links
        self._clock = clock
        self._placed: dict[str, list[_Placed]] = {}  # worker -> placements not yet reported
        self._arriving: dict[str, list[_Arriving]] = {}  # decode worker -> not yet reported
        self._hosts: dict[str, str] = {}  # worker -> its machine

    def note_hosts(self, workers: Mapping[str, WorkerStatus]) -> None:
        """Takes over on which machine each worker is, as far as they have said."""
        self._hosts = {
            name: status.identity.host
            for name, status in workers.items()
            if status.identity is not None
        }

    def snapshots(
        self,
        labels: Mapping[str, LengthClass] = NO_LABELS,
        hit_tokens: Mapping[str, int] = NO_HITS,
        stored: Mapping[str, StoredHit] = NO_STORED_HITS,
    ) -> list[WorkerSnapshot]:
        """Returns a snapshot of every worker, with its pool and what it has of this prompt.

        One that drains is left out while another of its role is up.
        """
        snapshots = []
        links = self._links.links()
        staying = {link.role for link in links if link.is_up and not link.is_draining}
        for link in links:
            if link.is_draining and link.role in staying:
                continue
            num_hit, in_tiers = hit_tokens.get(link.name, 0), stored.get(link.name, NOTHING_STORED)
            snapshots.append(self._snapshot(link, labels.get(link.name), num_hit, in_tiers))
        return snapshots

    def note(self, assign: Assign, num_prompt_tokens: int) -> None:
        """Counts a placement until a later report of the worker includes it."""
        assert 0 < assign.num_new_tokens <= num_prompt_tokens, (
            f"{assign.num_new_tokens} new of {num_prompt_tokens} tokens"
        )
        now_s = self._clock.now_s()
        is_short = assign.length_class == "short"
        done_s = now_s + assign.ttft_s + DONE_AFTER_S
        work_s = assign.work_s - assign.shared_s  # prompts that wait together share a step
        placed = _Placed(now_s, assign.num_new_tokens, work_s, is_short, done_s)
        self._placed.setdefault(assign.prefill_worker, []).append(placed)
        if assign.decode_worker is not None:
            arrives_s = now_s + assign.ttft_s
            starts_s = arrives_s - assign.work_s
            arriving = _Arriving(now_s, num_prompt_tokens, starts_s, arrives_s)
            self._arriving.setdefault(assign.decode_worker, []).append(arriving)

    def _snapshot(
        self, link: WorkerLink, label: LengthClass | None, hit_tokens: int, stored: StoredHit
    ) -> WorkerSnapshot:
        load = link.load
        if load is None or not link.is_up:
            return WorkerSnapshot(
                name=link.name,
                role=link.role,
                is_alive=False,
                queued_tokens=0,
                queued_s=0.0,
                num_waiting=0,
                num_running=0,
                num_free_blocks=0,
                num_blocks=0,
                label=label,
            )
        placed, arriving = self._not_reported(link), self._not_arrived(link)
        queued_s = self._seconds(load.queued_tokens, load.queued_s)
        return WorkerSnapshot(
            name=link.name,
            role=link.role,
            is_alive=True,
            queued_tokens=load.queued_tokens + sum(p.num_tokens for p in placed),
            queued_s=queued_s + sum(p.work_s for p in placed),
            num_waiting=load.num_waiting + len(placed),
            num_running=load.num_running + load.num_waiting + len(placed) + len(arriving),
            num_free_blocks=load.num_free_blocks,
            num_blocks=load.num_blocks,
            arriving_tokens=self._tokens_without_blocks(link, arriving),
            host=self._hosts.get(link.name, ""),
            short=self._short_queue(load, placed),
            label=label,
            hit_tokens=hit_tokens,
            stored=stored,
            host_tier=load.host_tier,
        )

    def _not_reported(self, link: WorkerLink) -> list[_Placed]:
        now_s, reported_s = self._clock.now_s(), link.load_at_s - COUNTED_AFTER_S
        placed = self._placed.get(link.name, [])
        self._placed[link.name] = left = [
            p for p in placed if p.at_s >= reported_s and p.done_s > now_s
        ]
        return left

    def _not_arrived(self, link: WorkerLink) -> list[_Arriving]:
        """Drops what a report of the running requests must have seen, and no sooner."""
        now_s, reported_s = self._clock.now_s(), link.load_at_s - COUNTED_AFTER_S
        arriving = self._arriving.get(link.name, [])
        self._arriving[link.name] = left = [
            p for p in arriving if p.at_s >= reported_s or p.arrives_s > now_s
        ]
        return left

    def _tokens_without_blocks(self, link: WorkerLink, arriving: list[_Arriving]) -> int:
        """Tokens of prompts whose blocks no report of the worker counts as taken."""
        now_s, reported_s = self._clock.now_s(), link.load_at_s - COUNTED_AFTER_S
        return sum(p.num_tokens for p in arriving if p.at_s >= reported_s or p.starts_s > now_s)

    def _short_queue(self, load: LoadReport, placed: list[_Placed]) -> ShortQueue | None:
        if load.short is None:
            return None
        short = [p for p in placed if p.is_short]
        queued_s = self._seconds(load.short.queued_tokens, load.short.queued_s)
        return ShortQueue(
            num_waiting=load.short.num_waiting + len(short),
            queued_s=queued_s + sum(p.work_s for p in short),
        )

    def _seconds(self, queued_tokens: int, reported_s: float | None) -> float:
        if reported_s is not None:
            return reported_s
        return DEFAULT_RULES.cost.seconds(queued_tokens, 0) if queued_tokens else 0.0
