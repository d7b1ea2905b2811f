"""Who asks what and when: a scenario's requests, drawn ahead from its seed.

A session is one request, or the turns of one conversation. Times between sessions are drawn with
mean 1 and divided by the rate, so that all rates of a sweep see the same requests in the same
order, only closer together. Knows no server and no clock.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from load_tests.http_load.scenario import (
    Conversations,
    Drawn,
    Fixed,
    Lengths,
    Lognormal,
    PromptKind,
    Quantiles,
    Scenario,
    ScenarioError,
    Trace,
    Uniform,
)
from load_tests.simulation.traces import read_azure, read_mooncake
from load_tests.simulation.workload import Workload

MEAN_OF_DRAWS = 10_000  # enough for the mean number of turns to be within a percent or two


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of a prompt; pieces of one name have the same tokens wherever they stand."""

    name: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request: what it adds to what was said before, and what it wants."""

    index: int  # among all requests of the schedule
    pieces: tuple[Piece, ...]
    num_output_tokens: int
    cancel_after_tokens: int | None = None  # the client hangs up then
    think_s: float = 0.0  # from the end of the answer before to this request

    @property
    def num_new_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One client; `start_s` counts from the start of the load."""

    index: int
    start_s: float
    turns: tuple[Turn, ...]

    @property
    def max_tokens(self) -> int:
        """Of the last turn's prompt and answer together."""
        return sum(turn.num_new_tokens + turn.num_output_tokens for turn in self.turns)


@dataclass(slots=True)
class _Requests:
    """Gives each request its number, and decides which clients hang up and when."""

    share_cancelled: float
    rng: np.random.Generator
    num_turns: int = 0

    def turn(self, pieces: Sequence[Piece], num_output_tokens: int, think_s: float = 0.0) -> Turn:
        is_cancelled = bool(self.rng.random() < self.share_cancelled)
        after_tokens = int(self.rng.integers(1, max(2, num_output_tokens)))
        self.num_turns += 1
        return Turn(
            index=self.num_turns - 1,
            pieces=tuple(pieces),
            num_output_tokens=num_output_tokens,
            cancel_after_tokens=after_tokens if is_cancelled and num_output_tokens > 1 else None,
            think_s=think_s,
        )


def draw_sessions(scenario: Scenario) -> list[Session]:
    """In order of their start. Raises ScenarioError where nobody arrives or a trace is amiss."""
    requests = _Requests(scenario.share_cancelled, np.random.default_rng([scenario.seed, 3]))
    match scenario.load:
        case Drawn() as load:
            sessions = list(_drawn(scenario, load, requests))
        case Conversations() as load:
            sessions = list(_conversations(scenario, load, requests))
        case Trace() as load:
            sessions = list(_replayed(scenario, load, requests))
    if not sessions:
        raise ScenarioError(
            f"scenario {scenario.name}: nobody arrives within {scenario.duration_s:g} s;"
            " raise the rate or the duration"
        )
    return sessions


def num_requests(sessions: Sequence[Session]) -> int:
    return sum(len(session.turns) for session in sessions)


def _drawn(scenario: Scenario, load: Drawn, requests: _Requests) -> Iterator[Session]:
    rng = np.random.default_rng([scenario.seed, 2])
    shares = np.array([kind.share for kind in load.prompts])
    documents = [_draw_documents(kind, rng) for kind in load.prompts]
    assert scenario.rate is not None
    for index, start_s in enumerate(_starts(scenario, scenario.rate)):
        which = int(rng.choice(len(shares), p=shares / shares.sum()))
        kind = load.prompts[which]
        pieces = [Piece(name=f"own {index}", num_tokens=_draw(kind.prompt_tokens, rng))]
        output_tokens = _draw(kind.output_tokens, rng)
        if documents[which]:
            document = int(rng.integers(len(documents[which])))
            tokens = documents[which][document]
            pieces.insert(0, Piece(name=f"document {which}.{document}", num_tokens=tokens))
        turn = requests.turn(
            _shrunk(pieces, scenario.shrink), max(1, output_tokens // scenario.shrink)
        )
        yield Session(index=index, start_s=start_s, turns=(turn,))


def _draw_documents(kind: PromptKind, rng: np.random.Generator) -> list[int]:
    """The length of each in tokens."""
    if kind.document_tokens is None:
        return []
    return [_draw(kind.document_tokens, rng) for _ in range(kind.num_documents)]


def _conversations(
    scenario: Scenario, load: Conversations, requests: _Requests
) -> Iterator[Session]:
    rng = np.random.default_rng([scenario.seed, 2])
    mean_turns = float(np.mean([_draw(load.num_turns, rng) for _ in range(MEAN_OF_DRAWS)]))
    assert scenario.rate is not None
    for index, start_s in enumerate(_starts(scenario, scenario.rate / mean_turns)):
        turns = []
        for number in range(_draw(load.num_turns, rng)):
            tokens = _draw(load.question_tokens, rng)
            pieces = [Piece(name=f"question {index}.{number}", num_tokens=tokens)]
            if number == 0 and load.system_tokens:
                pieces.insert(0, Piece(name="system", num_tokens=load.system_tokens))
            output_tokens = max(1, _draw(load.output_tokens, rng) // scenario.shrink)
            think_s = float(rng.exponential(load.think_s)) if number else 0.0
            turns.append(requests.turn(_shrunk(pieces, scenario.shrink), output_tokens, think_s))
        yield Session(index=index, start_s=start_s, turns=tuple(turns))


def _replayed(scenario: Scenario, load: Trace, requests: _Requests) -> Iterator[Session]:
    workload = _read_trace(scenario, load)
    starts_s = workload.arrival_s - load.start_s
    first = int(np.searchsorted(starts_s, 0.0))
    scale = load.time_scale
    if scenario.rate is not None and len(workload) > first:
        recorded_s = float(starts_s[-1])
        scale = scenario.rate * recorded_s / (len(workload) - first)
    for index in range(first, len(workload)):
        start_s = float(starts_s[index]) / scale
        if start_s > scenario.duration_s:
            return
        pieces = _shrunk(_trace_pieces(workload, index), scenario.shrink)
        output_tokens = max(1, int(workload.output_tokens[index]) // scenario.shrink)
        turn = requests.turn(pieces, output_tokens)
        yield Session(index=index - first, start_s=start_s, turns=(turn,))


def _read_trace(scenario: Scenario, load: Trace) -> Workload:
    if load.path is None:
        raise ScenarioError(
            f"scenario {scenario.name}: give the recorded file, --trace PATH ({load.format})"
        )
    path = Path(load.path)
    try:
        if load.format == "azure":
            return read_azure(path)
        return read_mooncake(path, seed=scenario.seed)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ScenarioError(f"{path}: not a trace of format {load.format}: {error}") from error


def _trace_pieces(workload: Workload, index: int) -> list[Piece]:
    """Blocks by the names that the recording gives them, then what is the request's own."""
    chain = workload.chains[index] if workload.chains is not None else ()
    pieces = [Piece(name=f"block {name}", num_tokens=workload.block_tokens) for name in chain]
    own = int(workload.prompt_tokens[index]) - len(chain) * workload.block_tokens
    return [*pieces, Piece(name=f"own {index}", num_tokens=own)] if own > 0 else pieces


def _shrunk(pieces: Sequence[Piece], shrink: int) -> list[Piece]:
    return [
        Piece(name=piece.name, num_tokens=max(1, piece.num_tokens // shrink)) for piece in pieces
    ]


def _starts(scenario: Scenario, rate: float) -> Iterator[float]:
    """Seconds from the start, the last one no later than the scenario's duration."""
    gap = _gaps(scenario.cv_of_gaps, np.random.default_rng([scenario.seed, 1]))
    now_s = gap() / rate
    while now_s <= scenario.duration_s:
        yield now_s
        now_s += gap() / rate


def _gaps(cv: float, rng: np.random.Generator) -> Callable[[], float]:
    """Draws of mean 1 with this coefficient of variation."""
    if cv == 0:
        return lambda: 1.0
    return lambda: float(rng.gamma(1.0 / cv**2, cv**2))


def _draw(lengths: Lengths, rng: np.random.Generator) -> int:
    """In tokens (or turns), at least 1."""
    match lengths:
        case Fixed():
            return lengths.tokens
        case Uniform():
            return int(rng.integers(lengths.min, lengths.max, endpoint=True))
        case Lognormal():
            drawn = rng.lognormal(np.log(lengths.median), lengths.sigma)
            return int(np.clip(drawn, lengths.min, lengths.max))
        case Quantiles():
            shares, tokens = np.array(lengths.points).T
            return max(1, round(float(np.exp(np.interp(rng.random(), shares, np.log(tokens))))))
