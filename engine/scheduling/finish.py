"""When a request's tokens end. Stop strings are not here: only the ingress sees text."""

from typing import Literal

from engine.request import Request


class FinishRules:
    """Finish by eos, by a stop id, by max_tokens or by the context being full."""

    def __init__(self, eos_token_ids: tuple[int, ...], max_model_len: int) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len

    def reason(
        self, request: Request, token_id: int
    ) -> tuple[Literal["stop", "length"] | None, int | None]:
        """Why the request ends with `token_id`, its newest token, and the id that stopped it.

        (None, None) when it goes on. min_tokens needs no rule here: until it is reached the
        sampler does not draw eos or stop ids.
        """
        is_eos = token_id in self._eos_token_ids and not request.params.ignore_eos
        if is_eos or token_id in request.params.stop_token_ids:
            return "stop", token_id
        if request.num_known_tokens >= self.max_known_tokens(request):
            return "length", None
        return None, None

    def max_known_tokens(self, request: Request) -> int:
        """The length at which the request ends, whatever its tokens are."""
        return min(request.max_known_tokens, self._max_model_len)
