"""A scheduler without blocks, rows or decodes: just what a `PromptQueue` is asked and told.

It does with a turn what the contract allows, checks each step's budget, and keeps what happened.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from engine.cost_model import PRIOR, StepCosts, StepWork
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.budget import StepBudget
from engine.scheduling.waiting import PromptQueue


def make_request(
    name: str,
    num_tokens: int,
    *,
    arrival_s: float = 0.0,
    priority: int = 0,
    due_s: float | None = None,
) -> Request:
    """due_s: when its first token is due, on the clock of `arrival_s`."""
    ttft_s = None if due_s is None else due_s - arrival_s
    params = SamplingParams(max_tokens=1)
    return Request(
        spec=RequestSpec(params=params, priority=priority, ttft_deadline_s=ttft_s),
        key=RequestKey(name),
        ingress_id="ingress",
        tokens=[1] * num_tokens,
        num_prompt_tokens=num_tokens,
        arrival_s=arrival_s,
    )


Step = dict[str, int]  # name -> tokens, in the order of the grants


@dataclass
class ToyWorker:
    queue: PromptQueue
    max_tokens: int = 512
    min_chunk_tokens: int = 1
    max_step_s: float | None = None
    costs: StepCosts = PRIOR
    cached: dict[str, int] = field(default_factory=dict)  # name -> tokens an admission finds
    running: dict[RequestKey, Request] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def count_uncached(self, request: Request) -> int:
        return request.num_known_tokens - self.cached.get(request.key.request_id, 0)

    def step(self, now_s: float = 0.0, *, refused: Collection[str] = ()) -> Step:
        room = StepBudget(
            now_s=now_s,
            max_tokens=self.max_tokens,
            min_chunk_tokens=self.min_chunk_tokens,
            max_step_s=self.max_step_s,
            costs=self.costs,
        )
        chunks: list[tuple[Request, int]] = []
        offered: set[RequestKey] = set()
        work_before: StepWork | None = None  # the last chunk, if it began with an admission
        for candidate in self.queue.candidates(list(self.running.values()), room):
            request, _ = candidate
            assert request.key not in offered, f"{request.key} is offered twice in one step"
            offered.add(request.key)
            is_admission = request.key not in self.running
            if is_admission:
                if request.key.request_id in refused:
                    room.refuse(request)
                    continue
                self.admit(request)
            work_before = room.work if is_admission else None
            chunks.append((request, room.grant(candidate)))
        self._check(room, chunks, work_before)
        for request, num_tokens in chunks:
            request.num_computed_tokens += num_tokens
            if request.num_computed_tokens == request.num_known_tokens:
                del self.running[request.key]
        self.steps.append({request.key.request_id: n for request, n in chunks})
        return self.steps[-1]

    def admit(self, request: Request) -> None:
        assert self.queue.remove(request.key) is request
        cached = self.cached.get(request.key.request_id, 0)
        request.num_computed_tokens = min(cached, request.num_known_tokens - 1)
        self.running[request.key] = request

    def abort(self, key: RequestKey) -> None:
        assert (self.queue.remove(key) is None) == (self.running.pop(key, None) is not None)

    def _check(
        self, room: StepBudget, chunks: list[tuple[Request, int]], work_before: StepWork | None
    ) -> None:
        num_tokens = sum(n for _, n in chunks)
        assert num_tokens == self.max_tokens - room.num_tokens_left <= self.max_tokens
        assert room.num_prompts == len({request.key for request, _ in chunks}) == len(chunks)
        assert all(0 < n <= r.num_known_tokens - r.num_computed_tokens for r, n in chunks)
        limit_s = math.inf if self.max_step_s is None else self.max_step_s
        if chunks and self.costs.step_seconds(room.work) > limit_s:
            # By one chunk, as short as may be: the step's first, which it must hold whatever the
            # time, or that of an admission that found another prefix than was expected.
            if len(chunks) > 1:
                assert work_before is not None, f"{chunks}: more than fits, and nobody was admitted"
                assert self.costs.step_seconds(work_before) <= limit_s, chunks
            assert chunks[-1][1] <= self.min_chunk_tokens
