"""The tokens that a step sampled: recorded for their requests, and whether each was the last.

`FinishRules` decides when a request's tokens end (stop strings are the ingress's, which sees text);
`SampledTokens` adds a step's tokens to their requests and makes the records for the clients. It
reports which requests have their last token and ends none. Knows no blocks and no queue.
"""

from collections.abc import Iterable
from itertools import islice, repeat
from typing import Literal

from engine.messages import TokenRecord
from engine.plan import StepResult, TokenLogprobs
from engine.request import PromptScores, Request
from engine.scheduling.contracts import StepOutput
from engine.scheduling.in_flight import StepInFlight


class FinishRules:
    """Finish by eos, by a stop id, by max_tokens or by the context being full."""

    def __init__(self, eos_token_ids: tuple[int, ...], max_model_len: int) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len

    def apply(self, request: Request) -> None:
        """Store in a request what ends it here, so that no step has to compute it again."""
        request.max_known_tokens = min(request.max_known_tokens, self._max_model_len)
        if not request.params.ignore_eos:
            request.stop_ids |= self._eos_token_ids

    def reason(
        self, request: Request, token_id: int
    ) -> tuple[Literal["stop", "length"] | None, int | None]:
        """Returns why the request ends with its newest token, and the id that stopped it.

        (None, None) when it goes on. min_tokens needs no rule here: until it is reached the
        sampler does not draw eos or stop ids.
        """
        if token_id in request.stop_ids:
            return "stop", token_id
        if len(request.tokens) >= request.max_known_tokens:
            return "length", None
        return None, None

    def reason_of_prompt(self, request: Request) -> Literal["stop", "length"]:
        """Returns why a request for no token ends: it has its labels, or is at its length."""
        return "stop" if request.params.label_token_ids else "length"

    def num_steps_to_last(self, requests: Iterable[Request]) -> int:
        """Returns after how many decode steps `at_last_token` returns the first of these."""
        left = [
            0 if r.decode_worker is not None else r.max_known_tokens - 1 - r.num_computed_tokens
            for r in requests
        ]
        return min(left, default=0)

    def at_last_token(self, requests: Iterable[Request]) -> list[Request]:
        """Returns the requests that compute nothing after their newest token, which is in flight.

        That token ends them by their length, or they move with it to another worker. One that ends
        a request by its id is noticed when it comes back.
        """
        return [
            request
            for request in requests
            if request.num_computed_tokens + 1 >= request.max_known_tokens
            or request.decode_worker is not None
        ]


# A request with its last token here, and how it finished; None = another worker continues it.
Ending = tuple[Request, Literal["stop", "length"] | None]


class SampledTokens:
    """Appends tokens to requests and emits them, by one set of `FinishRules`."""

    def __init__(self, finish_rules: FinishRules) -> None:
        self._finish_rules = finish_rules
        self.num_tokens = 0  # emitted since the start

    def append_all(
        self, step: StepInFlight, result: StepResult, output: StepOutput
    ) -> list[Ending]:
        """Add what was sampled to requests that have a row and to `output`, in the plan's order.

        Most rows are decodes that continue: two comparisons find them, and nothing else has to be
        checked. All others go through `_append`, which is right for any row.
        """
        endings: list[Ending] = []
        emit = output.tokens.append
        for index, piece in result.prompt_logprobs.items():
            step.requests[index].keep_prompt_logprobs(piece)
        rows = step.rows(result)
        for request, token_ids, logprobs in islice(rows, step.num_decodes):
            if request.row is None or not token_ids:
                continue
            (token_id,) = token_ids  # a decode samples one, or none if it is not finite
            its_logprobs = None if logprobs is None else logprobs[0]
            tokens = request.tokens
            num_known = len(tokens)
            if token_id in request.stop_ids or num_known + 1 >= request.max_known_tokens:
                endings += self._append(request, token_id, its_logprobs, output)
                continue
            tokens.append(token_id)
            index = num_known - request.num_prompt_tokens
            record = TokenRecord(
                key=request.key, index=index, token_id=token_id, logprobs=its_logprobs
            )
            emit((request.ingress_id, record))
        for request, token_ids, logprobs in rows:
            if request.row is not None:
                endings += self._append_each(request, token_ids, logprobs, output)
        self.num_tokens += len(output.tokens)
        return endings + self._end_with_prompts(step, result, output)

    def _append_each(
        self,
        request: Request,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        output: StepOutput,
    ) -> list[Ending]:
        """Add and emit a step's tokens of one request, up to the one that ends it."""
        for token_id, its_logprobs in zip(token_ids, logprobs or repeat(None)):  # noqa: B905
            ending = self._append(request, token_id, its_logprobs, output)
            if ending:
                return ending
        return []

    def _append(
        self,
        request: Request,
        token_id: int,
        logprobs: TokenLogprobs | None,
        output: StepOutput,
    ) -> list[Ending]:
        """Add and emit one token; returns whether it is the request's last one here."""
        index = request.num_output_tokens
        is_first = index == request.num_emitted_tokens  # the first that this worker emits
        request.tokens.append(token_id)
        finish, stop_token_id = self._finish_rules.reason(request, token_id)
        record = TokenRecord(
            key=request.key,
            index=index,
            token_id=token_id,
            logprobs=logprobs,
            prompt=_take_scores(request, []) if is_first else None,
            num_cached_tokens=request.num_cached_tokens if is_first else None,
            waited_s=_waited_s(request) if is_first else None,
            finish=finish,
            stop_token_id=stop_token_id,
        )
        output.tokens.append((request.ingress_id, record))
        is_last = finish is not None or request.decode_worker is not None
        return [(request, finish)] if is_last else []

    def _end_with_prompts(
        self, step: StepInFlight, result: StepResult, output: StepOutput
    ) -> list[Ending]:
        """Ends requests that asked for no token once their prompt is computed; emits scores."""
        ended = [(step.requests[index], labels) for index, labels in result.labels.items()]
        return [
            self._end_with_prompt(request, labels, output)
            for request, labels in ended
            if request.row is not None
        ]

    def _end_with_prompt(self, request: Request, labels: list[float], output: StepOutput) -> Ending:
        finish = self._finish_rules.reason_of_prompt(request)
        record = TokenRecord(
            key=request.key,
            index=0,
            token_id=request.tokens[-1],
            is_output=False,
            prompt=_take_scores(request, labels),
            num_cached_tokens=request.num_cached_tokens,
            waited_s=_waited_s(request),
            finish=finish,
        )
        output.tokens.append((request.ingress_id, record))
        return request, finish


def _take_scores(request: Request, labels: list[float]) -> PromptScores | None:
    """Takes the prompt's scores out of the request; None = it asked for none."""
    pieces, request.prompt_logprobs = request.prompt_logprobs, []
    return PromptScores(labels, pieces) if labels or pieces else None


def _waited_s(request: Request) -> float | None:
    """Returns the wait before the prompt's first step; None if the request came with its KV."""
    return None if request.started_s is None else request.started_s - request.arrival_s
