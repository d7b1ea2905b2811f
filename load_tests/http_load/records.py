"""What became of each request, and the file it is kept in: a header line, then a line a request.

Times are seconds from the start of the load. The file is written while the load runs, so that
whoever shows progress reads along.
"""

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import pairwise
from pathlib import Path

import msgspec

from load_tests.http_load.scenario import LengthClass

SHEDDING = (429, 503)  # too many requests, and too much to do


class Outcome(Enum):
    """How a request ended; every arrival has exactly one."""

    COMPLETED = "completed"
    FAILED = "failed"  # refused, broken or timed out
    CANCELLED = "cancelled"  # the client hung up, as it was to
    STOPPED = "stopped"  # the run was stopped before this ended, or before it was due


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The run that the records belong to."""

    scenario: str
    url: str
    model: str
    rate: float  # requests/s that were drawn, on average
    seed: int
    salt: int
    duration_s: float  # of the arrivals
    num_arrivals: int
    started_at: str  # UTC, ISO 8601


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `chunk_s` and `chunk_tokens` have an entry for each event with tokens."""

    index: int
    session: int
    length_class: LengthClass
    num_prompt_tokens: int  # as the server counts, where it tells; else as planned
    num_output_tokens: int  # likewise
    due_s: float
    sent_s: float | None  # None = never sent
    ended_s: float
    outcome: Outcome
    error: str | None = None
    status: int | None = None  # of a refusal
    retry_after_s: float | None = None  # of a refusal that asks to come again
    chunk_s: Sequence[float] = ()
    chunk_tokens: Sequence[int] = ()

    @property
    def is_shed(self) -> bool:
        """Whether the server refused it to protect itself, and said when to come again."""
        return self.status in SHEDDING and self.retry_after_s is not None

    @property
    def lag_s(self) -> float | None:
        """How late the client itself was; None of a request that was never sent."""
        return None if self.sent_s is None else self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first token."""
        if self.sent_s is None or not self.chunk_s:
            return None
        return self.chunk_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """On average a token after the first; None of a single token."""
        if not self.chunk_s or self.num_output_tokens < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """From sending to the last token."""
        if self.sent_s is None or not self.chunk_s:
            return None
        return self.chunk_s[-1] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between an event with tokens and the next."""
        return [b - a for a, b in pairwise(self.chunk_s)]


class RunFile:
    """Writes a run down while it goes on."""

    def __init__(self, path: Path, header: Header) -> None:
        self._file = path.open("wb", buffering=0)
        self._encode = msgspec.json.Encoder().encode
        self._file.write(self._encode(header) + b"\n")

    def add(self, record: Record) -> None:
        self._file.write(self._encode(record) + b"\n")

    def close(self) -> None:
        self._file.close()


class RunReader:
    """Reads a run file, also one that is still being written: only whole lines count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.header: Header | None = None
        self.records: list[Record] = []

    def refresh(self) -> None:
        """Reads what is new; nothing if there is no file yet. Raises msgspec.DecodeError."""
        if not self._path.exists():
            return
        for line in self._new_lines():
            if self.header is None:
                self.header = msgspec.json.decode(line, type=Header)
            else:
                self.records.append(msgspec.json.decode(line, type=Record))

    def _new_lines(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line
