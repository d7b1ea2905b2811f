"""Decides which workers serve a request: a pure, replayable function of snapshots, without Ray.

    ttft(worker) = seconds queued before it + cost(tokens no cache of that worker holds)
                   + seconds to load what is in a tier below, where that is less than it saves

A prompt is short or long *on a worker*: the same prompt may be long everywhere except on the worker
that has most of it cached. A worker labelled short is the home of prompts that are short on it. A
worker labelled long is the home of prompts that would be long without any cache, so a late turn of
a long conversation may stay where it began. Among home workers the lowest predicted TTFT wins.
Another worker wins if it is faster by `spill_margin_s`, or if it alone can meet the prompt's
deadline. So with fixed labels, a predicted TTFT exceeds the best of all workers by at most the
margin, and adding a worker makes it worse by at most the margin.

Without labels every worker is home. Without reports of cached blocks nothing counts as cached.

The decode worker, where that is another one: with room for the prompt, hardly busier than the least
busy one, and of those the one to which the KV moves soonest, by where it runs and what it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from configs.resolved import ResolvedLaps
from engine.length_class import LengthClass, LinearCost, PrefillCost, classify
from engine.messages import Assign, Hold, HostTierLoad, Placement, Reject, Role, RouteRequest
from engine.routing.tier_hits import NOTHING_STORED, StoredHit

# A report this much younger than a placement includes it: submitting takes milliseconds.
COUNTED_AFTER_S = 0.2
# This long after its predicted first token a prompt no longer counts as load, whatever the last
# report says. Otherwise a worker that is idle again would seem busy until its next report.
DONE_AFTER_S = 0.05
RETRY_AFTER_S = 1.0
# Of decode workers that run at most so many more requests than the least busy one, or this share
# more if that is more, the one to which the KV moves soonest gets a prompt. In each decode step,
# one request more of 1,000 tokens of an 8B model costs the others 0.04 ms.
SPARE_REQUESTS = 2
SPARE_SHARE = 0.125
# What a token's KV takes, of that model: between two GPUs of a machine, and over 100 Gb/s.
NEAR_TOKEN_S = 1e-6
FAR_TOKEN_S = 12e-6
MOVE_STEP_S = 1e-3  # shorter differences do not count


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRules:
    """The inputs of a decision that do not change from one decision to the next."""

    laps: ResolvedLaps = field(default_factory=ResolvedLaps)
    cost: PrefillCost = field(default_factory=LinearCost)
    block_size: int = 16  # tokens


DEFAULT_RULES = PlacementRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortQueue:
    """The short prompts in a worker's queue, for workers where these go first."""

    num_waiting: int
    queued_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """What the allocator knows about one worker at the time of a decision.

    Queues are as reported, plus what was placed there since that report.
    """

    name: str
    role: Role
    is_alive: bool
    queued_tokens: int
    queued_s: float  # predicted seconds for these tokens
    num_waiting: int
    num_running: int  # including those that wait
    num_free_blocks: int
    num_blocks: int
    arriving_tokens: int = 0  # of prompts placed on a decode worker that have no blocks there yet
    host: str = ""  # its machine; "" = not known
    short: ShortQueue | None = None  # None = one queue
    label: LengthClass | None = None  # its pool; None = home of both classes
    hit_tokens: int = 0  # tokens of the prompt to be placed that are in its prefix cache
    stored: StoredHit = NOTHING_STORED  # tokens after those that it could load
    host_tier: HostTierLoad | None = None  # for display; shared by the workers of a machine

    @property
    def can_prefill(self) -> bool:
        return self.role != "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """Prediction for the prompt on one worker."""

    worker: WorkerSnapshot
    length_class: LengthClass  # on this worker
    is_home: bool
    num_new_tokens: int
    work_s: float
    ttft_s: float
    deadline_s: float | None

    @property
    def is_in_time(self) -> bool:
        return self.deadline_s is not None and self.ttft_s <= self.deadline_s

    @property
    def rank(self) -> tuple[float, str]:
        """Sort key; ties go to the first name, so equal inputs give equal decisions."""
        return self.ttft_s, self.worker.name


def route(
    prompt: RouteRequest,
    snapshots: Sequence[WorkerSnapshot],
    now_s: float,
    rules: PlacementRules = DEFAULT_RULES,
) -> Placement:
    """Choose a prefill and a decode worker for a prompt.

    Returns Hold while a role has no live worker (workers restart by themselves), and Reject when
    the queued tokens would exceed the limit. `now_s` is unused by this policy and part of the
    contract.
    """
    del now_s
    alive = [s for s in snapshots if s.is_alive]
    prefillers = [s for s in alive if s.can_prefill]
    if not prefillers:
        return Hold(reason="no prefill worker is alive", retry_after_s=RETRY_AFTER_S)
    queued_tokens = sum(s.queued_tokens for s in prefillers)
    limit = prompt.max_queued_tokens
    if limit is not None and 0 < queued_tokens > limit - prompt.num_prompt_tokens:
        reason = f"{queued_tokens} tokens are queued; the limit is {limit}"
        return Reject(reason=reason, retry_after_s=RETRY_AFTER_S)
    chosen, reason = _choose(
        [_predict(prompt, s, rules) for s in _prefer(prefillers, prompt.avoid)],
        rules.laps.spill_margin_s,
    )
    decode_worker = None
    if chosen.worker.role == "prefill":
        decoders = [s for s in alive if s.role == "decode"]
        if not decoders:
            return Hold(reason="no decode worker is alive", retry_after_s=RETRY_AFTER_S)
        decode_worker = _choose_decoder(
            _prefer(decoders, prompt.avoid),
            prompt.num_prompt_tokens,
            rules.block_size,
            chosen.worker.host,
        ).name
    return Assign(
        prefill_worker=chosen.worker.name,
        decode_worker=decode_worker,
        length_class=chosen.length_class,
        num_new_tokens=chosen.num_new_tokens,
        work_s=chosen.work_s,
        shared_s=shared_s(rules.cost),
        ttft_s=chosen.ttft_s,
        reason=reason,
    )


def is_forced(snapshots: Sequence[WorkerSnapshot]) -> bool:
    """Whether there is one worker a role, alive or not: then caches and pools decide nothing."""
    num_prefillers = sum(s.can_prefill for s in snapshots)
    return num_prefillers == 1 and len(snapshots) - num_prefillers <= 1


def shared_s(cost: PrefillCost) -> float:
    """The part of a step's cost that does not depend on its prompts; a step pays it once."""
    return cost.seconds(0, 0)


def wait_s(worker: WorkerSnapshot, length_class: LengthClass, max_step_s: float) -> float:
    """Predicted seconds of the work that a worker computes before a prompt that arrives now.

    Where short prompts go first, a short one waits for other short ones and at most one long chunk.
    """
    if length_class == "long" or worker.short is None:
        return worker.queued_s
    long_s = max(worker.queued_s - worker.short.queued_s, 0.0)
    return worker.short.queued_s + min(long_s, max_step_s)


def _predict(prompt: RouteRequest, worker: WorkerSnapshot, rules: PlacementRules) -> _Candidate:
    laps, cost = rules.laps, rules.cost
    # At least the last token is computed, because its logits are needed.
    num_cached = min(worker.hit_tokens, prompt.num_prompt_tokens - 1)
    num_new, work_s = _with_loading(prompt.num_prompt_tokens - num_cached, num_cached, worker, cost)
    num_cached = prompt.num_prompt_tokens - num_new
    length_class = classify(num_new, num_cached, laps.laps_alloc_threshold, cost)
    cold_class = classify(prompt.num_prompt_tokens, 0, laps.laps_alloc_threshold, cost)
    is_long_home = worker.label == "long" and cold_class == "long"
    is_short = length_class == "short"
    default_s = laps.short_ttft_deadline_s if is_short else laps.long_ttft_deadline_s
    asked_s = prompt.ttft_deadline_s
    return _Candidate(
        worker=worker,
        length_class=length_class,
        is_home=worker.label is None or is_long_home or worker.label == length_class == "short",
        num_new_tokens=num_new,
        work_s=work_s,
        ttft_s=wait_s(worker, length_class, laps.max_step_ms / 1000) + work_s,
        deadline_s=default_s if asked_s is None else asked_s,
    )


def _with_loading(
    num_new: int, num_cached: int, worker: WorkerSnapshot, cost: PrefillCost
) -> tuple[int, float]:
    """Tokens to compute and the seconds that takes, if what pays is loaded.

    Loaded tokens count as many as it takes the same time to compute, as in the worker's own queue
    (engine/scheduling/host_loads.py).
    """
    all_s = cost.seconds(num_new, num_cached)
    num_stored = min(worker.stored.num_tokens, num_new - 1)
    if num_stored == 0:
        return num_new, all_s
    rest_s = cost.seconds(num_new - num_stored, num_cached + num_stored)
    load_s, saved_s = worker.stored.load_s, all_s - rest_s
    if load_s >= saved_s:
        return num_new, all_s
    return num_new - num_stored + round(load_s / saved_s * num_stored), rest_s + load_s


def _choose(candidates: Sequence[_Candidate], margin_s: float) -> tuple[_Candidate, str]:
    """The best home worker, unless another wins by the margin or the deadline; and the reason."""
    best = min(candidates, key=lambda c: c.rank)
    at_home = [c for c in candidates if c.is_home]
    if not at_home:
        return best, "no worker that is alive is for such prompts"
    home = min(at_home, key=lambda c: c.rank)
    if best.ttft_s + margin_s < home.ttft_s:
        return best, f"spilled: {home.worker.name} would take {home.ttft_s:.3f} s"
    if best.is_in_time and not home.is_in_time:
        return best, f"spilled: too late at {home.worker.name}, {home.ttft_s:.3f} s"
    return home, "least predicted time to the first token"


def _choose_decoder(
    workers: Sequence[WorkerSnapshot], num_prompt_tokens: int, block_size: int, host: str
) -> WorkerSnapshot:
    """Prefers enough free blocks, then little KV to move, then few running requests.

    host: the machine of the KV. KV that a worker has cached is not moved. Among workers to which
    moving takes as long, of the least busy the one that has most of it is chosen, and of those the
    one with the largest share of free blocks.
    """

    def num_steps(s: WorkerSnapshot) -> int:
        token_s = NEAR_TOKEN_S if host and s.host == host else FAR_TOKEN_S
        return int(max(num_prompt_tokens - s.hit_tokens, 0) * token_s / MOVE_STEP_S)

    def num_free(s: WorkerSnapshot) -> int:
        return s.num_free_blocks - -(-s.arriving_tokens // block_size)

    def rank(s: WorkerSnapshot) -> tuple[int, int, int, float, str]:
        free_share = num_free(s) / max(s.num_blocks, 1)
        return num_steps(s), s.num_running, -s.hit_tokens, -free_share, s.name

    num_blocks = num_prompt_tokens // block_size + 1
    usable = [s for s in workers if num_free(s) >= num_blocks] or workers
    least = min(s.num_running for s in usable)
    limit = least + max(SPARE_REQUESTS, SPARE_SHARE * least)
    return min((s for s in usable if s.num_running <= limit), key=rank)


def _prefer(workers: list[WorkerSnapshot], avoid: Sequence[str]) -> list[WorkerSnapshot]:
    """Workers not in `avoid`; all of them if none is left."""
    return [s for s in workers if s.name not in avoid] or workers
