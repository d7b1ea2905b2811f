"""Drafters that are right as often as a test wants, for requests whose answers are known."""

import random
from collections.abc import Callable, Sequence

from engine.request import Request
from engine.speculation.drafter import HostDrafter

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
        return self._draw.randrange(self._vocab_size)

    def add_finished(self, request: Request) -> None:
        self.finished.append(request.tokens[request.num_prompt_tokens :])

    def forget(self, request: Request) -> None:
        pass
