"""Stored responses of /v1/responses where the ingress has several replicas.

Each replica keeps those that it answered. One that lacks a response asks the others, whose
addresses it has from the last exchange (replica_exchange.py), on behalf of an owner: the name of
the client's API key. A response ends with its replica. That there is none is said only when all
who could have it have answered.
"""

import asyncio
import logging

import msgspec

from actors.ingress.replica_exchange import OtherReplicas
from actors.openai.responses.objects import ID_PREFIX
from actors.openai.responses.stored import MAX_ID_CHARS, StoredResponse, StoredResponses
from actors.rpc.connection import CallConnection, connect
from actors.rpc.server import CallServer
from engine.clock import Clock
from engine.errors import CapacityError, EngineError
from engine.messages import decode, encode

logger = logging.getLogger(__name__)

ASK_S = 2.0  # what another replica may take to answer
FIND, FORGET = "find_response", "forget_response"
_ABSENT, _FORGOTTEN = b"", b"forgotten"  # answers; a found response is its own


class _Asked(msgspec.Struct):
    """What of a body says from which response it goes on."""

    previous_response_id: str | None = None


class ReplicaResponses:
    """The stored responses of this replica, and the way to those of the others."""

    def __init__(self, own: StoredResponses, others: OtherReplicas, clock: Clock) -> None:
        self.own = own
        self._others = others
        self._clock = clock
        self._server: CallServer | None = None  # None = this replica is the only one
        self._links: dict[bytes, _Link] = {}  # by address

    async def listen(self, host: str) -> bytes:
        """Lets other replicas ask here; returns the encoded Address. Raises WorkerError."""
        self._server = CallServer(host, {FIND: self._find, FORGET: self._forget})
        return await self._server.address()

    async def close(self) -> None:
        """Ends all connections, of which those under way fail."""
        for link in self._links.values():
            link.close()
        if self._server is not None:
            await self._server.close()

    async def before(self, owner: str, body: bytes) -> StoredResponse | None:
        """Returns the response that a body goes on from, if another replica has it.

        Raises as `find_elsewhere`. What is wrong with a body is for its parser to say.
        """
        if self._server is None:
            return None
        try:
            previous = msgspec.json.decode(body, type=_Asked).previous_response_id
        except msgspec.DecodeError:
            return None
        return None if previous is None else await self.find_elsewhere(owner, previous)

    async def find_elsewhere(self, owner: str, response_id: str) -> StoredResponse | None:
        """Returns a response that this replica lacks; None = nobody has it, or this one does.

        Raises CapacityError (503) if nobody has it who answers, and somebody may not have.
        """
        if self.own.find(owner, response_id) is not None:
            return None
        found = await self._ask(FIND, owner, response_id)
        return None if found is None else StoredResponse.decoded(found)

    async def forget(self, owner: str, response_id: str) -> None:
        """Forgets a response at the replica that has it.

        Raises RequestError (404) if nobody has it, and CapacityError (503) if that is not certain.
        """
        if self.own.forget(owner, response_id):
            return
        if await self._ask(FORGET, owner, response_id) is None:
            self.own.of(owner).forget(response_id)  # says that there is none

    async def _ask(self, method: str, owner: str, response_id: str) -> bytes | None:
        """Returns what the replica answers that has a response; None = there is none.

        Raises CapacityError (503) if that is not certain.
        """
        is_id = response_id.startswith(ID_PREFIX) and len(response_id) <= MAX_ID_CHARS
        if not is_id or not self.own.is_on:
            return None
        is_complete = self._clock.now_s() <= self._others.complete_until_s
        data = encode((owner, response_id))
        links = self._current_links()
        answers = await asyncio.gather(*(link.ask(method, data) for link in links))
        found = next((answer for answer in answers if answer), None)
        if found is None and None in answers:
            raise CapacityError(
                "an ingress replica that may have it does not answer", retry_after_s=1
            )
        if found is None and not is_complete:
            why = "the ingress replicas that may have it are not all known now"
            raise CapacityError(f"{why}: try again", retry_after_s=1)
        return found

    def _current_links(self) -> "list[_Link]":
        """Returns a link to each replica that may live; those to others are closed."""
        addresses = set(self._others.addresses)
        for address in self._links.keys() - addresses:
            self._links.pop(address).close()
        for address in addresses - self._links.keys():
            self._links[address] = _Link(address)
        return list(self._links.values())

    # ---- asked by other replicas ----------------------------------------------------------------

    async def _find(self, asked: bytes) -> bytes:
        """(owner, id) -> StoredResponse, encoded; _ABSENT = it is not here."""
        found = self.own.find(*decode(asked, tuple[str, str]))
        return _ABSENT if found is None else found.encoded()

    async def _forget(self, asked: bytes) -> bytes:
        return _FORGOTTEN if self.own.forget(*decode(asked, tuple[str, str])) else _ABSENT


class _Link:
    """The connection to another replica: opened when first needed, and anew when it has ended."""

    def __init__(self, address: bytes) -> None:
        self._address = address
        self._opening = asyncio.Lock()
        self._connection: CallConnection | None = None
        self._is_closed = False

    async def ask(self, method: str, data: bytes) -> bytes | None:
        """Returns the answer; None = there was none. A replica that has ended has nothing."""
        try:
            async with asyncio.timeout(ASK_S):
                return await (await self._connected()).call(method, data)
        except (EngineError, TimeoutError) as error:
            if isinstance(error.__cause__, ConnectionRefusedError):  # its process is no more
                return _ABSENT
            logger.debug("an ingress replica does not answer: %r", error)
            return None

    def close(self) -> None:
        self._is_closed = True
        if self._connection is not None:
            self._connection.abandon()

    async def _connected(self) -> CallConnection:
        async with self._opening:
            if self._connection is None or not self._connection.is_open:
                self._connection = await connect("an ingress replica", self._address, ASK_S)
            if self._is_closed:  # meanwhile
                self._connection.abandon()
            return self._connection
