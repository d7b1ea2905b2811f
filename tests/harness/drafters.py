"""Drafters that are right as often as a test wants, for requests whose answers are known."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.cost_model import StepCosts
from engine.plan import given
from engine.request import Request
from engine.scheduling.drafting import Drafting
from engine.speculation.controller import StepDrafts, StepOffer
from engine.speculation.drafter import FixedDrafts, HostDrafter
from tests.harness.fakes import Draft, extend_histories, next_token

AnswerOf = Callable[[Request], Sequence[int]]


class Guesser(HostDrafter):
    """Proposes a request's next tokens, each wrong with a probability, and sometimes fewer."""

    def __init__(
        self,
        answer_of: AnswerOf,
        *,
        vocab_size: int,
        error_rate: float = 0.0,
        silence_rate: float = 0.0,
        pass_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        """answer_of: all output tokens of a request. silence_rate: of proposals without a draft."""
        self.num_proposals = 0
        self.finished: list[list[int]] = []
        self.wrong_id: int | None = None  # what it guesses where it is wrong; None = anything
        self._answer_of = answer_of
        self._vocab_size = vocab_size
        self._error_rate = error_rate
        self._silence_rate = silence_rate
        self._pass_s = pass_s
        self._draw = random.Random(seed)

    @property
    def pass_s(self) -> float:
        return self._pass_s

    @property
    def spent_s(self) -> float:
        return 2 * self._pass_s

    def propose(self, asked: Sequence[tuple[Request, int]]) -> list[list[int]]:
        return [self._propose(request, num_drafts) for request, num_drafts in asked]

    def _propose(self, request: Request, num_drafts: int) -> list[int]:
        self.num_proposals += 1
        if self._draw.random() < self._silence_rate:
            return []
        known = request.num_output_tokens
        answer = list(self._answer_of(request)[known : known + num_drafts])
        answer += self._draw.choices(range(self._vocab_size), k=num_drafts - len(answer))
        return [self._perhaps_wrong(token_id) for token_id in answer]

    def _perhaps_wrong(self, token_id: int) -> int:
        if self._draw.random() >= self._error_rate:
            return token_id
        wrong_id = self._draw.randrange(self._vocab_size)
        return wrong_id if self.wrong_id is None else self.wrong_id

    def add_finished(self, request: Request) -> None:
        self.finished.append(request.tokens[request.num_prompt_tokens :])

    def forget(self, request: Request) -> None:
        pass


class DeviceGuesser(Guesser):
    """Likewise of a `FakeExecutor`'s answers; where it may, its drafts stay on that device."""

    @property
    def can_propose_ahead(self) -> bool:
        return True

    def propose_ahead(self, asked: Sequence[tuple[Request, int, int]]) -> list[list[int]]:
        return [self._propose_ahead(num_drafts) for _, num_drafts, _ in asked]

    def _propose_ahead(self, num_drafts: int) -> list[int]:
        self.num_proposals += 1
        if self._draw.random() < self._silence_rate:
            return []
        return [given(place) for place in range(self._draw.randint(1, num_drafts))]

    def draft(self, seed: int, tokens: Sequence[int], num_drafts: int) -> list[int]:
        """As of `FakeExecutor`."""
        histories: list[int] = []
        known = list(tokens)
        for _ in range(num_drafts):
            extend_histories(histories, known)
            known.append(self._perhaps_wrong(next_token(seed, histories[-1])))
        return known[len(tokens) :]


def on_device(drafting: Drafting | None) -> Draft | None:
    """What a `FakeExecutor` has of the drafter; None = nothing."""
    drafter = None if drafting is None else drafting.drafter
    return drafter.draft if isinstance(drafter, DeviceGuesser) else None


class EveryOtherStep(FixedDrafts):
    """Gives no draft in every other step."""

    _gives = False

    def plan(self, offer: StepOffer, costs: StepCosts) -> StepDrafts:
        self._gives = not self._gives
        found = super().plan(offer, costs)
        return found if self._gives else replace(found, num_drafts=[0] * len(offer.keys))


class RandomDrafts(FixedDrafts):
    """Gives each row any number of drafts in each step, often none."""

    def __init__(self, num_drafts: int, *, seed: int, max_temperature: float = math.inf) -> None:
        super().__init__(num_drafts, max_temperature=max_temperature)
        self._draw = random.Random(seed)

    def plan(self, offer: StepOffer, costs: StepCosts) -> StepDrafts:
        found = super().plan(offer, costs)
        return replace(found, num_drafts=[self._draw.randint(0, n) for n in found.num_drafts])
