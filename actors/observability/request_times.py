"""The moments of a request's life, and the stages between them.

    arrived   tokenized   placed            first token   moved    second token      ended
       |-tokenize-|--place--|-queue-|-prefill-|--handoff---|-first_decode-|--stream----|

They are those of the first choice, on this process's clock; only the prompt's wait at its worker is
reported by that worker. From the queue on, a stage belongs to a worker. Knows no HTTP and no
OpenTelemetry.
"""

from dataclasses import dataclass, field
from typing import NamedTuple


class WorkerPair(NamedTuple):
    """The workers of one attempt; the same one twice where nothing is handed over."""

    prefill: str
    decode: str


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a request's life; a stage begins where the one before it ended."""

    name: str
    start_s: float
    end_s: float
    worker: str | None = None  # where it was; None = in the ingress, or not known


@dataclass(slots=True, kw_only=True, eq=False)
class RequestTimes:
    """Moments in seconds of the ingress's clock; None = it did not happen, or not yet."""

    arrived_s: float
    tokenized_s: float | None = None
    placed_s: float | None = None
    attempts: list[WorkerPair] = field(default_factory=list)  # the first first
    first_attempt: int = 0  # index of the attempt that brought the first token
    waited_s: float | None = None  # a duration: from the worker's queue to its first step
    first_token_s: float | None = None
    moved_s: float | None = None  # its KV had arrived at the decode worker; None = it stayed
    second_token_s: float | None = None
    ended_s: float | None = None

    def see_tokens(
        self, index: int, num_tokens: int, now_s: float, waited_s: float | None = None
    ) -> None:
        """Notes tokens of the first choice from `index` on; the first says how long it waited."""
        if index == 0:
            self.first_token_s, self.waited_s = now_s, waited_s
            self.first_attempt = max(len(self.attempts) - 1, 0)
        if index <= 1 < index + num_tokens:
            self.second_token_s = now_s

    def stages(self, now_s: float | None = None) -> list[Stage]:
        """Returns the stages so far, in order; `now_s` stands for the end of a running request."""
        started_s = None
        if self.placed_s is not None and self.waited_s is not None:
            started_s = self.placed_s + self.waited_s
            if self.first_token_s is not None:
                started_s = min(started_s, self.first_token_s)
        prefill = self.attempts[self.first_attempt].prefill if self.attempts else None
        decode = self.attempts[-1].decode if self.attempts else None
        ends = (
            ("tokenize", self.tokenized_s, None),
            ("place", self.placed_s, None),
            ("queue", started_s, prefill),
            ("prefill", self.first_token_s, prefill),
            ("handoff", self.moved_s, decode),
            ("first_decode", self.second_token_s, decode),
            ("stream", now_s if self.ended_s is None else self.ended_s, decode),
        )
        stages: list[Stage] = []
        start_s = self.arrived_s
        for name, end_s, worker in ends:
            if end_s is not None:
                end_s = max(start_s, end_s)
                stages.append(Stage(name, start_s, end_s, worker))
                start_s = end_s
        return stages
