"""How much prompt work still fits a step: its token budget and its time.

A budget is opened for each step, mutated by grants, then dropped. Tokens are a hard limit. Time is
a wish: the first prompt of a step always gets a chunk, or decodes that fill `max_step_s` would stop
all prompts. Knows neither blocks nor rows, nor who is next.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence

from engine.cost_model import NO_WORK, PRIOR, StepCosts, StepWork
from engine.request import Request, RequestKey

Candidate = tuple[Request, int]  # (request, tokens it may compute at most)
WorkOf = Callable[[Request], tuple[int, int]]  # new and cached tokens of the rest of its prompt


class StepBudget:
    """The token and time budget of one step, and what was granted of it.

    `max_tokens` are new prompt tokens, besides `decoding`, which the step does anyway. Chunks
    shorter than `min_chunk_tokens` are made only if they end their prompt or open the step.
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
        """can_admit: whether a request that waits could start, as far as that is known already.

        graph_token_sizes: sizes of steps, ascending, that replay a graph without padding; chunks
        are cut so that steps have them.
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
        self.has_refused_long = False  # a long request, see `short_reserve`

    @property
    def num_tokens_left(self) -> int:
        return self._num_tokens_left

    @property
    def work(self) -> StepWork:
        """The work of the step so far, decodes included."""
        return self._work

    @property
    def num_prompts(self) -> int:
        """Requests that were granted a chunk."""
        return len(self._granted)

    def num_granted(self, request: Request) -> int:
        """Tokens of its prompt that this step computes."""
        return self._granted.get(request.key, 0)

    def limit_time(self, max_step_s: float) -> None:
        """Limits the step's predicted time for all chunks granted from now on."""
        self._max_step_s = max_step_s

    # ---- the scheduler's answers to a candidate --------------------------------------------------

    def grant(self, candidate: Candidate) -> int:
        """Grants tokens to a running request; returns how many, at least one.

        Its progress must be up to date: an admission may have found another prefix than expected.
        Then time gives way by at most `min_chunk_tokens`, tokens never.
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

    def refuse(self, request: Request) -> None:
        """Notes that a request cannot be admitted now: there is no row, or not enough blocks.

        No request of its class that waits behind it may overtake it in this step.
        """
        self._refused.add(request.key)

    def refuse_long(self) -> None:
        """Notes that a long request finds no row or blocks: no other long one starts in this step.

        Short requests behind it may still be admitted.
        """
        self.has_refused_long = True

    # ---- the queue's questions ------------------------------------------------------------------

    def fit(self, num_new: int, num_cached: int, *, beside: StepWork = NO_WORK) -> int:
        """The longest chunk of this prompt that tokens and time allow; may be 0.

        `beside`: prompts without a grant that must fit too.
        """
        max_tokens = min(num_new, self._num_tokens_left - beside.num_prompt_tokens)
        if max_tokens <= 0:
            return 0
        if self._max_step_s is None:
            return max_tokens
        return self._costs.max_chunk_tokens(
            num_cached=num_cached,
            beside=self._work.with_work(beside),
            max_step_s=self._max_step_s,
            max_tokens=max_tokens,
        )

    def has_room(self, num_new: int, num_cached: int) -> bool:
        """Whether a chunk of this prompt fits and is long enough to be worth making."""
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
        """Each candidate in order, until one does not fit.

        After a refusal, also one in an earlier call, only running requests get a chunk. A request
        that has its chunk already is skipped.
        """
        is_closed = False
        for request in candidates:
            is_closed = is_closed or request.key in self._refused
            if request.key in self._granted or (is_closed and is_waiting(request)):
                continue
            if not self.has_room(*work_of(request)):
                return
            yield request, self._num_tokens_left
            is_closed = is_closed or request.key in self._refused

    def _without_padding(self, num_tokens: int, num_new: int) -> int:
        """Shortens a chunk, by half at most, so that its step has no padding."""
        if num_tokens == num_new or not self._graph_token_sizes:
            return num_tokens
        num_before = self._work.num_new_tokens
        place = bisect_right(self._graph_token_sizes, num_before + num_tokens)
        num_full = self._graph_token_sizes[place - 1] - num_before if place > 0 else 0
        return num_full if 2 * num_full >= num_tokens else num_tokens

    def _least(self, num_new: int) -> int:
        return min(num_new, self.min_chunk_tokens, self._num_tokens_left)


def rest_of_prompt(request: Request) -> tuple[int, int]:
    """New and cached tokens of the rest of a running request's prompt."""
    return request.num_uncomputed_tokens, request.num_computed_tokens
