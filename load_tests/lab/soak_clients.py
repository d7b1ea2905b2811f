"""Clients that ask without a pause, hang up now and then, and compare every token that comes."""

import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import msgspec

from load_tests.http_load.client import (
    OK,
    Answer,
    BrokenStreamError,
    LoadError,
    RefusedError,
    Server,
    TimedOutError,
)
from load_tests.lab.soak_cases import Case

PATH = "/v1/completions"
ERROR_EVENT = "error event: "  # how the client names what a server said in the middle of a stream
STREAM_SHARE = 0.7  # the others come as a whole
SALTED_SHARE = 0.5  # the others may find their prompts cached
PAUSE_S = 0.5  # after a refusal or a failure: nobody hammers on a closed door


@dataclass(slots=True)
class Outcomes:
    """What became of all requests, counted; written by clients, under their lock."""

    num_right: int = 0
    num_left: int = 0  # the client hung up, with nothing wrong until then
    errors: Counter[str] = field(default_factory=Counter)  # said clearly: a status, an error event
    broken: Counter[str] = field(default_factory=Counter)  # not said: cut off, or no end in time
    wrong: list[str] = field(default_factory=list)  # tokens that are not the right ones

    @property
    def num_ended(self) -> int:
        """All that were not given up by their client."""
        return self.num_right + self.errors.total() + self.broken.total() + len(self.wrong)


class _WholeAnswer(msgspec.Struct):
    choices: list["_Tokens"]


class _Tokens(msgspec.Struct):
    token_ids: list[int]


class Clients:
    """So many threads, each with one request at a time, until the block is left."""

    def __init__(
        self,
        server: Server,
        model: str,
        cases: Sequence[Case],
        *,
        num_clients: int,
        leave_share: float,
        timeout_s: float,
        seed: int,
    ) -> None:
        """leave_share: of the requests, given up by their client at a random moment."""
        self._server = server
        self._model = model
        self._cases = cases
        self._leave_share = leave_share
        self._timeout_s = timeout_s
        self._is_stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._repeat, args=(random.Random(f"client {seed} {i}"),))
            for i in range(num_clients)
        ]
        self.outcomes = Outcomes()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let every request under way come to its end."""
        self._is_stopping.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, rng: random.Random) -> None:
        while not self._is_stopping.is_set():
            case = rng.choice(self._cases)
            leave_at = rng.random() if rng.random() < self._leave_share else None
            is_stream = rng.random() < STREAM_SHARE
            salt = f"{rng.randrange(2**32)}" if rng.random() < SALTED_SHARE else None
            if not self.ask(case, is_stream=is_stream, leave_at=leave_at, salt=salt):
                self._is_stopping.wait(PAUSE_S)

    def ask(self, case: Case, *, is_stream: bool, leave_at: float | None, salt: str | None) -> bool:
        """One request and its outcome; False if it failed."""
        body = case.body(self._model, is_stream=is_stream, salt=salt)
        tokens: list[int] | None
        try:
            if is_stream:
                tokens = self._read_stream(body, case, leave_at)
            else:
                tokens = self._read_whole(body, leave_at)
        except (RefusedError, BrokenStreamError) as error:
            is_said = isinstance(error, RefusedError) or str(error).startswith(ERROR_EVENT)
            with self._lock:
                (self.outcomes.errors if is_said else self.outcomes.broken)[str(error)] += 1
            return False
        except LoadError as error:
            with self._lock:
                self.outcomes.broken[f"{type(error).__name__}: {error}"] += 1
            return False
        self._judge(case, tokens, has_left=leave_at is not None)
        return True

    def _judge(self, case: Case, tokens: list[int] | None, *, has_left: bool) -> None:
        """tokens: all, those that came before the client left, or None if it left before any."""
        seen = tokens or []
        expected = case.expected[: len(seen)] if has_left else case.expected
        with self._lock:
            if seen != expected:
                at = next(
                    (i for i, (a, b) in enumerate(zip(seen, expected, strict=False)) if a != b),
                    min(len(seen), len(expected)),
                )
                prompt = f"prompt of {len(case.prompt_ids)} tokens, {case.sampling}"
                text = f"{prompt}: differs at {at}, {len(seen)} tokens of {len(expected)}"
                self.outcomes.wrong.append(text)
            elif has_left:
                self.outcomes.num_left += 1
            else:
                self.outcomes.num_right += 1

    def _read_stream(self, body: bytes, case: Case, leave_at: float | None) -> list[int]:
        """Its tokens; up to a share of them when the client leaves."""
        num_wanted = case.num_tokens if leave_at is None else int(leave_at * case.num_tokens)
        answer = Answer(self._server, self._server.path(PATH), body, self._timeout_s)
        tokens: list[int] = []
        try:
            for chunk in answer.chunks():
                tokens += chunk.token_ids
                if leave_at is not None and len(tokens) >= num_wanted:
                    break
        finally:
            answer.close()
        return tokens

    def _read_whole(self, body: bytes, leave_at: float | None) -> list[int] | None:
        """Its tokens; None when the client has left before they came.

        Raises RefusedError, TimedOutError or BrokenStreamError.
        """
        connection = self._server.connection(self._timeout_s)
        try:
            connection.request("POST", self._server.path(PATH), body, self._server.headers)
            if leave_at is not None:
                time.sleep(leave_at)
                return None
            return read_tokens(connection.getresponse())
        except TimeoutError as error:
            raise TimedOutError("no answer in time") from error
        except (OSError, http.client.HTTPException) as error:
            raise BrokenStreamError(f"the connection broke: {error!r}") from error
        finally:
            connection.close()


def read_tokens(response: http.client.HTTPResponse) -> list[int]:
    """Of an answer that comes as a whole. Raises RefusedError with what the server said."""
    data = response.read()
    if response.status != OK:
        raise RefusedError(response.status, data.decode("utf-8", errors="replace")[:300])
    [choice] = msgspec.json.decode(data, type=_WholeAnswer).choices
    return choice.token_ids
