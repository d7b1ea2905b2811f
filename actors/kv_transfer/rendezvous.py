"""A small key-value board in a Ray actor, where the two ends of a channel find each other.

Its calls use Ray's authenticated RPC, so opening a channel needs no listener of its own. It is used
only while a channel opens: its keys are deleted then, and an open channel does not notice the
board's death. Knows nothing of what the values mean.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from actors.lifecycle.deployment import DeploymentSpec
from actors.lifecycle.liveness import Lifeline
from actors.lifecycle.placement_groups import remove_unused
from actors.rpc.handles import find_now
from engine.clock import Clock, MonotonicClock
from engine.errors import HandoffError, WorkerError

logger = logging.getLogger(__name__)
T = TypeVar("T")

KEY_LIFE_S = 120.0  # after its last change; far longer than any channel takes to open
MAX_KEYS = 10_000
MAX_WAIT_S = 60.0


@dataclass(slots=True)
class _Entry:
    value: bytes
    expires_s: float


class RendezvousKeys:
    """Keys with values that expire; readers wait for keys that are not there yet."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}  # oldest change first
        self._changed = asyncio.Condition()

    async def set(self, key: str, value: bytes) -> None:
        """Write a key. Raises HandoffError when the board is full."""
        self._expire()
        if key not in self._entries and len(self._entries) >= MAX_KEYS:
            raise HandoffError(f"the rendezvous holds {MAX_KEYS} keys already")
        self._entries.pop(key, None)
        self._entries[key] = _Entry(value, self._clock.now_s() + KEY_LIFE_S)
        async with self._changed:
            self._changed.notify_all()

    async def add(self, key: str, amount: int) -> int:
        """Add to a decimal counter (0 if absent) and return its new value."""
        self._expire()
        entry = self._entries.get(key)
        total = amount + (int(entry.value) if entry else 0)
        await self.set(key, str(total).encode())
        return total

    async def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Values of all `keys`, waiting until each is there. Raises HandoffError after the wait."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout_s, MAX_WAIT_S)), self._changed:
                await self._changed.wait_for(lambda: self.has(keys))
        if not self.has(keys):
            raise HandoffError(f"nobody wrote all of {list(keys)} within {timeout_s:.1f} s")
        return [self._entries[key].value for key in keys]

    def has(self, keys: Sequence[str]) -> bool:
        self._expire()
        return all(key in self._entries for key in keys)

    def num_keys(self) -> int:
        self._expire()
        return len(self._entries)

    def delete(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return self._entries.pop(key, None) is not None

    def delete_prefix(self, prefix: str) -> int:
        """Remove every key that starts with `prefix`; how many there were."""
        keys = [key for key in self._entries if key.startswith(prefix)]
        for key in keys:
            del self._entries[key]
        return len(keys)

    def _expire(self) -> None:
        now_s = self._clock.now_s()
        while self._entries:
            key = next(iter(self._entries))
            if self._entries[key].expires_s > now_s:
                return
            del self._entries[key]


class Rendezvous:
    """The board as an actor; it ends itself when it hears no supervisor any more.

    It is the last of its deployment to leave and gives the places of the workers back: there is one
    per deployment, it needs no device, and Ray restarts it if it dies.
    """

    def __init__(self, spec: DeploymentSpec, name: str) -> None:
        self._name = name
        self._lifeline = Lifeline.of(spec, partial(clear_places, spec.namespace, spec.hash))
        self._keys = RendezvousKeys(MonotonicClock())

    def __repr__(self) -> str:
        """What Ray prints before this actor's log lines."""
        return self._name

    async def ping(self) -> None:
        """A heartbeat of the supervisor, or of an ingress while that is away."""
        self._lifeline.beat()

    async def set(self, key: str, value: bytes) -> None:
        await self._keys.set(key, value)

    async def add(self, key: str, amount: int) -> int:
        return await self._keys.add(key, amount)

    async def get(self, keys: list[str], timeout_s: float) -> list[bytes]:
        return await self._keys.get(keys, timeout_s)

    async def has(self, keys: list[str]) -> bool:
        return self._keys.has(keys)

    async def num_keys(self) -> int:
        return self._keys.num_keys()

    async def delete(self, key: str) -> bool:
        return self._keys.delete(key)

    async def delete_prefix(self, prefix: str) -> int:
        return self._keys.delete_prefix(prefix)


def clear_places(namespace: str, deployment_hash: str) -> bool:
    """Gives back what workers have left behind; returns whether none holds a place any more."""
    try:
        return remove_unused(namespace, deployment_hash)
    except RayError:
        logger.exception("the places of %s cannot be given back now", deployment_hash)
        return False


class RayRendezvousClient:
    """The channels' `RendezvousClient` over the named actor.

    The actor is looked up for each use, so it may restart.
    """

    def __init__(self, name: str, namespace: str, rpc_timeout_s: float) -> None:
        """`rpc_timeout_s` bounds a call beyond the time it was asked to wait."""
        self._name = name
        self._namespace = namespace
        self._rpc_timeout_s = rpc_timeout_s

    def set(self, key: str, value: bytes) -> None:
        self._call(lambda actor: actor.set.remote(key, value))

    def add(self, key: str, amount: int) -> int:
        return int(self._call(lambda actor: actor.add.remote(key, amount)))

    def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        names = list(keys)
        values: list[bytes] = self._call(
            lambda actor: actor.get.remote(names, timeout_s), wait_s=timeout_s
        )
        return values

    def has(self, keys: Sequence[str]) -> bool:
        names = list(keys)
        return bool(self._call(lambda actor: actor.has.remote(names)))

    def num_keys(self) -> int:
        return int(self._call(lambda actor: actor.num_keys.remote()))

    def delete(self, key: str) -> bool:
        return bool(self._call(lambda actor: actor.delete.remote(key)))

    def delete_prefix(self, prefix: str) -> int:
        return int(self._call(lambda actor: actor.delete_prefix.remote(prefix)))

    def _call(self, start: Callable[[ActorHandle[Any]], Any], wait_s: float = 0.0) -> Any:  # noqa: ANN401
        actor = find_now(self._name, self._namespace)
        return answer_of(self._name, start(actor), wait_s + self._rpc_timeout_s)


class RankCalls:
    """Calls of ranks of other workers, from a thread."""

    def __init__(self, namespace: str, timeout_s: float) -> None:
        self._namespace = namespace
        self._timeout_s = timeout_s

    def find(self, name: str) -> Callable[[bytes], Callable[[], object]]:
        """Looks an actor up and returns what asks it; raises WorkerError if there is none.

        What is returned asks that actor for good, and not the next one of its name, which is
        another process. It asks at once and returns what waits for the answer, which raises
        HandoffError, WorkerError.
        """
        actor = find_now(name, self._namespace)

        def ask(order: bytes) -> Callable[[], object]:
            return partial(answer_of, name, actor.give.remote(order), self._timeout_s)

        return ask


def answer_of(name: str, reference: Any, timeout_s: float) -> Any:  # noqa: ANN401
    """What an actor answers, waited for in a thread. Raises HandoffError, WorkerError."""
    try:
        # Not ray.get, which mistakes a channel's thread for the event loop and warns.
        return reference.future().result(timeout=timeout_s)
    except TimeoutError as error:
        raise HandoffError(f"{name} did not answer in time") from error
    except RayTaskError as error:
        if isinstance(error.cause, WorkerError):
            raise error.cause from error
        raise WorkerError(f"{name} failed: {type(error.cause).__name__}") from error
    except RayError as error:
        raise WorkerError(f"{name} is dead or restarting") from error
