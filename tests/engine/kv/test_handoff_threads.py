"""D's books of a handoff, from two threads: one asks for leave to write, the engine's ends it."""

import threading
from collections.abc import Callable

import pytest

from engine.kv.handoff import BlockWrite, IncomingHandoffs
from tests.engine.kv.handoff_world import LEASE_S, Decode, asking, key_of, piece


class PausesInTheMiddle(IncomingHandoffs):
    """Who begins a write has found its transfer, and waits before looking at it."""

    has_found = threading.Event()
    may_go_on = threading.Event()

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
    reservation = decode.granted(asking(1, range(10)))
    if ending == "expired":
        decode.clock.advance(LEASE_S)
    PausesInTheMiddle.has_found.clear()
    PausesInTheMiddle.may_go_on.clear()
    writes: list[BlockWrite] = []
    header = piece(1, reservation, 0, 4)
    beginning = threading.Thread(
        target=lambda: writes.append(decode.incoming.begin_write(header)), daemon=True
    )
    ends = threading.Thread(target=lambda: ENDINGS[ending](decode.incoming), daemon=True)
    beginning.start()
    assert PausesInTheMiddle.has_found.wait(timeout=60)
    ends.start()
    ends.join(timeout=0.05)  # it cannot end now; without a lock it would have
    PausesInTheMiddle.may_go_on.set()
    for thread in (beginning, ends):
        thread.join(timeout=60)
        assert not thread.is_alive()
    [write] = writes
    assert decode.cache.num_held == 4, "freed under a write"
    decode.check()
    assert not decode.incoming.end_write(header.key, write, is_verified=True)
    assert decode.cache.num_held == 0
