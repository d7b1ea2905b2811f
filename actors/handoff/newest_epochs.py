"""Which channel each sender asked for last: older ones give way, in whatever phase they are.

A sender counts its epochs from 1 in every life, which its incarnation names. A call of a life that
is over may come late, by a connection of its own: it must not end the channel of its successor.
"""

import asyncio
from dataclasses import dataclass

from actors.handoff.waits import settle
from engine.errors import HandoffError
from engine.messages import WorkerIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class _Newest:
    incarnation: str
    epoch: int
    earlier_incarnation: str  # "" = none
    superseded: asyncio.Future[None]


class NewestEpochs:
    """Of all senders that one receiver has met. Belongs to the event loop."""

    def __init__(self) -> None:
        self._newest: dict[str, _Newest] = {}  # by sender's name

    def ask(self, sender: WorkerIdentity, epoch: int) -> asyncio.Future[None]:
        """Make it the newest; the future ends when it is not that any more.

        Raises HandoffError if a newer one was asked for before.
        """
        before = self._newest.get(sender.name)
        earlier = "" if before is None else before.earlier_incarnation
        if before is not None:
            if sender.incarnation == before.earlier_incarnation:
                raise HandoffError(f"{sender.name} has been replaced since")
            if sender.incarnation != before.incarnation:
                earlier = before.incarnation
            elif epoch <= before.epoch:
                raise HandoffError(f"epoch {epoch} is not newer than {before.epoch}")
            settle(before.superseded, None)
        newest = _Newest(
            incarnation=sender.incarnation,
            epoch=epoch,
            earlier_incarnation=earlier,
            superseded=asyncio.get_running_loop().create_future(),
        )
        self._newest[sender.name] = newest
        return newest.superseded
