"""An NCCL group of two ranks whose calls block, each up to a deadline.

As in nccl_pair.py, a peer that is dead is not noticed by NCCL: at the deadline the group is aborted
from another thread, because posting an operation may itself wait for the peer. An abort that fails,
or does not end, is not waited for: a piece is over only when every rank has answered. Memory of its
operation is never used again (kept_memory.py).
"""

import logging
import threading
import time
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from actors.kv_transfer.channels.gloo_pair import remove_keys
from actors.kv_transfer.channels.handshake import SENDER_RANK, Handshake, exchange_handshakes
from actors.kv_transfer.channels.kept_memory import keep_for_good
from actors.kv_transfer.channels.nccl_pair import (
    GroupFactory,
    NcclGroup,
    PairGroup,
)
from actors.kv_transfer.channels.posting_thread import ABORT_S, POLL_S
from actors.kv_transfer.channels.rendezvous_store import RendezvousStore
from actors.kv_transfer.contracts import RendezvousClient
from actors.kv_transfer.waits import IsOver
from engine.errors import HandoffError

logger = logging.getLogger(__name__)


class NcclWire:
    """One end; one call runs at a time. A failure ends it for good."""

    def __init__(
        self,
        handshake: Handshake,
        deadline_s: float,
        *,
        max_ctas: int = 0,
        make_group: GroupFactory | None = None,
    ) -> None:
        """make_group(store, rank); None = NCCL with so many blocks, on the handshake's device."""
        self.device = handshake.device
        self._handshake = handshake
        self._deadline_s = deadline_s
        self._max_ctas = max_ctas
        self._make_group = make_group or self._make_nccl_group
        self._cutting = threading.Lock()
        self._is_cut = False  # or about to be
        self._has_aborted = False  # nothing that was posted touches memory any more
        self._aborting: threading.Thread | None = None  # None = nothing was to be aborted
        self._store: RendezvousStore | None = None  # NCCL may call it until the group is gone
        self._group: PairGroup | None = None

    @property
    def is_open(self) -> bool:
        """Also before `open`; not after a failure or `close`."""
        return not self._is_cut

    def open(self, client: RendezvousClient, key: str) -> None:
        """Meets the other end, warms up (NCCL connects with the first bytes), checks the rate."""
        store = RendezvousStore(client, self._deadline_s)
        group = self._make_group(dist.PrefixStore(key, store), self._handshake.rank)
        with self._cutting:
            self._group, self._store = group, store
        del group  # an aborted group must be dropped
        exchange_handshakes(self, self._handshake)
        if self._handshake.rank == SENDER_RANK:
            remove_keys(client, key)

    def send(self, data: Tensor) -> None:
        """data: complete on the device."""
        self._wait("send", data, lambda group: group.send(data))

    def receive(self, data: Tensor) -> None:
        self._wait("receive", data, lambda group: group.receive(data))

    def close(self) -> None:
        """Aborts what runs, and waits for its end up to ABORT_S; from any thread, idempotent."""
        with self._cutting:
            self._is_cut = True
            if self._group is not None and self._aborting is None:
                self._aborting = threading.Thread(target=self._abort, daemon=True)
                self._aborting.start()
            aborting = self._aborting
        if aborting is None:
            return
        aborting.join(ABORT_S)
        if aborting.is_alive():
            epoch = self._handshake.epoch
            logger.error("a wire of epoch %d does not end in %g s", epoch, ABORT_S)

    def _abort(self) -> None:
        assert self._group is not None, "there is nothing to abort"
        try:
            self._group.abort()
            self._has_aborted = True
        except Exception:
            logger.exception("a wire of epoch %d was not cut", self._handshake.epoch)
        self._group = None  # before the store, which it may call until then
        self._store = None

    def _wait(self, verb: str, data: Tensor, post: Callable[[PairGroup], IsOver]) -> None:
        """Posts an operation on `data` and waits for its end.

        If it is aborted and that fails, or does not end, `data` is kept for good.
        """
        was_open = self._group is not None and self.is_open
        failure = self._failure_of(post)
        if failure is not None:
            if was_open and not self._has_aborted:
                keep_for_good(data)
            # Raised here and without the frames below: they hold the group, which may call the
            # store that `close` has dropped.
            raise HandoffError(f"the channel did not {verb}: {failure}")

    def _failure_of(self, post: Callable[[PairGroup], IsOver]) -> str | None:
        """Does what `_wait` says; returns why it failed."""
        group = self._group
        if group is None or not self.is_open:
            return f"that of epoch {self._handshake.epoch} is closed"
        deadline = threading.Timer(self._deadline_s, self.close)
        deadline.start()
        try:
            is_over = post(group)
            while not self._is_cut and not is_over():
                time.sleep(POLL_S)
        except RuntimeError as error:  # what torch raises
            self.close()
            return str(error)
        finally:
            deadline.cancel()
        if self._is_cut:
            self.close()  # whose abort another thread has begun
            return f"it was cut, or not over within {self._deadline_s} s"
        return None

    def _make_nccl_group(self, store: dist.Store, rank: int) -> PairGroup:
        return NcclGroup(store, rank, self.device, self._max_ctas)
