"""Defines what the scheduler needs of a drafter and of a policy, and the n-gram drafter for it.

A drafter guesses the next tokens of requests; a policy says how many guesses a step verifies. Both
are asked by the engine thread while a step is planned, so what they take delays the step.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.cost_model import StepCosts
from engine.plan import all_given
from engine.request import Request, RequestKey
from engine.speculation.controller import SpeculationStatistics, StepDrafts, StepOffer
from engine.speculation.ngram import DEFAULT_RULES, END, NO_QUOTE, NgramDrafter, NgramRules, Quote
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

    @property
    def resumes_ahead(self) -> bool:
        """Whether it may be called for a request whose step in flight has no drafts."""
        ...

    def propose_ahead(self, asked: Sequence[tuple[Request, int, int]]) -> list[list[int]]:
        """As `propose`, while a step may be in flight; only the device has these drafts.

        asked: request, at most so many drafts, and how many tokens the step in flight gives it at
        most; 0 = it is in none. The drafts of that step were proposed here; it has some, unless
        `resumes_ahead`. Which tokens came before, and how many, may change nothing of the request's
        choice but the index of its noise. Returns `engine.plan.given` of each draft.
        """
        ...

    def tell(self, request: Request) -> list[tuple[int, list[int]]]:
        """What the device needs to find its drafts and was not told, as in `StepPlan.texts`.

        Asked once for each step with such drafts: it is told with it.
        """
        ...

    def read(self, requests: Iterable[Request]) -> None:
        """Do now, while the device computes, what `propose` needs of the requests' known tokens."""
        ...

    def add_finished(self, request: Request) -> None:
        """Learn from a complete answer."""
        ...

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that left its row; it may come back."""
        ...

    def arrived(self, request: Request) -> None:
        """The request came with its KV, and what it needs of `num_drafter_tokens` tokens with it.

        Its first `num_indexed_blocks` blocks were here before.
        """
        ...

    def forget_blocks(self, block_ids: Sequence[int]) -> None:
        """These blocks get another content."""
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

    @property
    def resumes_ahead(self) -> bool:
        """As it goes ahead at all: of its last proposals it keeps nothing that it needs."""
        return self.can_propose_ahead

    def propose_ahead(self, asked: Sequence[tuple[Request, int, int]]) -> list[list[int]]:
        raise AssertionError("its drafts follow from tokens that the host knows")

    def tell(self, request: Request) -> list[tuple[int, list[int]]]:
        """Nothing: no draft is looked up."""
        return []

    def read(self, requests: Iterable[Request]) -> None:  # noqa: B027
        """Does nothing: what it needs takes no time."""

    def arrived(self, request: Request) -> None:  # noqa: B027
        """Does nothing: it keeps nothing in blocks."""

    def forget_blocks(self, block_ids: Sequence[int]) -> None:  # noqa: B027
        """Does nothing, likewise."""


class DraftPolicy(Protocol):
    """Says how many drafts pay; see `engine.speculation.controller.SpeculationController`."""

    @property
    def keeps_limits(self) -> bool:
        """Whether it plans no draft that takes a step beyond `StepOffer.max_step_s`."""
        ...

    def bound(self, temperature: float, limit: int | None) -> int: ...

    def max_drafts(self, keys: Sequence[Hashable]) -> list[int]: ...

    def plan(self, offer: StepOffer, costs: StepCosts) -> StepDrafts: ...

    def observe(
        self, keys: Sequence[Hashable], num_drafts: Sequence[int], num_accepted: Sequence[int]
    ) -> None: ...

    def observe_step(
        self, drafts: StepDrafts, num_tokens: int, seconds: float | None, waited_s: float = 0.0
    ) -> None: ...

    def forget(self, key: Hashable) -> None: ...

    def statistics(self) -> SpeculationStatistics | None: ...


def most_drafts_ever(policy: DraftPolicy, request: Request) -> int:
    """That a request may have in a step; one that asks for drafts gets them at any temperature."""
    limit = request.spec.max_drafts
    return policy.bound(request.params.temperature if limit is None else 0.0, limit)


class FixedDrafts:
    """The policy that verifies all drafts, up to a number a row and to what the step has room for.

    For measurements and tests: at a large batch it makes steps slower.
    """

    keeps_limits = False

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

    def observe_step(
        self, drafts: StepDrafts, num_tokens: int, seconds: float | None, waited_s: float = 0.0
    ) -> None:
        """Does nothing: the number is fixed."""

    def forget(self, key: Hashable) -> None:
        """Does nothing: nothing is kept."""

    def statistics(self) -> SpeculationStatistics | None:
        """None: nothing is measured."""
        return None


@dataclass(slots=True)
class _Told:
    """What the device has of a request to look up drafts in."""

    num_tokens: int = 0  # of its own text
    quote: Quote = NO_QUOTE
    has_quote: bool = False  # False = it has another one, or another request's


class RequestNgrams(HostDrafter):
    """`NgramDrafter` for requests; those with a salt share no answers with others.

    Where the device can look up drafts, a request that has some goes on with those that the device
    finds behind the tokens in flight, for as long as what is known of it has a match. The device
    searches the request's own text, and of finished answers a quote around the match if that is the
    longer one.
    """

    def __init__(self, rules: NgramRules = DEFAULT_RULES, *, on_device: bool = False) -> None:
        """on_device: `engine.runner.row_texts` looks up drafts by the same rules."""
        self.ngrams = NgramDrafter(rules)
        self._rules = rules
        self._on_device = on_device
        self._told: dict[RequestKey, _Told] = {}

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
        told = self._told_of(request)
        num_after, with_corpus = num_in_flight + num_drafts, not request.spec.salt
        given_text = request.key, request.tokens, told.quote, num_after
        quote = self.ngrams.quote(*given_text, with_corpus=with_corpus)
        if quote is None:
            return []
        if quote is not told.quote:
            told.quote, told.has_quote = quote, False
        return all_given(num_drafts)

    def _told_of(self, request: Request) -> _Told:
        told = self._told.get(request.key)
        if told is None:
            told = self._told[request.key] = _Told()
        return told

    def tell(self, request: Request) -> list[tuple[int, list[int]]]:
        told = self._told_of(request)
        new = [(told.num_tokens, request.tokens[told.num_tokens :])]
        told.num_tokens = request.num_known_tokens
        if not told.has_quote:
            size = self._rules.quote_tokens
            blanks = [END] * (size - len(told.quote.token_ids))
            new.append((-size, blanks + told.quote.token_ids))
            told.has_quote = True
        return new

    def read(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.ngrams.extend(request.key, request.tokens)

    def add_finished(self, request: Request) -> None:
        if not request.spec.salt:
            self.ngrams.add_finished(request.tokens[request.num_prompt_tokens :])

    def forget(self, request: Request) -> None:
        self.ngrams.forget(request.key)
        self._told.pop(request.key, None)
