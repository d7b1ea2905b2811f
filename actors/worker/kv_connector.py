"""A worker's part in the handoff, as its engine host sees it; this one has none."""

from typing import TYPE_CHECKING

from engine.request import RequestKey

if TYPE_CHECKING:
    from engine.kv.transfer import OutgoingEvent


class KvConnector:
    """The connector of a unified worker, which moves no KV."""

    def cancel(self, key: RequestKey) -> None:
        """Forget a request in any phase of its handoff."""

    def drop_ingress(self, ingress_id: str) -> None:
        """The same for every request of an ingress that went silent."""

    def keys_of(self, ingress_id: str) -> list[RequestKey]:
        """An ingress's requests that have left the scheduler and not arrived; engine thread."""
        return []

    def on_outgoing(self, event: "OutgoingEvent") -> None:
        """A prompt whose KV is to move started, is computed or ended."""
        raise AssertionError(f"{event} on a worker that sends nothing")

    def on_step(self) -> None:
        """A step was committed: blocks and rows may be free now."""

    @property
    def num_handoffs(self) -> int:
        """Requests between two workers that still hold something here."""
        return 0

    def owners(self) -> dict[str, list[int]]:
        """Holders of block references here; on the engine thread."""
        return {}

    def statistics(self) -> dict[str, object]:
        """Sizes and counters, by part."""
        return {}
