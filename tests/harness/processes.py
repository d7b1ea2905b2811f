"""Actor processes in one event loop: they own tasks, answer calls, freeze, and are killed.

What a process runs is the product's; faked is only its border: how calls and streams get from one
process to another, and that nothing does while it is frozen and all of it ends when it is killed.
"""

import asyncio
import contextvars
import random
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from ray.exceptions import RayActorError

from actors.rpc.connection import ConnectionEndedError
from actors.worker.worker_actor import WorkerActor
from engine.errors import WorkerError
from engine.messages import Submit, decode

T = TypeVar("T")

MAX_LATENCY_S = 0.001  # of a message, one way

_running_in: contextvars.ContextVar["Process | None"] = contextvars.ContextVar(
    "_running_in", default=None
)


class Process:
    """One incarnation of an actor, and every task that was begun inside it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.worker: WorkerActor | None = None  # None in the process of an ingress
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_death: list[Callable[[], None]] = []
        self._context = contextvars.copy_context()
        self._context.run(_running_in.set, self)

    @property
    def is_alive(self) -> bool:
        return not self.death.done()

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    def run(self, fn: Callable[[], T]) -> T:
        """Call `fn` inside; tasks that it begins belong to the process."""
        return self._context.run(fn)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task inside; an error that nobody waits for any more is dropped."""
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    def own(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def when_dead(self, fn: Callable[[], None]) -> None:
        self._on_death.append(fn)

    def freeze(self) -> None:
        """As SIGSTOP does: until it is killed, nothing gets in or out, and nobody is told."""
        self._goes_on.clear()

    async def not_frozen(self) -> None:
        await self._goes_on.wait()

    async def kill(self) -> None:
        """As SIGKILL does: nothing that it says is heard any more. Returns when it has ended."""
        if self.is_alive:
            self.death.set_result(None)
            self._goes_on.set()
            for fn in self._on_death:
                fn()
        while self._tasks:  # some see to it that what they began comes to its end
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=MAX_LATENCY_S)

    async def unless_dead(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it inside. Raises RayActorError when the process dies first."""
        task = self.spawn(self._run_once_it_goes_on(work))
        task.add_done_callback(lambda _: work.close())  # cancelled before its start, it never ran
        await asyncio.wait((task, self.death), return_when=asyncio.FIRST_COMPLETED)
        await self.not_frozen()
        if not self.is_alive:
            raise RayActorError
        return await task

    async def _run_once_it_goes_on(self, work: Coroutine[Any, Any, T]) -> T:
        await self.not_frozen()
        if not self.is_alive:
            raise RayActorError
        return await work


def own_tasks_by_process(loop: asyncio.AbstractEventLoop) -> None:
    """From now on, a task belongs to the process that it was begun in."""

    def make(
        loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], **options: Any
    ) -> asyncio.Task[T]:
        task = asyncio.Task(work, loop=loop, **options)
        context = options.get("context")
        process = _running_in.get() if context is None else context.get(_running_in)
        if process is not None:
            process.own(task)
        return task

    loop.set_task_factory(make)  # type: ignore[arg-type]


class Network:
    """The living processes by name, and how long messages between them take."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.processes: dict[str, Process] = {}
        self.submitted: list[Submit] = []  # all that were sent

    async def delay(self) -> None:
        """One way of a message. Raises WorkerError in a dead process, which sends nothing."""
        await asyncio.sleep(self._rng.uniform(0.0, MAX_LATENCY_S))
        sender = _running_in.get()
        if sender is not None:
            await sender.not_frozen()
        if sender is not None and not sender.is_alive:
            raise WorkerError(f"{sender.name} is dead: this reaches nobody")

    def find(self, name: str) -> Process:
        """Raises RayActorError while there is none."""
        process = self.processes.get(name)
        if process is None or not process.is_alive:
            raise RayActorError
        return process

    async def find_actor(self, name: str, namespace: str) -> "RemoteActor":
        """In place of `actors.rpc.handles.find_actor`."""
        await self.delay()
        if name not in self.processes:
            raise WorkerError(f"actor {name} is not running")
        return RemoteActor(self, name)

    async def connect(self, name: str, address: bytes, seconds: float) -> "Connection":
        """In place of `actors.rpc.connection.connect`."""
        await self.delay()
        try:
            return Connection(self, self.find(name))
        except RayActorError as error:
            raise ConnectionEndedError(f"{name} cannot be reached") from error


class RemoteActor:
    """Stands for Ray's handle of a named actor: calls go to whatever incarnation lives."""

    def __init__(self, network: Network, name: str) -> None:
        self._network = network
        self._name = name

    def __getattr__(self, method: str) -> "RemoteMethod":
        return RemoteMethod(self._network, self._name, method)


class RemoteMethod:
    """One method of a `RemoteActor`."""

    def __init__(self, network: Network, name: str, method: str) -> None:
        self._network = network
        self._name = name
        self._method = method

    async def remote(self, *args: object) -> object:
        """Raises RayActorError if the actor dies before its answer is here."""
        await self._network.delay()
        process = self._network.find(self._name)
        if self._method == "address":  # connections need none: they go by the name
            return b""
        answer = await process.unless_dead(getattr(process.worker, self._method)(*args))
        await self._network.delay()
        return answer


class Connection:
    """Stands for a `CallConnection`: calls and streams of one incarnation of an actor."""

    def __init__(self, network: Network, process: Process) -> None:
        assert process.worker is not None, f"{process.name} takes no calls"
        self._network = network
        self._process = process
        self._server: Any = process.worker._server  # its handlers, without the socket

    @property
    def is_open(self) -> bool:
        return self._process.is_alive

    def abandon(self) -> None:
        """Nothing is held for a connection."""

    async def call(self, method: str, data: bytes) -> bytes:
        """Raises ConnectionEndedError if the process dies before its answer is here."""
        if method == "submit":
            self._network.submitted.append(decode(data, Submit))
        await self._network.delay()
        try:
            answer = await self._process.unless_dead(self._server._calls[method](data))
        except RayActorError as error:
            raise self._ended() from error
        await self._network.delay()
        return bytes(answer)

    def begin(self, method: str, data: bytes) -> asyncio.Future[bytes]:
        """A call that goes on by itself."""
        return asyncio.ensure_future(self.call(method, data))

    async def stream(self, method: str, data: bytes) -> AsyncGenerator[bytes, None]:
        """What the process sends, in order; closing it ends the stream there."""
        await self._network.delay()
        items: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def pump() -> None:
            async with aclosing(self._server._streams[method](data)) as messages:
                async for message in messages:
                    items.put_nowait(message)
            items.put_nowait(None)

        if not self.is_open:
            raise self._ended()
        pumping = self._process.spawn(pump())
        pumping.add_done_callback(lambda _: items.put_nowait(None))
        try:
            while (item := await items.get()) is not None:
                await self._network.delay()
                await self._process.not_frozen()
                if not self.is_open:
                    break
                yield item
            if not self.is_open:
                raise self._ended()
            await pumping
        finally:
            pumping.cancel()

    def _ended(self) -> ConnectionEndedError:
        return ConnectionEndedError(f"{self._process.name} died or is restarting")
