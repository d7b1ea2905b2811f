"""D's books of a handoff, from two threads: one asks for leave to write, the engine's ends it."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from engine.kv.transfer import BlockWrite, IncomingHandoffs
from tests.engine.kv.handoff_world import LEASE_S, Decode, asking, key_of, piece


class WatchedLock:
    """Says when somebody waits for it."""

    def __init__(self) -> None:
        self.is_awaited = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.is_awaited.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class PausesInTheMiddle(IncomingHandoffs):
    """Who begins a write has found its transfer, and waits before looking at it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lock = WatchedLock()
        self._writes = self.lock  # type: ignore[assignment]
        self.has_found = threading.Event()
        self.may_go_on = threading.Event()

    def _check_epoch(self, transfer: object, epoch: int) -> None:
        self.has_found.set()
        assert self.may_go_on.wait(timeout=60)


ENDINGS: dict[str, Callable[[IncomingHandoffs], object]] = {
    "cancelled": lambda incoming: incoming.cancel(key_of(1)),
    "expired": lambda incoming: incoming.expire(),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_blocks_stay_while_a_write_begins_on_another_thread_as_its_transfer_ends(
    ending: str,
) -> None:
    decode = Decode(incoming_class=PausesInTheMiddle)
    incoming = decode.incoming
    assert isinstance(incoming, PausesInTheMiddle)
    reservation = decode.granted(asking(1, range(10)))
    if ending == "expired":
        decode.clock.advance(LEASE_S)
    writes: list[BlockWrite] = []
    header = piece(1, reservation, 0, 4)
    beginning = threading.Thread(
        target=lambda: writes.append(incoming.begin_write(header)), daemon=True
    )
    ends = threading.Thread(target=lambda: ENDINGS[ending](incoming), daemon=True)
    beginning.start()
    assert incoming.has_found.wait(timeout=60)
    ends.start()
    assert incoming.lock.is_awaited.wait(timeout=60), "it ended under the one that begins"
    incoming.may_go_on.set()
    for thread in (beginning, ends):
        thread.join(timeout=60)
        assert not thread.is_alive()
    [write] = writes
    assert decode.cache.num_held == 4, "freed under a write"
    decode.check()
    assert not incoming.end_write(header.key, write, is_verified=True)
    assert decode.cache.num_held == 0
