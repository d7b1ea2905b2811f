"""Sends requests when they are due, whether or not others were answered, and records each.

One green thread a session. How late the client itself was is kept with each request: where that is
more than a few ms, the client is what was measured. Runs under gevent, with its patched sockets.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import gevent
from gevent.pool import Group

from load_tests.http_load.client import Answer, Chunk, LoadError, RefusedError
from load_tests.http_load.dialogue import Dialogue, Prompt
from load_tests.http_load.records import Outcome, Record
from load_tests.http_load.scenario import Scenario
from load_tests.http_load.schedule import Piece, Session, Turn

STOPPED = "the run was stopped before this request ended"
NOT_SENT = "the run was stopped before this request was due"
NO_TOKEN = "the answer ended without a token"

Ask = Callable[[Prompt, int], Answer]  # with so many output tokens


@dataclass(slots=True)
class _Heard:
    """An answer as far as it came."""

    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, chunk: Chunk, start_s: float) -> None:
        self.chunk_s.append(round(chunk.at_s - start_s, 6))
        self.chunk_tokens.append(chunk.num_tokens)
        self.texts.append(chunk.text)
        self.token_ids += chunk.token_ids
        self.num_tokens += chunk.num_tokens


@dataclass(frozen=True, slots=True)
class _End:
    outcome: Outcome
    error: str | None = None
    status: int | None = None
    retry_after_s: float | None = None


@dataclass(slots=True)
class _Client:
    """One session as it goes on: what it said, and the request that is ready to be sent."""

    session: Session
    dialogue: Dialogue
    num_prompt_tokens: int = 0
    answer: Answer | None = None


class OpenLoop:
    """Runs a schedule once."""

    def __init__(
        self,
        scenario: Scenario,
        sessions: Sequence[Session],
        ask: Ask,
        new_dialogue: Callable[[], Dialogue],
        on_record: Callable[[Record], None],
    ) -> None:
        self._scenario = scenario
        self._sessions = sessions
        self._ask = ask
        self._new_dialogue = new_dialogue
        self._on_record = on_record
        self._recorded: set[int] = set()
        self._start_s = 0.0

    def run(self) -> None:
        """Until every request has its record, which also holds when it is killed."""
        clients = Group()
        self._start_s = time.perf_counter()
        try:
            for session in self._sessions:
                client = _Client(session, self._new_dialogue())
                self._prepare(client, session.turns[0])
                gevent.sleep(max(0.0, session.start_s - self._now_s()))
                clients.spawn(self._serve, client)
            clients.join()
        finally:
            clients.kill()
            self._record_rest()

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s

    def _prepare(self, client: _Client, turn: Turn) -> None:
        """Makes the request before it is due: a long prompt takes a while to write."""
        client.num_prompt_tokens += turn.num_new_tokens
        prompt = client.dialogue.ask(turn.pieces)
        client.answer = self._ask(prompt, turn.num_output_tokens)

    def _serve(self, client: _Client) -> None:
        due_s = client.session.start_s
        for turn in client.session.turns:
            if client.answer is None:
                self._prepare(client, turn)
                gevent.sleep(max(0.0, due_s - self._now_s()))
            heard = self._take(client, turn, due_s)
            stand_in = Piece(name=f"answer {turn.index}", num_tokens=turn.num_output_tokens)
            client.dialogue.hear("".join(heard.texts), heard.token_ids, stand_in)
            client.num_prompt_tokens += heard.num_tokens or stand_in.num_tokens
            client.answer = None
            due_s = self._now_s() + turn.think_s

    def _take(self, client: _Client, turn: Turn, due_s: float) -> _Heard:
        """Sends the prepared request and records how it ended, also when this is killed."""
        assert client.answer is not None
        heard, sent_s = _Heard(), self._now_s()
        end = _End(Outcome.STOPPED, STOPPED)
        try:
            with closing(client.answer) as answer:
                end = self._listen(answer, turn, heard)
        finally:
            usage = client.answer.usage
            num_prompt_tokens = usage.prompt_tokens if usage else client.num_prompt_tokens
            self._record(
                Record(
                    index=turn.index,
                    session=client.session.index,
                    length_class=self._scenario.class_of(client.num_prompt_tokens),
                    num_prompt_tokens=num_prompt_tokens,
                    num_output_tokens=usage.completion_tokens if usage else heard.num_tokens,
                    due_s=round(due_s, 6),
                    sent_s=round(sent_s, 6),
                    ended_s=round(self._now_s(), 6),
                    outcome=end.outcome,
                    error=end.error,
                    status=end.status,
                    retry_after_s=end.retry_after_s,
                    chunk_s=heard.chunk_s,
                    chunk_tokens=heard.chunk_tokens,
                )
            )
        return heard

    def _listen(self, answer: Answer, turn: Turn, heard: _Heard) -> _End:
        try:
            for chunk in answer.chunks():
                heard.add(chunk, self._start_s)
                if turn.cancel_after_tokens and heard.num_tokens >= turn.cancel_after_tokens:
                    return _End(Outcome.CANCELLED)
        except RefusedError as refusal:
            return _End(Outcome.FAILED, str(refusal), refusal.status, refusal.retry_after_s)
        except LoadError as error:
            return _End(Outcome.FAILED, str(error))
        if not heard.num_tokens:
            return _End(Outcome.FAILED, NO_TOKEN)
        return _End(Outcome.COMPLETED)

    def _record(self, record: Record) -> None:
        self._recorded.add(record.index)
        self._on_record(record)

    def _record_rest(self) -> None:
        """Requests that were never sent have an end too: nothing is lost from the count."""
        now_s = round(self._now_s(), 6)
        for session in self._sessions:
            num_tokens = 0
            for turn in session.turns:
                num_tokens += turn.num_new_tokens
                if turn.index not in self._recorded:
                    self._record(
                        Record(
                            index=turn.index,
                            session=session.index,
                            length_class=self._scenario.class_of(num_tokens),
                            num_prompt_tokens=num_tokens,
                            num_output_tokens=0,
                            due_s=session.start_s,
                            sent_s=None,
                            ended_s=now_s,
                            outcome=Outcome.STOPPED,
                            error=NOT_SENT,
                        )
                    )
                num_tokens += turn.num_output_tokens
