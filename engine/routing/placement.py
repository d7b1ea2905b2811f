"""Where a request goes: a pure decision over snapshots, replayable, without Ray.

    ttft(worker) = seconds queued before it + cost(tokens no cache of that worker holds)

A prompt is short or long *on a worker*: the same prompt may be long everywhere but on the worker
that holds most of it. A worker labelled short is home to what is short on it, one labelled long to
what would be long without any cache: a late turn of a long conversation may stay where it began.
At home the least predicted TTFT wins. Another worker wins by being sooner by `spill_margin_s`, or
by being the only way to keep the prompt's deadline. Hence, labels unchanged, a prediction is never
worse than the best of all workers plus the margin, nor made worse by more by one worker more.

Without labels every worker is home; without reports of cached blocks nothing counts as cached.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from configs.schema import LapsConfig
from engine.length_class import LengthClass, LinearCost, PrefillCost, classify
from engine.messages import Assign, Hold, Placement, Reject, Role, RouteRequest

# A report this much younger than a placement has counted it: submitting takes milliseconds.
COUNTED_AFTER_S = 0.2
# This long after its predicted first token a prompt counts as load no more, whatever the last
# report says: else an idle worker would seem busy until the next report.
DONE_AFTER_S = 0.05
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRules:
    """The parameters of placement that stay constant."""

    laps: LapsConfig = field(default_factory=LapsConfig)
    cost: PrefillCost = field(default_factory=LinearCost)
    block_size: int = 16  # tokens


DEFAULT_RULES = PlacementRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortQueue:
    """The short part of a worker's queue, on workers where short prompts go first."""

    num_waiting: int
    queued_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """What the allocator knows of one worker when it decides.

    Queues are as reported, plus what was placed there since that report.
    """

    name: str
    role: Role
    is_alive: bool
    queued_tokens: int
    queued_s: float  # predicted seconds of these
    num_waiting: int
    num_running: int  # running and waiting requests
    num_free_blocks: int
    num_blocks: int
    short: ShortQueue | None = None  # None = one queue
    label: LengthClass | None = None  # its pool; None = both classes are at home here
    hit_tokens: int = 0  # of this prompt, in the worker's prefix cache

    @property
    def can_prefill(self) -> bool:
        return self.role != "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """What the prompt would cost on one worker."""

    worker: WorkerSnapshot
    length_class: LengthClass  # there
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
        """Ties go to the first by name, so equal inputs decide equally."""
        return self.ttft_s, self.worker.name


def route(
    prompt: RouteRequest,
    snapshots: Sequence[WorkerSnapshot],
    now_s: float,
    rules: PlacementRules = DEFAULT_RULES,
) -> Placement:
    """Choose a prefill and a decode worker for a prompt.

    Returns Hold while a role has no live worker (they restart by themselves), Reject when the
    queued tokens would exceed the limit. `now_s` is unused by this policy and part of the contract.
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
        num_blocks = prompt.num_prompt_tokens // rules.block_size + 1
        decode_worker = _choose_decoder(_prefer(decoders, prompt.avoid), num_blocks).name
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


def shared_s(cost: PrefillCost) -> float:
    """Returns the fixed cost of a step, which prompts that wait together pay once."""
    return cost.seconds(0, 0)


def wait_s(worker: WorkerSnapshot, length_class: LengthClass, max_step_s: float) -> float:
    """Predicts the seconds that a worker computes before a prompt that arrives now.

    Where short prompts go first, one waits for the other short ones and at most one long chunk.
    """
    if length_class == "long" or worker.short is None:
        return worker.queued_s
    long_s = max(worker.queued_s - worker.short.queued_s, 0.0)
    return worker.short.queued_s + min(long_s, max_step_s)


def _predict(prompt: RouteRequest, worker: WorkerSnapshot, rules: PlacementRules) -> _Candidate:
    laps, cost = rules.laps, rules.cost
    # At least the last token is computed, else there would be no logits.
    num_cached = min(worker.hit_tokens, prompt.num_prompt_tokens - 1)
    num_new = prompt.num_prompt_tokens - num_cached
    length_class = classify(num_new, num_cached, laps.laps_alloc_threshold, cost)
    cold_class = classify(prompt.num_prompt_tokens, 0, laps.laps_alloc_threshold, cost)
    is_long_home = worker.label == "long" and cold_class == "long"
    work_s = cost.seconds(num_new, num_cached)
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


def _choose(candidates: Sequence[_Candidate], margin_s: float) -> tuple[_Candidate, str]:
    """Returns the best home worker, unless another wins by the margin or alone meets the deadline;
    and the reason.
    """
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


def _choose_decoder(workers: Sequence[WorkerSnapshot], num_blocks: int) -> WorkerSnapshot:
    """Returns a worker with enough free blocks; then fewest running, then most free blocks."""
    return min(
        workers,
        key=lambda s: (
            s.num_free_blocks < num_blocks,
            s.num_running - s.num_free_blocks / max(s.num_blocks, 1),
            s.name,
        ),
    )


def _prefer(workers: list[WorkerSnapshot], avoid: Sequence[str]) -> list[WorkerSnapshot]:
    """Returns the workers not in `avoid`, or all if none is left."""
    return [s for s in workers if s.name not in avoid] or workers
