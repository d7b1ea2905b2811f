"""The budget for prompt work in one step: new tokens and time.

A `StepBudget` is opened for each step, reduced by grants and then dropped. The token limit is hard.
The time limit is soft: the first prompt of a step always gets a chunk, because otherwise decodes
that already fill `max_step_s` would stop all prompts. The budget knows neither blocks nor rows, and
does not choose the next prompt.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence

from engine.cost_model import NO_WORK, PRIOR, StepCosts, StepWork
from engine.request import Request, RequestKey

Candidate = tuple[Request, int]  # may compute prompt tokens now, and the maximum number of them
WorkOf = Callable[[Request], tuple[int, int]]  # new and cached tokens of the prompt's remainder


class StepBudget:
    """The token and time budget of one step, and the tokens granted to each request.

    `max_tokens` bounds the new prompt tokens; the tokens of `decoding` are not part of it. A chunk
    shorter than `min_chunk_tokens` is made only if it ends its prompt or is the step's first chunk.
    """

    def __init__(
        self,
        *,
        now_s: float,
        max_tokens: int,
        min_chunk_tokens: int = 1,
        max_step_s: float | None = None,
        costs: StepCosts = PRIOR,
        decoding: StepWork = NO_WORK,
        can_admit: bool = True,
        graph_token_sizes: Sequence[int] = (),
    ) -> None:
        """can_admit: False if it is already known that no waiting request can be admitted.

        graph_token_sizes: step sizes in tokens, ascending, that need no padding. Chunks are
        shortened so that a step has one of these sizes.
        """
        assert max_tokens >= 0, f"{max_tokens} tokens are left beside the decodes"
        assert min_chunk_tokens > 0, f"a chunk of {min_chunk_tokens} tokens"
        self.now_s = now_s
        self.min_chunk_tokens = min_chunk_tokens
        self.can_admit = can_admit
        self._num_tokens_left = max_tokens
        self._max_step_s = max_step_s
        self._costs = costs
        self._work = decoding
        self._graph_token_sizes = graph_token_sizes
        self._granted: dict[RequestKey, int] = {}
        self._refused: set[RequestKey] = set()
        self._has_refused_long = False  # long as in `short_reserve`
        self._exempt: RequestKey | None = None  # by the last refusal: `but`

    @property
    def num_tokens_left(self) -> int:
        return self._num_tokens_left

    @property
    def max_step_s(self) -> float | None:
        """The step's time limit; None = there is none."""
        return self._max_step_s

    @property
    def work(self) -> StepWork:
        """Everything that the step computes so far, decodes included."""
        return self._work

    @property
    def num_prompts(self) -> int:
        """Requests that were granted a chunk."""
        return len(self._granted)

    def num_granted(self, request: Request) -> int:
        """Prompt tokens of `request` that this step computes."""
        return self._granted.get(request.key, 0)

    def limit_time(self, max_step_s: float) -> None:
        """Replace the step's time limit for all later chunks."""
        self._max_step_s = max_step_s

    # ---- for the scheduler -----------------------------------------------------------------------

    def grant(self, candidate: Candidate) -> int:
        """Grant tokens to a running request; returns how many, at least one.

        The request's progress must be up to date: an admission may have found another prefix than
        expected. In that case the chunk may exceed the time limit by at most `min_chunk_tokens`,
        but never the token limit.
        """
        request, max_tokens = candidate
        assert self._num_tokens_left > 0, f"{request.key}: the step has no token left"
        assert request.key not in self._granted, f"{request.key} has its chunk of this step"
        num_new, num_cached = rest_of_prompt(request)
        num_fitting = min(max_tokens, self.fit(num_new, num_cached))
        num_tokens = max(self._without_padding(num_fitting, num_new), self._least(num_new))
        self._work = self._work.with_prompt(num_tokens, num_cached)
        self._num_tokens_left -= num_tokens
        self._granted[request.key] = num_tokens
        return num_tokens

    def refuse(self, request: Request, *, but: Request | None = None) -> None:
        """Record that the request cannot be admitted now because no row or no blocks are free.

        No request but `but` that waits behind it in its class may be admitted in this step.
        """
        self._refused.add(request.key)
        self._exempt = None if but is None else but.key

    def refuse_long(self, *, but: Request | None = None) -> None:
        """Record that a long request found no row or no blocks.

        No other long request but `but` is admitted in this step; short ones behind it may be.
        """
        self._has_refused_long = True
        self._exempt = None if but is None else but.key

    def is_closed_for_long(self, request: Request) -> bool:
        """Whether a long request may not be admitted in this step because another was refused."""
        return self._has_refused_long and request.key != self._exempt

    # ---- for the queue ---------------------------------------------------------------------------

    def fit(self, num_new: int, num_cached: int, *, reserved: StepWork = NO_WORK) -> int:
        """Length of the longest chunk of this prompt that fits the token and time limits; may be 0.

        `reserved` is work of prompts without a grant yet that must fit as well.
        """
        max_tokens = min(num_new, self._num_tokens_left - reserved.num_prompt_tokens)
        if max_tokens <= 0:
            return 0
        if self._max_step_s is None:
            return max_tokens
        return self._costs.max_chunk_tokens(
            num_cached=num_cached,
            other_work=self._work.with_work(reserved),
            max_step_s=self._max_step_s,
            max_tokens=max_tokens,
        )

    def has_room(self, num_new: int, num_cached: int) -> bool:
        """Whether a chunk of this prompt is worth making in this step."""
        if self._num_tokens_left <= 0:
            return False
        if not self._granted:
            return True
        return self.fit(num_new, num_cached) >= min(num_new, self.min_chunk_tokens)

    def offer(
        self,
        candidates: Iterable[Request],
        *,
        work_of: WorkOf,
        is_waiting: Callable[[Request], bool],
    ) -> Iterator[Candidate]:
        """Yield the candidates in order, until one does not fit.

        Candidates that already have a chunk in this step are skipped. After a refusal, including
        one from an earlier call, only running requests and the one that it exempts are yielded.
        """
        is_closed = False
        for request in candidates:
            is_closed = is_closed or request.key in self._refused
            is_shut_out = is_closed and request.key != self._exempt and is_waiting(request)
            if request.key in self._granted or is_shut_out:
                continue
            if not self.has_room(*work_of(request)):
                return
            yield request, self._num_tokens_left
            is_closed = is_closed or request.key in self._refused

    def _without_padding(self, num_tokens: int, num_new: int) -> int:
        """Shorten a chunk that does not end its prompt to a full graph size; at most by half."""
        if num_tokens == num_new or not self._graph_token_sizes:
            return num_tokens
        num_before = self._work.num_new_tokens
        place = bisect_right(self._graph_token_sizes, num_before + num_tokens)
        num_full = self._graph_token_sizes[place - 1] - num_before if place > 0 else 0
        return num_full if 2 * num_full >= num_tokens else num_tokens

    def _least(self, num_new: int) -> int:
        return min(num_new, self.min_chunk_tokens, self._num_tokens_left)


def rest_of_prompt(request: Request) -> tuple[int, int]:
    """New tokens that a running request has still to compute, and its computed tokens."""
    return request.num_uncomputed_tokens, request.num_computed_tokens
