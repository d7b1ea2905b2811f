"""Adds the stages of a request in milliseconds to its own answer, for a client that asks."""

from collections.abc import Sequence

import msgspec

from actors.observability.request_times import RequestTimes
from actors.openai.protocol import ParsedRequest
from actors.openai.response_writers import ResponseWriter
from engine.clock import Clock
from engine.errors import RequestError
from engine.text.output_text import TextDelta

TIMINGS_HEADER = "x-laps-timings"


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds by stage (`observability.request_times`); null = there was no such stage."""

    tokenize_ms: float | None = None
    place_ms: float | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    handoff_ms: float | None = None
    first_decode_ms: float | None = None
    stream_ms: float | None = None
    total_ms: float


def wants_timings(value: str | None) -> bool:
    """Whether the header asks for timings; absent = no. Raises RequestError."""
    if value not in (None, "0", "1"):
        raise RequestError(
            f"Invalid '{TIMINGS_HEADER}': expected 1 or 0, but got {value[:40]!r} instead.",
            param=TIMINGS_HEADER,
            code="invalid_value",
        )
    return value == "1"


class TimedWriter:
    """A ResponseWriter around another one: the last JSON object gets a field more.

    The field is spliced in, because the objects are OpenAI's and their writers know nothing of it.
    """

    def __init__(
        self, writer: ResponseWriter, parsed: ParsedRequest, times: RequestTimes, clock: Clock
    ) -> None:
        self._writer = writer
        self._times = times
        self._clock = clock
        self._num_unfinished = parsed.num_choices
        # A stream without a chunk for usage ends with the chunk of the last finish.
        self._ends_with_delta = parsed.stream and not parsed.include_usage

    def start(self, prompt_ids: Sequence[Sequence[int]]) -> list[bytes]:
        return self._writer.start(prompt_ids)

    def delta(self, choice_index: int, delta: TextDelta) -> list[bytes]:
        pieces = self._writer.delta(choice_index, delta)
        self._num_unfinished -= delta.finish is not None
        is_last = self._ends_with_delta and self._num_unfinished == 0
        return self._with_timings(pieces) if is_last else pieces

    def finish(self) -> list[bytes]:
        pieces = self._writer.finish()
        return pieces if self._ends_with_delta else self._with_timings(pieces)

    def fail(self, error: Exception) -> bytes:
        return self._writer.fail(error)

    def _with_timings(self, pieces: list[bytes]) -> list[bytes]:
        """Adds the field to the last piece that is a JSON object, alone or in an event."""
        field = b',"timings":' + msgspec.json.encode(self._timings()) + b"}"
        for position in reversed(range(len(pieces))):
            body = pieces[position].rstrip(b"\n")
            if body.endswith(b"}"):
                line_ends = pieces[position][len(body) :]
                timed = body[:-1] + field + line_ends
                return [*pieces[:position], timed, *pieces[position + 1 :]]
        raise AssertionError("a response without a JSON object")

    def _timings(self) -> Timings:
        now_s = self._clock.now_s()
        stages = self._times.stages(now_s)
        spent = {f"{stage.name}_ms": _ms(stage.end_s - stage.start_s) for stage in stages}
        return Timings(total_ms=_ms(now_s - self._times.arrived_s), **spent)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
