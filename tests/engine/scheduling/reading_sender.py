"""A prefill worker's sender in the scheduler's world: it may read what it was told, at any time."""

from collections import Counter, deque
from collections.abc import Callable

from engine.kv.transfer import (
    HandoffDropped,
    HandoffProgress,
    HandoffReady,
    HandoffRetracted,
    OutgoingEvent,
    OutgoingHandoffs,
)
from engine.request import RequestKey
from tests.harness.fakes import FakeExecutor, Written, extend_histories

Readable = tuple[RequestKey, int]  # the second: how often the request was retracted before


class ReadingSender:
    """Answers retractions and drops when told to, so that some time passes before it does."""

    def __init__(self) -> None:
        self._blocks: dict[Readable, list[int]] = {}
        self._num_retracted: Counter[RequestKey] = Counter()
        self._unanswered: deque[HandoffRetracted | HandoffDropped] = deque()

    def on_event(self, event: OutgoingEvent) -> None:
        newest = (event.key, self._num_retracted[event.key])
        match event:
            case HandoffProgress():
                before = self._blocks.get(newest, [])
                assert event.block_ids[: len(before)] == before, "a block took another's place"
                assert len(event.block_ids) > len(before), "no progress was told"
                self._blocks[newest] = event.block_ids
            case HandoffReady():
                self._blocks[newest] = event.block_ids
            case HandoffRetracted():
                self._num_retracted[event.key] += 1
                self._unanswered.append(event)
            case HandoffDropped():
                self._unanswered.append(event)

    @property
    def num_unanswered(self) -> int:
        return len(self._unanswered)

    @property
    def ending(self) -> set[RequestKey]:
        """Requests that still hold something because of an unanswered event."""
        return {event.key for event in self._unanswered}

    def answer(self, outgoing: OutgoingHandoffs) -> None:
        """Nothing is read of what was retracted or dropped."""
        while self._unanswered:
            event = self._unanswered.popleft()
            if isinstance(event, HandoffDropped):
                self.forget(event.key)
                outgoing.release(event.key)
            else:
                if readable := [r for r in self._blocks if r[0] == event.key]:
                    del self._blocks[min(readable)]  # else the handoff is over
                outgoing.let_go(event.key)

    def forget(self, key: RequestKey) -> None:
        """The handoff is over."""
        self._blocks = {r: block_ids for r, block_ids in self._blocks.items() if r[0] != key}

    def check(
        self, executor: FakeExecutor, block_size: int, known: Callable[[RequestKey], list[int]]
    ) -> None:
        """What may be read is settled, and the KV of the tokens `known(key)`, block by block."""
        for (key, _), block_ids in self._blocks.items():
            unsettled = executor.blocks_unsettled.intersection(block_ids)
            assert not unsettled, f"{key}: blocks {unsettled} may be read, a step writes them"
            token_ids = known(key)
            histories: list[int] = []
            extend_histories(histories, token_ids)
            for position in range(min(len(block_ids) * block_size, len(token_ids))):
                block, slot = divmod(position, block_size)
                found = executor.content(block_ids[block], slot)
                due = Written(token_ids[position], position, histories[position])
                assert found == due, f"{key}: may send {found} for {due}"
