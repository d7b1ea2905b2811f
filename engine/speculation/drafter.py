"""Defines what the scheduler needs of a drafter and of a policy, and the n-gram drafter for it.

A drafter guesses the next tokens of requests; a policy says how many guesses a step verifies. Both
are asked by the engine thread while a step is planned, so what they take delays the step.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Protocol

from engine.cost_model import StepCosts
from engine.plan import given
from engine.request import Request, RequestKey
from engine.speculation.controller import SpeculationStatistics, StepDrafts, StepOffer
from engine.speculation.ngram import DEFAULT_RULES, NgramDrafter, NgramRules
from engine.turns import Turns


class Drafter(Protocol):
    """Guesses tokens. A wrong guess costs time and never changes an answer."""

    @property
    def pass_s(self) -> float:
        """Seconds that another draft takes for all requests together; 0 = too few to count."""
        ...

    @property
    def spent_s(self) -> float:
        """Seconds that the last proposal took; 0 = too few to count."""
        ...

    def propose(self, asked: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """For each request at most so many tokens that may follow its known ones, perhaps none.

        All its known tokens but the newest have KV, and its blocks have room for the drafts.
        """
        ...

    def proposing(self, asked: Sequence[tuple[Request, int]]) -> Turns[list[list[int]]]:
        """As `propose`, in turns."""
        ...

    @property
    def can_propose_ahead(self) -> bool:
        """Whether `propose_ahead` may be called."""
        ...

    def propose_ahead(self, asked: Sequence[tuple[Request, int, int]]) -> list[list[int]]:
        """As `propose`, while a step may be in flight; only the device has these drafts.

        asked: request, at most so many drafts, and how many tokens the step in flight gives it at
        most, whose drafts were proposed here; 0 = it is in none. Which tokens came before, and how
        many, may change nothing of its choice but the index of its noise. Returns
        `engine.plan.given` of each draft.
        """
        ...

    def tell(self, request: Request) -> tuple[int, list[int]]:
        """The tokens that the device needs to find its drafts, and was not told; and their index.

        Asked once for each step with such drafts: they are told with it.
        """
        ...

    def add_finished(self, request: Request) -> None:
        """Learn from a complete answer."""
        ...

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that left its row; it may come back."""
        ...


class HostDrafter(ABC):
    """Part of a drafter whose drafts follow from tokens that the host knows."""

    @abstractmethod
    def propose(self, asked: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """As of `Drafter`."""

    def proposing(self, asked: Sequence[tuple[Request, int]]) -> Turns[list[list[int]]]:
        """In one turn: it never waits."""
        yield from ()
        return self.propose(asked)

    @property
    def can_propose_ahead(self) -> bool:
        return False

    def propose_ahead(self, asked: Sequence[tuple[Request, int, int]]) -> list[list[int]]:
        raise AssertionError("its drafts follow from tokens that the host knows")

    def tell(self, request: Request) -> tuple[int, list[int]]:
        """Nothing: no draft is looked up."""
        return 0, []


class DraftPolicy(Protocol):
    """Says how many drafts pay; see `engine.speculation.controller.SpeculationController`."""

    def bound(self, temperature: float, limit: int | None) -> int: ...

    def max_drafts(self, keys: Sequence[Hashable]) -> list[int]: ...

    def plan(self, offer: StepOffer, costs: StepCosts) -> StepDrafts: ...

    def observe(
        self, keys: Sequence[Hashable], num_drafts: Sequence[int], num_accepted: Sequence[int]
    ) -> None: ...

    def observe_step(self, drafts: StepDrafts, num_tokens: int, seconds: float | None) -> None: ...

    def forget(self, key: Hashable) -> None: ...

    def statistics(self) -> SpeculationStatistics | None: ...


class FixedDrafts:
    """The policy that verifies all drafts, up to a number a row and to what the step has room for.

    For measurements and tests: at a large batch it makes steps slower.
    """

    def __init__(self, num_drafts: int, *, max_temperature: float = math.inf) -> None:
        self._num_drafts = num_drafts
        self._max_temperature = max_temperature

    def bound(self, temperature: float, limit: int | None) -> int:
        if temperature > self._max_temperature:
            return 0
        return self._num_drafts if limit is None else min(self._num_drafts, limit)

    def max_drafts(self, keys: Sequence[Hashable]) -> list[int]:
        return [self._num_drafts] * len(keys)

    def plan(self, offer: StepOffer, costs: StepCosts) -> StepDrafts:
        num_left = offer.max_draft_tokens
        counts: list[int] = []
        for most in offer.max_drafts:
            counts.append(most if num_left is None else min(most, num_left))
            num_left = None if num_left is None else num_left - counts[-1]
        plain_s = costs.step_seconds(offer.work)
        return StepDrafts(
            num_drafts=counts,
            expected_tokens=float(len(counts)),
            rows_s=plain_s,
            plain_s=plain_s,
            step_s=plain_s,
        )

    def observe(
        self, keys: Sequence[Hashable], num_drafts: Sequence[int], num_accepted: Sequence[int]
    ) -> None:
        """Does nothing: the number is fixed."""

    def observe_step(self, drafts: StepDrafts, num_tokens: int, seconds: float | None) -> None:
        """Does nothing: the number is fixed."""

    def forget(self, key: Hashable) -> None:
        """Does nothing: nothing is kept."""

    def statistics(self) -> SpeculationStatistics | None:
        """None: nothing is measured."""
        return None


class RequestNgrams(HostDrafter):
    """`NgramDrafter` for requests; those with a salt share no answers with others.

    Where the device can look up drafts, a request that has some goes on with those that the device
    finds in its text, behind the tokens in flight, for as long as what is known of it has a match.
    """

    def __init__(self, rules: NgramRules = DEFAULT_RULES, *, on_device: bool = False) -> None:
        """on_device: `engine.runner.row_texts` looks up drafts by the same rules."""
        self.ngrams = NgramDrafter(rules)
        self._on_device = on_device
        self._nums_told: dict[RequestKey, int] = {}

    @property
    def pass_s(self) -> float:
        return 0.0

    @property
    def spent_s(self) -> float:
        return 0.0

    def propose(self, asked: Sequence[tuple[Request, int]]) -> list[list[int]]:
        return [
            self.ngrams.propose(
                request.key, request.tokens, num_drafts, with_corpus=not request.spec.salt
            )
            for request, num_drafts in asked
        ]

    @property
    def can_propose_ahead(self) -> bool:
        return self._on_device

    def propose_ahead(self, asked: Sequence[tuple[Request, int, int]]) -> list[list[int]]:
        return [self._propose_ahead(*one) for one in asked]

    def _propose_ahead(self, request: Request, num_drafts: int, num_in_flight: int) -> list[int]:
        if num_in_flight == 0:  # all of its text is known
            (found,) = self.propose([(request, num_drafts)])
            ends = (at for at, token_id in enumerate(found) if token_id in request.stop_ids)
            return found[: next(ends, num_drafts)]
        has_match = self.ngrams.propose(request.key, request.tokens, 1, with_corpus=False)
        return [given(place) for place in range(num_drafts)] if has_match else []

    def tell(self, request: Request) -> tuple[int, list[int]]:
        start = self._nums_told.get(request.key, 0)
        self._nums_told[request.key] = request.num_known_tokens
        return start, request.tokens[start:]

    def add_finished(self, request: Request) -> None:
        if not request.spec.salt:
            self.ngrams.add_finished(request.tokens[request.num_prompt_tokens :])

    def forget(self, request: Request) -> None:
        self.ngrams.forget(request.key)
        self._nums_told.pop(request.key, None)
