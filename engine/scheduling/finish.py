"""Appends the tokens that a step sampled to their requests and decides which requests end.

`FinishRules` decides whether a token ends its request (stop strings are checked by the ingress,
which sees text). `SampledTokens` appends a step's tokens to their requests and makes the records
for the clients. It reports the requests that have their last token but does not end them. Knows no
blocks and no queue.
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
    """Ends a request on eos, a stop id, max_tokens or a full context."""

    def __init__(self, eos_token_ids: tuple[int, ...], max_model_len: int) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = max_model_len

    def apply(self, request: Request) -> None:
        """Write the length limit and the stop ids to the request, once, for use in every step."""
        request.max_known_tokens = min(request.max_known_tokens, self.max_model_len)
        if not request.params.ignore_eos:
            request.stop_ids |= self._eos_token_ids

    def reason(
        self, request: Request, token_id: int
    ) -> tuple[Literal["stop", "length"] | None, int | None]:
        """Finish reason if `token_id`, the request's newest token, ends it, and the stop id.

        Returns (None, None) if the request continues. min_tokens needs no rule here: until it is
        reached the sampler does not draw eos or stop ids.
        """
        if token_id in request.stop_ids:
            return "stop", token_id
        if len(request.tokens) >= request.max_known_tokens:
            return "length", None
        return None, None

    def reason_of_prompt(self, request: Request) -> Literal["stop", "length"]:
        """Finish reason of a prompt-only request: "length" if it asks for log-probabilities."""
        params = request.params
        return "stop" if params.label_token_ids or params.wants_embedding else "length"

    def last_count(self, request: Request) -> int:
        """The computed tokens from which on `at_last_token` returns the request."""
        return 0 if request.decode_worker is not None else request.max_known_tokens - 1

    def at_last_token(self, requests: Iterable[Request]) -> list[Request]:
        """Requests (each with a newest token in flight) that have nothing more to compute here.

        The token in flight ends them by length, or they move with it to another worker. A token
        that ends its request by its id is noticed only when its result arrives.
        """
        return [r for r in requests if r.num_computed_tokens >= self.last_count(r)]


# A request with its last token here, and its finish reason; None = it continues on another worker.
Ending = tuple[Request, Literal["stop", "length"] | None]


class SampledTokens:
    """Appends tokens to requests and emits records, according to one set of `FinishRules`."""

    def __init__(self, finish_rules: FinishRules) -> None:
        self._finish_rules = finish_rules
        self.num_tokens = 0  # emitted since the start

    def append_all(
        self, step: StepInFlight, result: StepResult, output: StepOutput
    ) -> list[Ending]:
        """Append what was sampled to requests that have a row and to `output`, in the plan's order.

        Fast path: most rows are decodes that continue. Two comparisons find these, and their
        records need no other field. All other rows go through `_append`, which is right for any.
        """
        endings: list[Ending] = []
        emit = output.tokens.append
        for index, piece in result.prompt_logprobs.items():
            step.requests[index].keep_prompt_logprobs(piece)
        rows = step.rows(result)
        for request, token_ids, logprobs in islice(rows, step.num_decodes):
            if request.row is None or not token_ids:
                continue
            if len(token_ids) > 1:  # it had drafts
                endings += self._append_several(request, token_ids, logprobs, output)
                continue
            (token_id,) = token_ids  # a decode samples a token; none if its logits are not finite
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

    def _append_several(
        self,
        request: Request,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        output: StepOutput,
    ) -> list[Ending]:
        """As `_append_each`, of a decode: all at once if it continues after them."""
        num_known = len(request.tokens)
        is_full = num_known + len(token_ids) >= request.max_known_tokens
        if is_full or not request.stop_ids.isdisjoint(token_ids):
            return self._append_each(request, token_ids, logprobs, output)
        request.tokens += token_ids
        key, ingress_id = request.key, request.ingress_id
        first = num_known - request.num_prompt_tokens
        of_tokens = zip(token_ids, logprobs or repeat(None))  # noqa: B905
        output.tokens.extend(
            [
                (ingress_id, TokenRecord(key=key, index=index, token_id=token_id, logprobs=its))
                for index, (token_id, its) in enumerate(of_tokens, first)
            ]
        )
        return []

    def _append_each(
        self,
        request: Request,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        output: StepOutput,
    ) -> list[Ending]:
        """Append and emit a step's tokens of one request, up to the one that ends it."""
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
        """Append and emit one token; returns its ending if it is the last one here."""
        index = request.num_output_tokens
        is_first = index == request.num_emitted_tokens  # the first emitted by this worker
        request.tokens.append(token_id)
        finish, stop_token_id = self._finish_rules.reason(request, token_id)
        record = TokenRecord(
            key=request.key,
            index=index,
            token_id=token_id,
            logprobs=logprobs,
            prompt=_take_scores(request) if is_first else None,
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
        """Emit a record for each prompt-only request whose prompt this step completed."""
        ended = [(step.requests[index], labels, b"") for index, labels in result.labels.items()]
        ended += [(step.requests[index], [], found) for index, found in result.embeddings.items()]
        return [
            self._end_with_prompt(request, _take_scores(request, labels, embedding), output)
            for request, labels, embedding in ended
            if request.row is not None
        ]

    def _end_with_prompt(
        self, request: Request, scores: PromptScores | None, output: StepOutput
    ) -> Ending:
        finish = self._finish_rules.reason_of_prompt(request)
        record = TokenRecord(
            key=request.key,
            index=0,
            token_id=request.tokens[-1],
            is_output=False,
            prompt=scores,
            num_cached_tokens=request.num_cached_tokens,
            waited_s=_waited_s(request),
            finish=finish,
        )
        output.tokens.append((request.ingress_id, record))
        return request, finish


def _take_scores(
    request: Request, labels: list[float] | None = None, embedding: bytes = b""
) -> PromptScores | None:
    """Remove the prompt's scores from the request and return them; None = none were asked for."""
    pieces, request.prompt_logprobs = request.prompt_logprobs, []
    if not (labels or pieces or embedding):
        return None
    return PromptScores(labels or [], pieces, embedding)


def _waited_s(request: Request) -> float | None:
    """Seconds from arrival to its prompt's first step; None for a request that joined with KV."""
    return None if request.started_s is None else request.started_s - request.arrival_s
