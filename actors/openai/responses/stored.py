"""Finished responses that later requests may go on from, in the memory of one ingress.

A response is its owner's alone: whoever asks as another one is told that there is none. Bounded by
bytes; the least recently used go first. Nothing outlives the process. Another ingress replica has
its own (actors/ingress/replica_responses.py).
"""

from collections import OrderedDict

import msgspec
from msgspec import Raw
from msgspec.structs import asdict

from actors.openai.prompts import count_chars
from actors.openai.request_bodies import Message
from engine.errors import RequestError

MAX_ID_CHARS = 256


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response, and what a later one needs of it."""

    body: bytes  # as it was sent
    messages: list[Message]  # the conversation up to its end
    num_bytes: int  # of both; a character counts as one, a message as 64

    def encoded(self) -> bytes:
        """As JSON, as the messages came: what a message lacks is left out, an empty `Raw` too."""
        messages = [
            {name: value for name, value in asdict(one).items() if value not in (None, Raw())}
            for one in self.messages
        ]
        return msgspec.json.encode(asdict(self) | {"messages": messages})

    @staticmethod
    def decoded(data: bytes) -> "StoredResponse":
        return msgspec.json.decode(data, type=StoredResponse)


class StoredResponses:
    """An LRU of responses by owner and id."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of responses and conversations together; 0 = nothing is stored."""
        self._max_bytes = max_bytes
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._num_bytes = 0

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def of(self, owner: str) -> "OwnResponses":
        """owner: the name of an API key, "" = everybody where there are none."""
        return OwnResponses(self, owner)

    def keep(self, owner: str, response_id: str, body: bytes, messages: list[Message]) -> None:
        """Stores a response; one that is larger than the limit is not stored."""
        num_bytes = len(body) + sum(64 + count_chars(message) for message in messages)
        stored = StoredResponse(body=body, messages=messages, num_bytes=num_bytes)
        self.forget(owner, response_id)
        if stored.num_bytes > self._max_bytes:
            return
        self._responses[owner, response_id] = stored
        self._num_bytes += stored.num_bytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._responses.popitem(last=False)[1].num_bytes

    def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """Returns a response, used now, or None."""
        stored = self._responses.get((owner, response_id))
        if stored is not None:
            self._responses.move_to_end((owner, response_id))
        return stored

    def forget(self, owner: str, response_id: str) -> bool:
        """Returns whether the response was stored."""
        stored = self._responses.pop((owner, response_id), None)
        if stored is None:
            return False
        self._num_bytes -= stored.num_bytes
        return True


class OwnResponses:
    """The stored responses of one owner."""

    def __init__(self, stored: StoredResponses, owner: str) -> None:
        self._stored = stored
        self._owner = owner

    @property
    def is_on(self) -> bool:
        return self._stored.is_on

    def keep(self, response_id: str, body: bytes, messages: list[Message]) -> None:
        self._stored.keep(self._owner, response_id, body, messages)

    def body(self, response_id: str) -> bytes:
        """Raises RequestError (404) for a response that is not stored."""
        return self._require(response_id, None).body

    def conversation(self, response_id: str) -> list[Message]:
        """The messages up to the response's end. Raises RequestError (404)."""
        return self._require(response_id, "previous_response_id").messages

    def forget(self, response_id: str) -> None:
        """Raises RequestError (404) for a response that is not stored."""
        if not self._stored.forget(self._owner, response_id):
            raise self._missing(response_id, None)

    def _require(self, response_id: str, param: str | None) -> StoredResponse:
        found = self._stored.find(self._owner, response_id)
        if found is None:
            raise self._missing(response_id, param)
        return found

    def _missing(self, response_id: str, param: str | None) -> RequestError:
        why = (
            "it was never stored or was deleted, newer ones took its place"
            " (api.stored_responses_bytes), or the ingress replica that had it has ended"
            if self.is_on
            else "this server stores none (api.stored_responses_bytes is 0);"
            " send the whole conversation as 'input'"
        )
        return RequestError(
            f"Response with id '{response_id[:100]}' not found: {why}.",
            param=param,
            code="response_not_found",
            status=404,
        )
