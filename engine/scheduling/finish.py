"""When a request's tokens end. Stop strings are not here: only the ingress sees text."""

from collections.abc import Iterable
from typing import Literal

from engine.request import Request


class FinishRules:
    """Finish by eos, by a stop id, by max_tokens or by the context being full."""

    def __init__(self, eos_token_ids: tuple[int, ...], max_model_len: int) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len

    def apply(self, request: Request) -> None:
        """Write to a request what ends it here, so that no step has to put it together again."""
        request.max_known_tokens = min(request.max_known_tokens, self._max_model_len)
        if not request.params.ignore_eos:
            request.stop_ids |= self._eos_token_ids

    def reason(
        self, request: Request, token_id: int
    ) -> tuple[Literal["stop", "length"] | None, int | None]:
        """Why the request ends with `token_id`, its newest token, and the id that stopped it.

        (None, None) when it goes on. min_tokens needs no rule here: until it is reached the
        sampler does not draw eos or stop ids.
        """
        if token_id in request.stop_ids:
            return "stop", token_id
        if len(request.tokens) >= request.max_known_tokens:
            return "length", None
        return None, None

    def reason_of_prompt(self, request: Request) -> Literal["stop", "length"]:
        """Why a request ends that asks for no token: it has its labels, or has no room for more."""
        return "stop" if request.params.label_token_ids else "length"

    def num_steps_to_last(self, requests: Iterable[Request]) -> int:
        """So many steps later `at_last_token` names the first of these, who decode until then."""
        left = [
            0 if r.decode_worker is not None else r.max_known_tokens - 1 - r.num_computed_tokens
            for r in requests
        ]
        return min(left, default=0)

    def at_last_token(self, requests: Iterable[Request]) -> list[Request]:
        """Of requests whose newest token is in flight, those that have no other to compute here.

        That token ends them by their length, or they move with it to another worker. One that ends
        a request by its id is noticed when it comes back.
        """
        return [
            request
            for request in requests
            if request.num_computed_tokens + 1 >= request.max_known_tokens
            or request.decode_worker is not None
        ]
