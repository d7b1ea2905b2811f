"""Stored responses of /v1/responses where the ingress has several replicas.

Each replica keeps those that it answered. One that lacks a response asks the others, whose
addresses it has from the last exchange (replica_exchange.py). A response ends with its replica.
"""

import asyncio

import msgspec

from actors.ingress.replica_exchange import OtherReplicas
from actors.openai.responses.objects import ID_PREFIX
from actors.openai.responses.stored import MAX_ID_CHARS, StoredResponse, StoredResponses
from actors.rpc.connection import connect
from actors.rpc.server import CallServer
from engine.errors import CapacityError, EngineError
from engine.messages import decode, encode

ASK_S = 2.0  # what another replica may take to answer
FIND, FORGET = "find_response", "forget_response"


class _Asked(msgspec.Struct):
    """What of a body says from which response it goes on."""

    previous_response_id: str | None = None


class ReplicaResponses:
    """The stored responses of this replica, and the way to those of the others."""

    def __init__(self, own: StoredResponses, others: OtherReplicas) -> None:
        self.own = own
        self._others = others
        self._server: CallServer | None = None

    async def listen(self, host: str) -> bytes:
        """Lets other replicas ask here; returns the encoded Address. Raises WorkerError."""
        self._server = CallServer(host, {FIND: self._find, FORGET: self._forget})
        return await self._server.address()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()

    async def before(self, body: bytes) -> StoredResponse | None:
        """Returns the response that a body goes on from, if another replica has it.

        Raises as `find_elsewhere`. What is wrong with a body is for its parser to say.
        """
        if not self._others.addresses:
            return None
        try:
            previous = msgspec.json.decode(body, type=_Asked).previous_response_id
        except msgspec.DecodeError:
            return None
        return None if previous is None else await self.find_elsewhere(previous)

    async def find_elsewhere(self, response_id: str) -> StoredResponse | None:
        """Returns a response that this replica lacks; None = nobody has it, or this one does.

        Raises CapacityError (503) if nobody has it who answers, and somebody does not.
        """
        is_id = response_id.startswith(ID_PREFIX) and len(response_id) <= MAX_ID_CHARS
        if not is_id or self.own.find(response_id) is not None:
            return None
        answers = await self._ask(FIND, response_id)
        found = (StoredResponse.decoded(one) for one in answers if one)
        response = next(found, None)
        if response is None:
            _check(answers)
        return response

    async def forget(self, response_id: str) -> None:
        """Forgets a response wherever it is. Raises CapacityError (503) if that is not certain."""
        self.own.forget(response_id)
        _check(await self._ask(FORGET, response_id))

    async def _ask(self, method: str, response_id: str) -> list[bytes | None]:
        """Returns each other replica's answer; None for one that did not answer."""

        async def ask(address: bytes) -> bytes | None:
            try:
                async with asyncio.timeout(ASK_S):
                    connection = await connect("an ingress replica", address, ASK_S)
                    try:
                        return await connection.call(method, encode(response_id))
                    finally:
                        await connection.close()
            except (EngineError, TimeoutError):
                return None

        return await asyncio.gather(*map(ask, self._others.addresses))

    # ---- asked by other replicas ----------------------------------------------------------------

    async def _find(self, response_id: bytes) -> bytes:
        """An id -> StoredResponse, encoded; b"" = it is not here."""
        found = self.own.find(decode(response_id, str))
        return b"" if found is None else found.encoded()

    async def _forget(self, response_id: bytes) -> bytes:
        self.own.forget(decode(response_id, str))
        return b""


def _check(answers: list[bytes | None]) -> None:
    if None in answers:
        raise CapacityError("an ingress replica that may have it does not answer", retry_after_s=1)
