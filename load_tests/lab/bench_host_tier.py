"""Growing conversations over a KV cache that is four times too small, with and without a host tier.

    python -m load_tests.lab.bench_host_tier
    python -m load_tests.lab.bench_host_tier --device cuda --shapes qwen3-8b --scale 4 --host-gib 64
    python -m load_tests.lab.bench_host_tier_vllm --shapes qwen3-8b ...     # the same turns on vLLM

The turns of a scenario's conversations, in the order in which they are due, one at a time: so a
first token waits for its own prompt alone. Conversations are scaled in their lengths; their ends
are cut off where they exceed the model's context. The cache holds a share of what all conversations
alive at one time have said. Three kinds of runs, in turn and on fresh engines with the same
weights: no tier, a tier, and again both on prompts that are all different (nothing is ever found,
everything is evicted), which is what a tier costs. Every run must give the same tokens.
"""

import argparse
import heapq
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event

import msgspec

from configs.load import load_config
from configs.schema import AppConfig
from engine.models.llama import CausalLM
from load_tests.http_load.dialogue import Content, IdDialogue
from load_tests.http_load.scenario import read_scenario
from load_tests.http_load.schedule import Piece, Session, Turn, draw_sessions
from load_tests.lab.in_process import EngineInProcess
from load_tests.lab.shapes import SHAPES, write_shapes
from load_tests.tables import describe_machine, render_rows

BLOCK_SIZE = 16
IDLE_WAIT_S = 0.05
HEADER = [
    "run", "first token ms: mean", "p50", "p90", "later turns: mean", "all s", "cpu s",
    "found %", "from host %", "loads", "given up", "tokens computed",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: whose, and which turn of it."""

    session: int
    turn: Turn
    number: int  # of the turn, from 0


def scaled(session: Session, scale: float, max_tokens: int) -> Session:
    """With shorter (or longer) pieces and answers, as far as all of it fits the context."""
    turns: list[Turn] = []
    num_tokens = 0
    for turn in session.turns:
        pieces = tuple(
            Piece(name=piece.name, num_tokens=max(1, round(scale * piece.num_tokens)))
            for piece in turn.pieces
        )
        num_output = max(1, round(scale * turn.num_output_tokens))
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
class Result:
    """What one run took."""

    tokens: list[list[int]] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    later_s: list[float] = field(default_factory=list)  # of turns after the first
    num_prompt_tokens: int = 0
    num_found_tokens: int = 0  # on the device, loaded ones among them
    num_loaded_tokens: int = 0
    num_loads: int = 0
    num_given_up: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def note_first(self, seconds: float, ask: Ask) -> None:
        """The first token of an answer has come."""
        self.first_s.append(seconds)
        if ask.number > 0:
            self.later_s.append(seconds)

    def cells(self) -> list[str]:
        first_ms = [1e3 * s for s in self.first_s]
        later_ms = [1e3 * s for s in self.later_s]
        p90 = statistics.quantiles(first_ms, n=10)[-1]
        return [
            f"{statistics.mean(first_ms):.1f}",
            f"{statistics.median(first_ms):.1f}",
            f"{p90:.1f}",
            f"{statistics.mean(later_ms):.1f}" if later_ms else "-",
            f"{self.wall_s:.1f}",
            f"{self.cpu_s:.1f}",
            f"{100 * self.num_found_tokens / self.num_prompt_tokens:.1f}",
            f"{100 * self.num_loaded_tokens / self.num_prompt_tokens:.1f}",
            str(self.num_loads),
            str(self.num_given_up),
            str(self.num_prompt_tokens - self.num_found_tokens),
        ]


def play(
    ask_one: Callable[[list[int], Ask, Result], None],
    vocab_size: int,
    sessions: Sequence[Session],
    gap_s: float,
    *,
    grows: bool,
    salt: int,
) -> Result:
    """Ask all turns, one after the other; unless it `grows`, each turn has a prompt of its own.

    ask_one: answers a prompt, and notes the answer's tokens and times. salt: one salt, the same
    prompts.
    """
    result = Result()
    said = [IdDialogue(Content(salt=salt, vocab_size=vocab_size)) for _ in sessions]
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for ask in in_order(sessions, gap_s):
        pieces: Sequence[Piece] = ask.turn.pieces
        dialogue = said[ask.session]
        if not grows:  # as long as the conversation's
            turns = sessions[ask.session].turns[: ask.number + 1]
            pieces = [piece for turn in turns for piece in turn.pieces]
            dialogue = IdDialogue(Content(salt=salt + 1 + ask.turn.index, vocab_size=vocab_size))
        prompt = dialogue.ask(pieces)
        ask_one([i for i in prompt if isinstance(i, int)], ask, result)
        dialogue.hear("", result.tokens[-1], pieces[0])
    result.wall_s = time.perf_counter() - began_s
    result.cpu_s = time.process_time() - began_cpu_s
    return result


def run(
    ours: EngineInProcess, sessions: Sequence[Session], gap_s: float, *, grows: bool, salt: int
) -> Result:
    """As `play`, on an engine of ours."""
    vocab_size = ours.engine.spec.vocab_size
    result = play(partial(_ask, ours), vocab_size, sessions, gap_s, grows=grows, salt=salt)
    tier = ours.engine.load().host_tier
    if tier is not None:
        result.num_loaded_tokens = tier.num_loaded * BLOCK_SIZE
        result.num_loads, result.num_given_up = tier.num_waits, tier.num_given_up
    return result


def _ask(ours: EngineInProcess, prompt: list[int], ask: Ask, result: Result) -> None:
    began_s = time.perf_counter()
    ours.add(prompt, ask.turn.num_output_tokens)
    tokens: list[int] = []
    core, tier, has_news = ours.engine.core, ours.engine.host_tier, Event()
    if tier is not None:
        tier.on_progress(has_news.set)
    while core.has_work:
        has_news.clear()
        output = ours.step()
        if not output.has_progressed:  # as a worker's engine thread does
            has_news.wait(core.idle_s(IDLE_WAIT_S))
        for _, record in output.tokens:
            if not tokens:
                result.note_first(time.perf_counter() - began_s, ask)
                result.num_found_tokens += record.num_cached_tokens or 0
            tokens.append(record.token_id)
    result.num_prompt_tokens += len(prompt)
    result.tokens.append(tokens)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--shapes", choices=sorted(SHAPES), help="random weights of these shapes")
    parser.add_argument("--scenario", default="agents")
    parser.add_argument("--scale", type=float, default=0.25, help="of all lengths")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--duration-s", type=float, default=20.0, help="of the arrivals")
    parser.add_argument("--gap-s", type=float, default=5.0, help="between turns, beside thinking")
    parser.add_argument("--share", type=float, default=0.25, help="cache / working set")
    parser.add_argument("--host-gib", type=float, default=1.0)
    parser.add_argument(
        "--disk-host-gib", type=float, help="one more run: a host tier so small, over a disk tier"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    return parser


def engine_config(
    args: argparse.Namespace,
    folder: Path | None,
    num_blocks: int,
    host_gib: float,
    disk: Path | None,
) -> AppConfig:
    """The default configuration, but for what `args` says."""
    model = {} if folder is None else {"model.path": str(folder), "model.weights": "random"}
    on_gpu = {"model.dtype": "bfloat16"} if args.device == "cuda" else {}
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
    """Fresh engines over the same weights."""

    def __init__(self, args: argparse.Namespace, folder: Path | None, num_blocks: int) -> None:
        self._args, self._folder, self._num_blocks = args, folder, num_blocks
        self._model: CausalLM | None = None

    def run(
        self,
        sessions: Sequence[Session],
        *,
        host_gib: float,
        grows: bool,
        disk: Path | None = None,
    ) -> Result:
        config = engine_config(self._args, self._folder, self._num_blocks, host_gib, disk)
        ours = EngineInProcess(config, self._model)
        self._model = ours.engine.executor.model
        try:
            gap_s = self._args.gap_s
            run(ours, sessions[:3], gap_s, grows=False, salt=10**6)  # to fit the cost model
            return run(ours, sessions, gap_s, grows=grows, salt=1)
        finally:
            ours.engine.close()


def draw(args: argparse.Namespace) -> tuple[list[Session], int]:
    """The conversations, and how many blocks the cache has; prints both."""
    scenario = read_scenario(args.scenario)
    scenario = msgspec.structs.replace(scenario, duration_s=args.duration_s, seed=args.seed)
    sessions = [scaled(s, args.scale, args.max_model_len - 1) for s in draw_sessions(scenario)]
    asks = list(in_order(sessions, args.gap_s))
    most = working_set_tokens(sessions, asks)
    num_blocks = max(int(args.share * most) // BLOCK_SIZE, args.max_model_len // BLOCK_SIZE)
    print(
        f"{len(sessions)} conversations, {len(asks)} turns; working set {most} tokens, cache"
        f" {num_blocks} blocks of {BLOCK_SIZE} ({num_blocks * BLOCK_SIZE / most:.2f} of it)"
    )
    return sessions, num_blocks


def main() -> None:
    args = build_parser().parse_args()
    sessions, num_blocks = draw(args)
    rows = [HEADER]
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_shapes(args.shapes, Path(scratch)) if args.shapes else None
        runner = Runner(args, folder, num_blocks)
        for grows, about in ((True, "conversations"), (False, "all different")):
            expected: list[list[int]] | None = None
            for _ in range(args.rounds):
                for host_gib in (0.0, args.host_gib):
                    result = runner.run(sessions, host_gib=host_gib, grows=grows)
                    expected = expected or result.tokens
                    assert args.device == "cuda" or expected == result.tokens, "other tokens"
                    rows.append([f"{about}, {host_gib:g} GiB", *result.cells()])
                    print("  ".join(rows[-1]), flush=True)
                if args.disk_host_gib is not None:
                    for disk in (None, Path(scratch) / f"kv-{grows}"):
                        result = runner.run(
                            sessions, host_gib=args.disk_host_gib, grows=grows, disk=disk
                        )
                        assert args.device == "cuda" or expected == result.tokens, "other tokens"
                        below = "" if disk is None else " + disk"
                        name = f"{about}, {args.disk_host_gib:g} GiB{below}"
                        rows.append([name, *result.cells()])
                        print("  ".join(rows[-1]), flush=True)
    print(render_rows(rows))
    print("\n".join(f"{name}: {value}" for name, value in describe_machine().items()))


if __name__ == "__main__":
    main()
