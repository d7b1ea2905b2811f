"""How many prompt tokens may be queued before new requests are refused."""

from typing import Literal

from engine.messages import Topology


class QueueLimit:
    """`edge.max_queued_tokens`; if it is `auto`, the sum of what workers that prefill report.

    A worker that restarts counts with what it reported last.
    """

    def __init__(self, configured: int | Literal["auto"]) -> None:
        self._configured = configured
        self._reported: dict[str, int] = {}

    @property
    def num_tokens(self) -> int | None:
        """None = no limit: no worker has reported yet, so none can have a queue."""
        if self._configured != "auto":
            return self._configured
        return sum(self._reported.values()) or None

    def update(self, topology: Topology) -> None:
        """Takes over what workers report; forgets those that are gone."""
        prefillers = {name for name, role in topology.roles.items() if role != "decode"}
        self._reported = {n: tokens for n, tokens in self._reported.items() if n in prefillers}
        for name in prefillers:
            status = topology.workers.get(name)
            identity = None if status is None else status.identity
            if identity is not None and identity.limits is not None:
                self._reported[name] = identity.limits.max_queued_tokens
