"""Requests that have a row: those whose prompt computes, and those that compute a token every step.

    add() -> prompts -> decodes -> paused -> remove()
             computes   computes   its last token here is in flight: nothing is left to compute
             chunks     one token

A request moves to the right once for every time it gets a row, and may be removed from anywhere.
One with a constraint is paused after every step, until its token came: what it may sample next
depends on that token.
Each step plans all `decodes` alike, so that nobody has to be asked what it would compute next.
Knows no rows, no blocks and no steps.
"""

from collections.abc import Iterable, Iterator

from engine.request import Request, RequestKey
from engine.scheduling.decode_columns import DecodeColumns


class RunningRequests:
    """Ordered dicts by key: `prompts` and the whole by admission, `decodes` by when it began."""

    def __init__(self) -> None:
        self._all: dict[RequestKey, Request] = {}
        self.prompts: dict[RequestKey, Request] = {}
        self.decodes: dict[RequestKey, Request] = {}
        self._constrained: dict[RequestKey, Request] = {}
        self._columns: DecodeColumns | None = None  # of `decodes`; None = these have changed

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._all

    def __iter__(self) -> Iterator[Request]:
        """All of them, oldest admission first."""
        return iter(self._all.values())

    @property
    def newest(self) -> Request:
        return next(reversed(self._all.values()))

    def newest_beside(self, request: Request | None) -> Request:
        """The newest but this one, which is the answer if nobody else is here."""
        return next((r for r in reversed(self._all.values()) if r is not request), self.newest)

    @property
    def decode_columns(self) -> DecodeColumns:
        """Those who decode now, in order."""
        if self._columns is None:
            self._columns = DecodeColumns(self.decodes.values())
        return self._columns

    @property
    def num_queued_tokens(self) -> int:
        """What they have yet to compute, as far as it is known."""
        num_prompt_tokens = sum([r.num_uncomputed_tokens for r in self.prompts.values()])
        return num_prompt_tokens + len(self.decodes)

    def get(self, key: RequestKey) -> Request | None:
        return self._all.get(key)

    def add(self, request: Request) -> None:
        """Take in a request whose known tokens are to be computed in chunks."""
        self._all[request.key] = self.prompts[request.key] = request
        if request.params.constraint is not None:
            self._constrained[request.key] = request

    def begin_decode(self, request: Request) -> None:
        """From the next step on the request computes one token a step: its newest."""
        self.prompts.pop(request.key)
        self.decodes[request.key] = request
        self._columns = None

    def pause(self, requests: Iterable[Request]) -> None:
        """Plan no more for these: each has its last token in flight."""
        for request in requests:
            del self.decodes[request.key]
            self._columns = None

    def hold_constrained(self) -> list[Request]:
        """Pause decodes with a constraint, each with a token in flight; they are to `resume`."""
        held = [r for r in self._constrained.values() if r.key in self.decodes]
        self.pause(held)
        return held

    def resume(self, held: Iterable[Request]) -> None:
        """The tokens of what was held came: those that still run decode on."""
        for request in held:
            if self._all.get(request.key) is request:
                self.decodes[request.key] = request
                self._columns = None

    def remove(self, request: Request) -> None:
        del self._all[request.key]
        self.prompts.pop(request.key, None)
        if self.decodes.pop(request.key, None) is not None:
            self._columns = None
        self._constrained.pop(request.key, None)

    def has_prefilling_sibling(self, request: Request, block_size: int) -> bool:
        """Whether another choice of the same request is computing the prompt they share."""
        num_shared_blocks = (request.num_prompt_tokens - 1) // block_size
        return request.key.child > 0 and any(
            other.key.request_id == request.key.request_id
            and other.num_indexed_blocks < num_shared_blocks
            for other in self
        )
