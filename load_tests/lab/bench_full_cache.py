"""Short first tokens beside long answers that fill the KV cache, and what it costs the long ones.

    python -m load_tests.lab.bench_full_cache
    python -m load_tests.lab.bench_full_cache --device cuda --shapes qwen3-8b --num-blocks 2048
    python -m load_tests.lab.bench_full_cache --virtual
    python -m load_tests.lab.bench_full_cache --long 64 --num-blocks 8192 # rows run out, not blocks

The engine in this process, or with `--virtual` its scheduler over predicted step costs. Runs: short
prompts alone; beside long answers with blocks for all; with too few blocks and no reserve
(`short_share` 0), and with each of `--shares`. The same arrivals in every run; greedy, no end of
sequence, prompts of random tokens. A run ends with the last long answer.
"""

import argparse
import gc
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from configs.load import load_config
from configs.schema import AppConfig
from engine.request import RequestKey
from load_tests.lab.full_cache import HEADER, FullCacheLoad, FullCacheResult, Timeline, run_virtual
from load_tests.lab.in_process import EngineInProcess
from load_tests.lab.shapes import SHAPES, write_shapes
from load_tests.prompts import RandomPrompts
from load_tests.simulation.real_worker import BLOCK_SIZE
from load_tests.simulation.worker import WorkerSpec
from load_tests.tables import describe_machine, render_rows

POLL_S = 2e-4
WARM_UP = FullCacheLoad(num_long=0, alone_s=2.0, seed=1)


def run_engine(load: FullCacheLoad, ours: EngineInProcess) -> FullCacheResult:
    """Serve `load` until its last token."""
    return _EngineRun(load, ours).run()


class _EngineRun:
    """One run: adds what is due between two steps, as a worker's engine thread does."""

    def __init__(self, load: FullCacheLoad, ours: EngineInProcess) -> None:
        self._load = load
        self._ours = ours
        self._timeline = Timeline.of(load)
        self._short: dict[RequestKey, int] = {}
        self._long: set[RequestKey] = set()
        self._start_s = 0.0
        self._num_computed = 0

    def run(self) -> FullCacheResult:
        load, core = self._load, self._ours.engine.core
        prompts = RandomPrompts(self._ours.engine.spec.vocab_size, seed=load.seed)
        arrivals = load.arrivals_s()
        next_s, num_before = next(arrivals), core.scheduler.statistics().num_preemptions
        gc.collect()
        self._start_s = time.perf_counter()
        for prompt in prompts.draw(load.num_long, load.num_prompt_tokens):
            self._long.add(self._ours.add(prompt, load.num_long_tokens))
        while core.has_work or not self._timeline.is_over(self._now_s()):
            while next_s <= self._now_s() and not self._timeline.is_over(next_s):
                (prompt,) = prompts.draw(1, load.num_prompt_tokens)
                key = self._ours.add(prompt, load.num_short_tokens)
                self._short[key] = len(self._short)
                self._timeline.arrived_s.append(next_s)
                next_s = next(arrivals)
            if not core.has_work:
                time.sleep(POLL_S)
                continue
            self._step()
            num_preemptions = core.scheduler.statistics().num_preemptions - num_before
            if num_preemptions and self._timeline.full_since_s is None:
                self._timeline.full_since_s = self._now_s()
        return self._timeline.result(num_preemptions, self._num_computed)

    def _step(self) -> None:
        output = self._ours.step()
        now_s = self._now_s()
        self._num_computed += output.num_scheduled_tokens
        for _, record in output.tokens:
            if record.key in self._short and record.index == 0:
                self._timeline.first_s[self._short[record.key]] = now_s
            if record.key in self._long and record.finish is not None:
                self._timeline.long_end_s.append(now_s)

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s


def engine_config(
    args: argparse.Namespace, folder: Path | None, num_blocks: int, share: float
) -> AppConfig:
    """The default configuration, but for what `args` says."""
    model = {} if folder is None else {"model.path": str(folder), "model.weights": "random"}
    on_gpu = {"model.dtype": "bfloat16"} if args.device == "cuda" else {}
    return load_config(
        None,
        {
            **model,
            **on_gpu,
            "model.device": args.device,
            "model.max_model_len": args.prompt_tokens + args.long_tokens + BLOCK_SIZE,
            "cache.enable_prefix_caching": not args.no_prefix_cache,
            "cache.num_blocks": num_blocks,
            "scheduler.max_num_seqs": args.max_rows,
            "scheduler.short_share": share,
            "laps.queue": args.queue,
        },
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--shapes", choices=sorted(SHAPES), help="random weights of these shapes")
    parser.add_argument("--virtual", action="store_true", help="predicted step costs, no model")
    parser.add_argument("--num-blocks", type=int, default=2048, help="too few for the answers")
    parser.add_argument("--roomy-blocks", type=int, default=8192, help="enough; 0 = not run")
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--queue", choices=("priority", "fcfs", "laps"), default="priority")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05], help="short_share")
    parser.add_argument("--long", type=int, default=40, help="long answers")
    parser.add_argument("--long-tokens", type=int, default=1500)
    parser.add_argument("--short-tokens", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=20)
    parser.add_argument("--rate", type=float, default=2.0, help="short prompts per second")
    parser.add_argument("--alone-s", type=float, default=20.0, help="of short prompts alone")
    parser.add_argument("--seed", type=int, default=7)
    return parser


class Runner:
    """Runs loads as `args` asks for, on an engine or on a virtual clock."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self._args = args
        self._folder = write_shapes(args.shapes, scratch) if args.shapes else None

    def run(self, load: FullCacheLoad, num_blocks: int, share: float) -> FullCacheResult:
        """One run on an empty cache."""
        if self._args.virtual:
            return run_virtual(load, self._spec(num_blocks, share))
        ours = EngineInProcess(engine_config(self._args, self._folder, num_blocks, share))
        run_engine(WARM_UP, ours)
        result = run_engine(load, ours)
        del ours
        gc.collect()
        if self._args.device == "cuda":
            torch.cuda.empty_cache()  # the next engine needs the room
        return result

    def _spec(self, num_blocks: int, share: float) -> WorkerSpec:
        spec = WorkerSpec(
            keeps_decodes=True,
            max_kv_tokens=num_blocks * BLOCK_SIZE,
            max_rows=self._args.max_rows,
            max_num_batched_tokens=512,
            short_share=share,
        )
        return spec.with_queue(self._args.queue)


def main() -> None:
    args = build_parser().parse_args()
    load = FullCacheLoad(
        num_long=args.long,
        num_long_tokens=args.long_tokens,
        num_short_tokens=args.short_tokens,
        num_prompt_tokens=args.prompt_tokens,
        rate=args.rate,
        alone_s=args.alone_s,
        seed=args.seed,
    )
    blocks = args.num_blocks
    runs = [
        ("short alone", replace(load, num_long=0), blocks, 0.0),
        *([("blocks for all", load, args.roomy_blocks, 0.0)] if args.roomy_blocks else []),
        ("full, no reserve", load, blocks, 0.0),
        *((f"full, short_share {share:g}", load, blocks, share) for share in args.shares),
    ]
    rows = [HEADER]
    with tempfile.TemporaryDirectory() as scratch:
        runner = Runner(args, Path(scratch))
        for name, a_load, num_blocks, share in runs:
            rows.append([name, *runner.run(a_load, num_blocks, share).cells()])
            print("  ".join(rows[-1]), flush=True)
    print(render_rows(rows))
    print("\n".join(f"{name}: {value}" for name, value in describe_machine().items()))


if __name__ == "__main__":
    main()
