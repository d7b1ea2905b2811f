"""Notes when a request comes where in a worker and in an ingress, by functions put around theirs.

Each of these functions is called in the process of an actor. A mark costs half a microsecond.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

Mark = tuple[str, float]  # where, and when by time.perf_counter()

_marks: list[Mark] = []


def take_marks(_: object) -> list[Mark]:
    """Returns the marks of this process."""
    return list(_marks)


def wrap_worker(_: object) -> None:
    """From the request's arrival at the worker to the message with its first token."""
    from actors.worker.engine_host import EngineHost
    from actors.worker.requests import WorkerRequests
    from actors.worker.token_streams import TokenStreams
    from engine.core import EngineCore
    from engine.scheduling.scheduler import Scheduler

    _before(WorkerRequests, "submit", "worker: request read")
    _before(Scheduler, "add", "engine: request queued")
    _before(EngineCore, "step", "engine: step begins")
    _after(EngineCore, "step", "engine: step ended", lambda output: bool(output.tokens))
    _before(EngineHost, "_deliver", "worker: event loop has the token")
    _before(TokenStreams, "_next_message", "worker: writes the message", _has_tokens)


def wrap_ingress(_: object) -> None:
    """From the request's route to the answer's first bytes."""
    from actors.ingress.answering import Answering, EventStream
    from actors.ingress.generation import Generations
    from actors.ingress.pipeline import RequestPipeline

    _before(Answering, "answer", "ingress: route")
    _before(RequestPipeline, "prepare", "ingress: body read and checked")
    _before(Generations, "_submit", "ingress: placed, submits")
    _before(Generations, "_put", "ingress: message read", _has_first)
    _before(EventStream, "__init__", "ingress: first delta")
    _before(EventStream, "_send_opening", "ingress: answer begins")
    _before(EventStream, "stream_response", "ingress: first event written")


def _has_tokens(_: object, stream: Any) -> bool:
    return bool(stream.tokens)


def _has_first(_: object, worker: str, records: object) -> bool:
    return isinstance(records, list) and bool(records)  # the others are given as a generator


def _mark(place: str) -> None:
    _marks.append((place, time.perf_counter()))


def _before(
    owner: Any, name: str, place: str, counts: Callable[..., object] = lambda *args, **named: True
) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def marked(*args: Any, **named: Any) -> Any:
        if counts(*args, **named):
            _mark(place)
        return function(*args, **named)

    setattr(owner, name, marked)


def _after(owner: Any, name: str, place: str, counts: Callable[[Any], bool]) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def marked(*args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        if counts(result):
            _mark(place)
        return result

    setattr(owner, name, marked)
