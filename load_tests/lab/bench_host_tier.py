"""Growing conversations over a KV cache that is four times too small, with and without a host tier.

    python -m load_tests.lab.bench_host_tier
    python -m load_tests.lab.bench_host_tier --device cuda --shapes qwen3-8b --scale 1 \\
        --duration-s 60 --max-model-len 8192 --at-once 8 --max-output-tokens 32 --host-gib 12
    python -m load_tests.lab.bench_host_tier_vllm ...       # the same turns on vLLM

The turns of a scenario's conversations, in the order in which they are due, so many `--at-once` and
each after the one before it in its conversation: the next is asked as soon as one has its answer.
With one at a time (the default) a first token waits for its own prompt alone. Conversations are
scaled in their lengths; their ends are cut off where they exceed the model's context. The cache
holds a share of what all conversations alive at one time have said, but no less than one context.

Threads share the interpreter as in a worker: those that load wait for the one that steps.

An engine without a tier and a fresh one with it, over the same weights, in turn. Each answers the
conversations, and then prompts of the same lengths that are all different: nothing is found and
everything is evicted, which is what a tier costs. On a CPU every engine must give the same tokens.
"""

import argparse
import heapq
import statistics
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Protocol

import msgspec

from actors.lifecycle.threads import share_interpreter
from configs.load import load_config
from configs.schema import AppConfig
from engine.kv.host.tier import HostTier
from engine.models.llama import CausalLM
from load_tests.http_load.dialogue import Content, IdDialogue
from load_tests.http_load.scenario import read_scenario
from load_tests.http_load.schedule import Piece, Session, Turn, draw_sessions
from load_tests.lab.devices import describe_device
from load_tests.lab.in_process import EngineInProcess
from load_tests.lab.shapes import SHAPES, write_shapes
from load_tests.lab.trace_loads import LoadTrace, summary
from load_tests.tables import render_rows

BLOCK_SIZE = 16
IDLE_WAIT_S = 0.05
WARM_SALT = 10**6  # of prompts that nobody times
# As large steps as the peer's, and all blocks for all prompts.
ON_GPU: dict[str, object] = {
    "model.dtype": "bfloat16",
    "scheduler.max_num_batched_tokens": 8192,
    "scheduler.short_share": 0.0,
}
HEADER = [
    "run", "first token ms: mean", "p50", "p90", "later turns: mean", "turns/s", "all s", "cpu s",
    "found %", "from host %", "loads", "given up", "unworthy", "tokens computed",
    "load GB/s", "host ms a step",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: whose, and which turn of it."""

    session: int
    turn: Turn
    number: int  # of the turn, from 0


def scaled(session: Session, scale: float, max_tokens: int, max_output_tokens: int) -> Session:
    """With shorter (or longer) pieces and answers, as far as all of it fits the context."""
    turns: list[Turn] = []
    num_tokens = 0
    for turn in session.turns:
        pieces = tuple(
            Piece(name=piece.name, num_tokens=max(1, round(scale * piece.num_tokens)))
            for piece in turn.pieces
        )
        num_output = min(max(1, round(scale * turn.num_output_tokens)), max_output_tokens)
        num_tokens += sum(piece.num_tokens for piece in pieces) + num_output
        if num_tokens > max_tokens:
            break
        given = {"pieces": pieces, "num_output_tokens": num_output}
        turns.append(Turn(**{**_fields(turn), **given}))  # type: ignore[arg-type]
    return Session(index=session.index, start_s=session.start_s, turns=tuple(turns))


def _fields(turn: Turn) -> dict[str, object]:
    return {"index": turn.index, "think_s": turn.think_s}


def in_order(sessions: Sequence[Session], gap_s: float) -> Iterator[Ask]:
    """All turns by the time at which they are due, if an answer takes `gap_s`."""
    due = [(session.start_s, i, 0) for i, session in enumerate(sessions) if session.turns]
    heapq.heapify(due)
    while due:
        now_s, i, number = heapq.heappop(due)
        turns = sessions[i].turns
        yield Ask(session=i, turn=turns[number], number=number)
        if number + 1 < len(turns):
            next_s = now_s + gap_s + turns[number + 1].think_s
            heapq.heappush(due, (next_s, i, number + 1))


def working_set_tokens(sessions: Sequence[Session], asks: Sequence[Ask]) -> int:
    """The most that conversations between their first and their last turn have said together."""
    said = [0] * len(sessions)
    most = 0
    for ask in asks:
        said[ask.session] += ask.turn.num_new_tokens + ask.turn.num_output_tokens
        most = max(most, sum(said))
        if ask.number + 1 == len(sessions[ask.session].turns):
            said[ask.session] = 0
    return most


@dataclass(slots=True, kw_only=True)
class Answer:
    """Of a turn, as far as it has come."""

    ask: Ask
    began_s: float
    tokens: list[int] = field(default_factory=list)
    num_prompt_tokens: int
    num_found_tokens: int = 0  # of the prompt, not computed
    first_s: float = 0.0  # from `began_s` to the first token


@dataclass(slots=True, kw_only=True)
class Result:
    """What one run took."""

    tokens: list[list[int]]  # of each turn
    answers: list[Answer]
    first_s: list[float]
    later_s: list[float]  # of turns after the first
    num_prompt_tokens: int
    num_found_tokens: int  # on the device, loaded ones among them
    wall_s: float
    cpu_s: float
    num_loaded_tokens: int = 0
    num_loads: int = 0
    num_given_up: int = 0
    num_unworthy: int = 0  # blocks that were found, and sooner computed; at every look
    load_gb_s: float | None = None  # by which the tier predicts at the end
    host_ms: float | None = None  # of planning, launching and committing one of the last steps

    def cells(self) -> list[str]:
        first_ms = [1e3 * s for s in self.first_s]
        later_ms = [1e3 * s for s in self.later_s]
        p90 = statistics.quantiles(first_ms, n=10)[-1]
        return [
            f"{statistics.mean(first_ms):.1f}",
            f"{statistics.median(first_ms):.1f}",
            f"{p90:.1f}",
            f"{statistics.mean(later_ms):.1f}" if later_ms else "-",
            f"{len(first_ms) / self.wall_s:.2f}",
            f"{self.wall_s:.1f}",
            f"{self.cpu_s:.1f}",
            f"{100 * self.num_found_tokens / self.num_prompt_tokens:.1f}",
            f"{100 * self.num_loaded_tokens / self.num_prompt_tokens:.1f}",
            str(self.num_loads),
            str(self.num_given_up),
            str(self.num_unworthy),
            str(self.num_prompt_tokens - self.num_found_tokens),
            "-" if self.load_gb_s is None else f"{self.load_gb_s:.1f}",
            "-" if self.host_ms is None else f"{self.host_ms:.2f}",
        ]


@dataclass(frozen=True, slots=True)
class Progress:
    """Of one prompt, in one step."""

    key: Hashable
    tokens: Sequence[int]  # new ones
    num_found_tokens: int  # of the prompt, if it is told with these


class Player(Protocol):
    """An engine that answers several prompts at a time, greedily, and to the length asked for."""

    def begin(self, prompt: list[int], num_tokens: int) -> Hashable:
        """Returns the key of the prompt's answer."""
        ...

    def step(self) -> Sequence[Progress]: ...


class Prompts:
    """What each turn asks; one salt, the same prompts."""

    def __init__(
        self, sessions: Sequence[Session], vocab_size: int, salt: int, *, grows: bool
    ) -> None:
        """grows: a turn repeats what its conversation has said; else it has a prompt of its own, as
        long as that but for the answers.
        """
        self._sessions = sessions
        self._vocab_size = vocab_size
        self._salt = salt
        self._grows = grows
        self._said = [self._dialogue(salt) for _ in sessions]

    def of(self, ask: Ask) -> list[int]:
        dialogue, pieces = self._said[ask.session], ask.turn.pieces
        if not self._grows:
            turns = self._sessions[ask.session].turns[: ask.number + 1]
            pieces = tuple(piece for turn in turns for piece in turn.pieces)
            dialogue = self._dialogue(self._salt + 1 + ask.turn.index)
        return [i for i in dialogue.ask(pieces) if isinstance(i, int)]

    def answered(self, ask: Ask, tokens: Sequence[int]) -> None:
        self._said[ask.session].hear("", tokens, ask.turn.pieces[0])

    def _dialogue(self, salt: int) -> IdDialogue:
        return IdDialogue(Content(salt=salt, vocab_size=self._vocab_size))


def play(
    player: Player,
    prompts: Prompts,
    asks: Sequence[Ask],
    at_once: int,
    now_s: Callable[[], float] = time.perf_counter,
) -> Result:
    """Ask all turns, so many at a time, in their order as far as their conversations allow it."""
    waiting, answers = list(asks), dict[int, Answer]()  # by the turn's index
    running: dict[Hashable, Answer] = {}
    num_prompt_tokens = 0
    began_s, began_cpu_s = now_s(), time.process_time()
    while waiting or running:
        talking = {answer.ask.session for answer in running.values()}
        while len(running) < at_once:
            ask = next((ask for ask in waiting if ask.session not in talking), None)
            if ask is None:
                break
            waiting.remove(ask)
            talking.add(ask.session)
            prompt = prompts.of(ask)
            num_prompt_tokens += len(prompt)
            answer = Answer(ask=ask, began_s=now_s(), num_prompt_tokens=len(prompt))
            answers[ask.turn.index] = answer
            running[player.begin(prompt, ask.turn.num_output_tokens)] = answer
        for progress in player.step():
            answer = running[progress.key]
            if progress.tokens and not answer.tokens:
                answer.first_s = now_s() - answer.began_s
            answer.tokens += progress.tokens
            answer.num_found_tokens = max(answer.num_found_tokens, progress.num_found_tokens)
            if len(answer.tokens) == answer.ask.turn.num_output_tokens:
                prompts.answered(answer.ask, answer.tokens)
                del running[progress.key]
    in_turn = [answers[ask.turn.index] for ask in asks]
    return Result(
        tokens=[answer.tokens for answer in in_turn],
        answers=in_turn,
        first_s=[answer.first_s for answer in in_turn],
        later_s=[answer.first_s for answer in in_turn if answer.ask.number > 0],
        num_prompt_tokens=num_prompt_tokens,
        num_found_tokens=sum(answer.num_found_tokens for answer in in_turn),
        wall_s=now_s() - began_s,
        cpu_s=time.process_time() - began_cpu_s,
    )


class OurPlayer:
    """An engine of ours."""

    def __init__(self, ours: EngineInProcess) -> None:
        self._ours = ours
        self._has_news = Event()
        if ours.engine.host_tier is not None:
            ours.engine.host_tier.on_progress(self._has_news.set)

    def begin(self, prompt: list[int], num_tokens: int) -> Hashable:
        return self._ours.add(prompt, num_tokens)

    def step(self) -> Sequence[Progress]:
        self._has_news.clear()
        output = self._ours.step()
        if not output.has_progressed:  # as a worker's engine thread does
            self._has_news.wait(self._ours.engine.core.idle_s(IDLE_WAIT_S))
        return [
            Progress(record.key, [record.token_id], record.num_cached_tokens or 0)
            for _, record in output.tokens
        ]


def run(
    ours: EngineInProcess, sessions: Sequence[Session], args: argparse.Namespace, *, grows: bool
) -> Result:
    """As `play`, on an engine of ours."""
    prompts = Prompts(sessions, ours.engine.spec.vocab_size, 1, grows=grows)
    before = ours.engine.load().host_tier
    result = play(OurPlayer(ours), prompts, list(in_order(sessions, args.gap_s)), args.at_once)
    after = ours.engine.load().host_tier
    times = ours.engine.core.statistics()
    result.host_ms = 1e3 * sum(t.mean_s for t in (times.plan, times.launch, times.commit))
    if before is not None and after is not None:
        result.num_loaded_tokens = (after.num_loaded - before.num_loaded) * BLOCK_SIZE
        result.num_loads = after.num_waits - before.num_waits
        result.num_given_up = after.num_given_up - before.num_given_up
        result.num_unworthy = after.num_unworthy - before.num_unworthy
        result.load_gb_s = load_gb_s(ours.engine.host_tier, after.block_bytes)
    return result


def load_gb_s(tier: HostTier | None, block_bytes: int) -> float | None:
    levels = [] if tier is None else tier.levels()
    return block_bytes / levels[0].block_s / 1e9 if levels else None  # none: it is switched off


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--shapes", choices=sorted(SHAPES), help="random weights of these shapes")
    parser.add_argument("--scenario", default="agents")
    parser.add_argument("--scale", type=float, default=0.25, help="of all lengths")
    parser.add_argument("--max-output-tokens", type=int, default=10**6, help="of an answer")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--at-once", type=int, default=1, help="turns that are answered together")
    parser.add_argument("--duration-s", type=float, default=20.0, help="of the arrivals")
    parser.add_argument("--gap-s", type=float, default=5.0, help="between turns, beside thinking")
    parser.add_argument("--share", type=float, default=0.25, help="cache / working set")
    parser.add_argument("--host-gib", type=float, default=1.0)
    parser.add_argument(
        "--disk-host-gib", type=float, help="one more run: a host tier so small, over a disk tier"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--trace", action="store_true", help="tell of every load, and slow turns")
    parser.add_argument("--seed", type=int, default=7)
    return parser


def engine_config(
    args: argparse.Namespace,
    folder: Path | None,
    num_blocks: int,
    host_gib: float,
    disk: Path | None,
) -> AppConfig:
    """The default configuration, but for what `args` says and a GPU is given."""
    model = {} if folder is None else {"model.path": str(folder), "model.weights": "random"}
    on_gpu = ON_GPU if args.device == "cuda" else {}
    keys = {
        **model,
        **on_gpu,
        "model.device": args.device,
        "model.max_model_len": args.max_model_len,
        "cache.num_blocks": num_blocks,
        "cache.host_gib": host_gib,
        "cache.disk_path": None if disk is None else str(disk),
    }
    return load_config(None, keys)


class Runner:
    """Fresh engines over the same weights, and what each of them took."""

    def __init__(
        self,
        args: argparse.Namespace,
        folder: Path | None,
        sessions: Sequence[Session],
        num_blocks: int,
    ) -> None:
        share_interpreter()
        self._args, self._folder = args, folder
        self._sessions, self._num_blocks = sessions, num_blocks
        self._model: CausalLM | None = None
        self._expected: dict[bool, list[list[int]]] = {}
        self.rows = [HEADER]

    def run(self, name: str, host_gib: float, disk: Path | None = None) -> None:
        """Adds a row for each kind of prompts; prints them."""
        args = self._args
        config = engine_config(args, self._folder, self._num_blocks, host_gib, disk)
        ours = EngineInProcess(config, self._model)
        self._model = ours.engine.executor.model
        tier, trace = ours.engine.host_tier, None
        if args.trace and tier is not None:
            trace = LoadTrace(tier, ours.engine.kv_store, ours.engine.shared_cache)
        try:
            few = self._sessions[:3]
            warm = Prompts(few, ours.engine.spec.vocab_size, WARM_SALT, grows=False)
            play(OurPlayer(ours), warm, list(in_order(few, args.gap_s)), 1)  # fits the cost model
            for grows, about in ((True, "conversations"), (False, "all different")):
                result = run(ours, self._sessions, args, grows=grows)
                expected = self._expected.setdefault(grows, result.tokens)
                assert args.device == "cuda" or expected == result.tokens, "other tokens"
                self.rows.append([f"{about}, {name}", *result.cells()])
                print("  ".join(self.rows[-1]), flush=True)
                if trace is not None:
                    tell_trace(trace, result)
        finally:
            ours.engine.close()


def tell_trace(trace: LoadTrace, result: Result) -> None:
    """Print the slowest tenth of the turns, and what befell the loads since the last time."""
    slowest = sorted(result.answers, key=lambda answer: -answer.first_s)
    for answer in slowest[: len(slowest) // 10]:
        print(
            f"  {1e3 * answer.first_s:.1f} ms: turn {answer.ask.number} of {answer.ask.session},"
            f" {answer.num_found_tokens} of {answer.num_prompt_tokens} tokens found"
        )
    loads, save_s = trace.take()
    for line in [*summary(loads, save_s), *(load.describe() for load in loads)]:
        print(f"  {line}", flush=True)


def draw(args: argparse.Namespace) -> tuple[list[Session], int]:
    """The conversations, and how many blocks the cache has; prints both."""
    scenario = read_scenario(args.scenario)
    scenario = msgspec.structs.replace(scenario, duration_s=args.duration_s, seed=args.seed)
    cut = args.scale, args.max_model_len - 1, args.max_output_tokens
    sessions = [scaled(session, *cut) for session in draw_sessions(scenario)]
    asks = list(in_order(sessions, args.gap_s))
    most = working_set_tokens(sessions, asks)
    num_blocks = max(int(args.share * most) // BLOCK_SIZE, args.max_model_len // BLOCK_SIZE)
    print(
        f"{len(sessions)} conversations, {len(asks)} turns; working set {most} tokens, cache"
        f" {num_blocks} blocks of {BLOCK_SIZE} ({num_blocks * BLOCK_SIZE / most:.2f} of it)",
        flush=True,
    )
    return sessions, num_blocks


def main() -> None:
    args = build_parser().parse_args()
    sessions, num_blocks = draw(args)
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_shapes(args.shapes, Path(scratch)) if args.shapes else None
        runner = Runner(args, folder, sessions, num_blocks)
        for number in range(args.rounds):
            for host_gib in (0.0, args.host_gib):
                runner.run(f"{host_gib:g} GiB", host_gib)
            if args.disk_host_gib is not None:
                name = f"{args.disk_host_gib:g} GiB"
                runner.run(name, args.disk_host_gib)
                disk = Path(scratch) / f"kv-{number}"
                runner.run(f"{name} + disk", args.disk_host_gib, disk)
    print(render_rows(runner.rows))
    print("\n".join(f"{name}: {value}" for name, value in describe_device(args.device).items()))


if __name__ == "__main__":
    main()
