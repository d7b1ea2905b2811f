"""The mixed load of bench_mixed served by vLLM in this process, as a peer to be measured beside.

    python -m load_tests.lab.bench_mixed_vllm --shapes qwen3-8b --rates 16 24 \\
        --batched-tokens 2048 --long-threshold 1024 --short-first --limits 100,1000,50 --search >
        vllm.txt
    python -m load_tests.lab.bench_mixed_vllm --quantization fp8 --kv-dtype fp8 --short-first

The same arrivals by seed, the same prompts, quantiles and search; greedy, no end of sequence, no
prefix cache, random weights. Prints one `RESULT {json}` line a rate, which bench_mixed's `--peer`
reads, then tables. Needs an installed vLLM; knows nothing of this project's engine. The engine has
a process of its own, as in vLLM's server.
"""

import argparse
import asyncio
import gc
import importlib
import json
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.process_environment import set_defaults
from load_tests.lab.bench_engine_vllm import environment
from load_tests.lab.mixed_sweep import Budget, Results, Sweep, note
from load_tests.lab.shapes import SHAPES, write_shapes
from load_tests.mixed_load import (
    NUM_OUTPUT_TOKENS,
    SHORT_FIRST_PRIORITIES,
    WARM_UP_PROMPTS,
    WARM_UP_SEED,
    Arrival,
    MixedLoad,
    Served,
    Stamps,
)
from load_tests.mixed_report import limits_from_text
from load_tests.prompts import FIRST_TOKEN_ID
from load_tests.tables import describe_machine

MAX_MODEL_LEN, MAX_ROWS = 16384, 256


class VllmEngine:
    """vLLM's asynchronous engine on one event loop."""

    def __init__(self, model: Path, vocab_size: int, args: argparse.Namespace) -> None:
        """Starts it. Raises ImportError without vLLM."""
        vllm: Any = importlib.import_module("vllm")
        arg_utils: Any = importlib.import_module("vllm.engine.arg_utils")
        async_llm: Any = importlib.import_module("vllm.v1.engine.async_llm")
        self.version: str = vllm.__version__
        self._sampling_params = vllm.SamplingParams
        self._vocab_size = vocab_size
        self._is_short_first: bool = args.short_first
        self._num_requests = 0
        self._loop = asyncio.new_event_loop()
        engine_args = arg_utils.AsyncEngineArgs(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            gpu_memory_utilization=0.9,
            enable_prefix_caching=False,
            max_num_seqs=MAX_ROWS,
            max_num_batched_tokens=args.batched_tokens,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_dtype,
            long_prefill_token_threshold=args.long_threshold,
            scheduling_policy="priority" if args.short_first else "fcfs",
        )
        self._engine = self._loop.run_until_complete(_start(async_llm.AsyncLLM, engine_args))

    def serve(self, load: MixedLoad) -> list[Served]:
        """Run `load` until every request has its last token, without older garbage."""
        arrivals = load.arrivals()
        assert arrivals, f"nobody arrives in {load.duration_s} s at {load.rate}/s"
        return self._loop.run_until_complete(self._serve(load, arrivals))

    def warm_up(self, load: MixedLoad) -> None:
        """Equal prompts all at once, then `load`."""
        num_prompts, num_tokens = WARM_UP_PROMPTS
        self._loop.run_until_complete(self._generate_all(num_prompts, num_tokens))
        self.serve(load)

    def close(self) -> None:
        self._engine.shutdown()
        self._loop.close()

    async def _serve(self, load: MixedLoad, arrivals: list[Arrival]) -> list[Served]:
        prompts = load.prompts(arrivals, self._vocab_size)
        stamps = Stamps(arrivals)
        gc.collect()
        start_s = time.perf_counter()

        async def one(index: int) -> None:
            priority = SHORT_FIRST_PRIORITIES[arrivals[index].length_class]
            num_read = 0
            async for output in self._generate(prompts[index], load.num_output_tokens, priority):
                num_tokens = len(output.outputs[0].token_ids)
                if num_tokens > num_read:
                    stamps.add(index, time.perf_counter() - start_s, num_tokens - num_read)
                num_read = num_tokens

        async with asyncio.TaskGroup() as tasks:
            for index, arrival in enumerate(arrivals):
                await asyncio.sleep(max(0.0, start_s + arrival.at_s - time.perf_counter()))
                tasks.create_task(one(index))
        return stamps.served(load.num_output_tokens)

    async def _generate_all(self, num_prompts: int, num_tokens: int) -> None:
        async def one(token_id: int) -> None:
            async for _ in self._generate([token_id] * num_tokens, NUM_OUTPUT_TOKENS, 0):
                pass

        async with asyncio.TaskGroup() as tasks:
            for i in range(num_prompts):
                tasks.create_task(one(FIRST_TOKEN_ID + i))

    def _generate(self, prompt: list[int], num_tokens: int, priority: int) -> Any:  # noqa: ANN401 - vLLM has no types here
        self._num_requests += 1
        params = self._sampling_params(
            max_tokens=num_tokens,
            min_tokens=num_tokens,
            ignore_eos=True,
            temperature=0.0,
            detokenize=False,
        )
        wanted = {"priority": priority} if self._is_short_first else {}
        return self._engine.generate(
            {"prompt_token_ids": prompt}, params, f"request-{self._num_requests}", **wanted
        )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--rates", type=float, nargs="+", default=[16.0, 24.0], help="requests/s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8, 9])
    parser.add_argument("--duration-s", type=float, default=60.0, help="of the arrivals of a run")
    parser.add_argument("--warm-up-s", type=float, default=5.0, help="of the same load, first")
    parser.add_argument("--batched-tokens", type=int, default=8192, help="vLLM's token budget")
    parser.add_argument("--long-threshold", type=int, default=0, help="vLLM's; 0 = none")
    parser.add_argument("--quantization", help="vLLM's: fp8 rounds the weights as they are made")
    parser.add_argument("--kv-dtype", default="auto", help="vLLM's kv_cache_dtype: fp8")
    parser.add_argument("--short-first", action="store_true", help="vLLM's priority scheduling")
    parser.add_argument("--limits", type=limits_from_text, metavar="SHORT,LONG,TPOT", help="ms")
    parser.add_argument("--search", action="store_true", help="for the highest good rate")
    parser.add_argument("--search-seeds", type=int, nargs="+", help="fewer, for the search alone")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="for all of it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything, for a program")
    return parser


def label(args: argparse.Namespace) -> str:
    """The peer's settings, as tables name them."""
    parts = [f"{args.batched_tokens} batched tokens"]
    parts += [f"long threshold {args.long_threshold}"] if args.long_threshold else []
    parts += ["short first"] if args.short_first else []
    parts += [f"{args.quantization} weights"] if args.quantization else []
    parts += [f"{args.kv_dtype} KV"] if args.kv_dtype != "auto" else []
    return "vLLM, " + ", ".join(parts)


def run(args: argparse.Namespace, scratch: Path) -> Results:
    """Measure what `args` asks for. Raises ValueError for switches that contradict each other."""
    if args.search and args.limits is None:
        raise ValueError("--search needs --limits")
    loads = [MixedLoad(rate=1.0, duration_s=args.duration_s, seed=seed) for seed in args.seeds]
    results = Results(limits=args.limits, peers=[], about=describe_machine())
    sweep = Sweep(results, Budget(args.budget_s), loads, args.json)
    vocab_size = SHAPES[args.shapes]["vocab_size"]
    assert isinstance(vocab_size, int)
    note(f"{label(args)}: starting the engine")
    engine = VllmEngine(write_shapes(args.shapes, scratch), vocab_size, args)
    results.about["vllm"] = engine.version
    warm_up = replace(loads[0], rate=args.rates[0], seed=WARM_UP_SEED, duration_s=args.warm_up_s)
    try:
        engine.warm_up(warm_up)
        for rate in args.rates:
            sweep.measure(label(args), rate, engine.serve)
        if args.search:
            sweep.search(label(args), engine.serve, args.search_seeds or args.seeds)
    finally:  # its engine is a process of its own
        sweep.save()
        engine.close()
    return results


def main() -> None:
    args = build_parser().parse_args()
    set_defaults(environment(args.shapes))
    with tempfile.TemporaryDirectory() as scratch:
        results = run(args, Path(scratch))
    for point in results.points:
        numbers = {"rate": point.rate, "requests": len(point.served), **point.numbers}
        print("RESULT", json.dumps(numbers))
    print(results.render())


async def _start(engine_class: Any, engine_args: Any) -> Any:  # noqa: ANN401 - as above
    """On the loop that will drive it, which it binds itself to."""
    return engine_class.from_engine_args(engine_args)


if __name__ == "__main__":
    main()
