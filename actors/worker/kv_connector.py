"""A worker's part in KV transfer, as its engine host sees it; this one has none."""

from typing import TYPE_CHECKING

from engine.request import RequestKey

if TYPE_CHECKING:
    from engine.kv.transfer import OutgoingEvent


class KvConnector:
    """The connector of a unified worker, which moves no KV."""

    def cancel(self, key: RequestKey) -> None:
        """Forget a request in any phase of its handoff."""

    def drop_ingress(self, ingress_id: str) -> None:
        """Forget every request of an ingress that went silent."""

    def keys_of(self, ingress_id: str) -> list[RequestKey]:
        """Returns an ingress's requests that left the scheduler and did not arrive yet."""
        return []

    def on_outgoing(self, event: "OutgoingEvent") -> None:
        """Takes an event of a prompt whose KV will move: it started, is computed or has ended."""
        raise AssertionError(f"{event} on a worker that sends nothing")

    def on_step(self) -> None:
        """Notes that a step was committed: blocks and rows may be free now."""

    @property
    def num_handoffs(self) -> int:
        """The number of requests in transfer that still hold something here."""
        return 0

    def owners(self) -> dict[str, list[int]]:
        """Holders of block references here; on the engine thread."""
        return {}

    def statistics(self) -> dict[str, object]:
        """Sizes and counters, by part."""
        return {}
