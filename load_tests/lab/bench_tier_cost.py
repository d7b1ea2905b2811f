"""What a host tier costs where nothing is ever found in it.

    python -m load_tests.lab.bench_tier_cost
    python -m load_tests.lab.bench_tier_cost --device cuda --shapes qwen3-8b --max-model-len 8192 \
        --prompt-tokens 4096 --cache-blocks 600 --arena-blocks 2000 --pairs 40

Two engines in one process with the same weights, one with a tier and one without. Both get the same
random prompts, each before the other in turn, so that whatever else the machine does befalls both.
Each prompt is new: all that is ever cached is evicted. Compared are sums of pairs: processor time
of the whole process, of the thread that steps, and time to the first token. What their differences
are worth says an interval that holds 95 % of sums over pairs drawn again, with replacement.

Three phases: until as many blocks were evicted as the tier holds, one in four is stored; then,
because nothing was found, one in sixteen (engine/kv/host/tier.py); at last all, as if blocks were
found all the time.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from actors.lifecycle.threads import share_interpreter
from configs.load import load_config
from engine.models.llama import CausalLM
from load_tests.lab.bench_host_tier import ON_GPU
from load_tests.lab.devices import describe_device
from load_tests.lab.in_process import EngineInProcess
from load_tests.lab.shapes import SHAPES, write_shapes
from load_tests.tables import render_rows

IDLE_WAIT_S = 0.05
NUM_WARM = 6
NUM_DRAWS = 2000
NUM_OUTPUT_TOKENS = 8
HEADER = ["stored", "pairs", "figure", "without s", "with s", "difference %", "95 % of draws"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one prompt, in seconds."""

    process_s: float
    stepping_s: float
    first_s: float


FIGURES = ("process_s", "stepping_s", "first_s")
NAMES = ("processor time, all threads", "processor time, stepping thread", "first token")


def ask(ours: EngineInProcess, prompt: Sequence[int]) -> Costs:
    """Costs until the engine is idle again, what the tier does in other threads among them."""
    began = time.process_time(), time.thread_time(), time.perf_counter()
    core, tier, has_news = ours.engine.core, ours.engine.host_tier, Event()
    if tier is not None:
        tier.on_progress(has_news.set)
    first_s = 0.0
    ours.add(prompt, NUM_OUTPUT_TOKENS)
    while core.has_work:
        has_news.clear()
        output = ours.step()
        if not output.has_progressed:  # as a worker's engine thread does
            has_news.wait(core.idle_s(IDLE_WAIT_S))
        if output.tokens and not first_s:
            first_s = time.perf_counter() - began[2]
    return Costs(time.process_time() - began[0], time.thread_time() - began[1], first_s)


def compared(phase: str, pairs: Sequence[tuple[Costs, Costs]], rng: random.Random) -> list[str]:
    """A row for each figure, cells joined by tabs."""
    rows = []
    for field, name in zip(FIGURES, NAMES, strict=True):
        without = [getattr(pair[0], field) for pair in pairs]
        extra = [getattr(pair[1], field) - getattr(pair[0], field) for pair in pairs]
        total_s = sum(without)
        draws = sorted(sum(rng.choices(extra, k=len(extra))) for _ in range(NUM_DRAWS))
        low, high = (100 * draws[int(share * NUM_DRAWS)] / total_s for share in (0.025, 0.975))
        rows.append(
            f"{phase}\t{len(pairs)}\t{name}\t{total_s:.2f}\t{total_s + sum(extra):.2f}"
            f"\t{100 * sum(extra) / total_s:+.2f}\t{low:+.2f} to {high:+.2f}"
        )
    return rows


class Pair:
    """Engines without and with a tier, and the prompts that both of them get."""

    def __init__(self, args: argparse.Namespace, folder: Path | None) -> None:
        self._rng = random.Random(args.seed)
        self._max_tokens = args.prompt_tokens
        without = self._build(args, folder, 0.0, None)
        block_bytes = without.engine.layout.block_bytes
        # With room for what is kept beside the blocks, a hundredth of them or less.
        host_gib = (1.01 * args.arena_blocks * (block_bytes + 128) + 2**22) / 2**30
        with_tier = self._build(args, folder, host_gib, without.engine.executor.model)
        self.engines = without, with_tier
        for _ in range(NUM_WARM):
            self.ask(without_first=True)

    def _build(
        self,
        args: argparse.Namespace,
        folder: Path | None,
        host_gib: float,
        model: CausalLM | None,
    ) -> EngineInProcess:
        own = {} if folder is None else {"model.path": str(folder), "model.weights": "random"}
        on_gpu = ON_GPU if args.device == "cuda" else {}
        keys = {
            **own,
            **on_gpu,
            "model.device": args.device,
            "model.max_model_len": args.max_model_len,
            "cache.num_blocks": args.cache_blocks,
            "cache.host_gib": host_gib,
        }
        return EngineInProcess(load_config(None, keys), model)

    @property
    def num_evicted(self) -> int:
        """By the engine with a tier, since its start."""
        return self.engines[1].engine.shared_cache.statistics().num_evicted_blocks

    @property
    def num_tier_blocks(self) -> int:
        tier = self.engines[1].engine.load().host_tier
        assert tier is not None, "it was configured"
        return tier.num_blocks

    def note_hit(self) -> None:
        """As if a block had been found: what is evicted next is stored."""
        tier = self.engines[1].engine.host_tier
        assert tier is not None, "it was configured"
        tier.note_hit()

    def ask(self, *, without_first: bool) -> tuple[Costs, Costs]:
        length = self._rng.randrange(self._max_tokens // 2, self._max_tokens)
        vocab_size = self.engines[0].engine.spec.vocab_size
        prompt = [self._rng.randrange(vocab_size) for _ in range(length)]
        order = (0, 1) if without_first else (1, 0)
        costs = {number: ask(self.engines[number], prompt) for number in order}
        return costs[0], costs[1]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--shapes", choices=sorted(SHAPES), help="random weights of these shapes")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--prompt-tokens", type=int, default=1200, help="longest; half = shortest")
    parser.add_argument("--cache-blocks", type=int, default=136)
    parser.add_argument("--arena-blocks", type=int, default=4096)
    parser.add_argument("--pairs", type=int, default=100, help="of phase two; half in three")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def main() -> None:
    share_interpreter()  # as in a worker
    args = build_parser().parse_args()
    rng, rows = random.Random(args.seed), list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_shapes(args.shapes, Path(scratch)) if args.shapes else None
        pair = Pair(args, folder)
        try:
            first: list[tuple[Costs, Costs]] = []
            while pair.num_evicted < pair.num_tier_blocks:
                first.append(pair.ask(without_first=len(first) % 2 == 0))
            later = [pair.ask(without_first=i % 2 == 0) for i in range(args.pairs)]
            stored: list[tuple[Costs, Costs]] = []
            for i in range(args.pairs // 2):
                pair.note_hit()
                stored.append(pair.ask(without_first=i % 2 == 0))
            for phase, pairs in (("a quarter", first), ("a sixteenth", later), ("all", stored)):
                rows += compared(phase, pairs, rng)
            print(pair.engines[1].engine.load().host_tier)
        finally:
            pair.engines[1].engine.close()
    print(render_rows([HEADER, *(row.split("\t") for row in rows)]))
    print("\n".join(f"{name}: {value}" for name, value in describe_device(args.device).items()))


if __name__ == "__main__":
    main()
