"""How long requests for scores take, by how many items arrive a second.

    python -m load_tests.lab.bench_scores
    python -m load_tests.lab.bench_scores --device cuda --shapes qwen3-0.6b --rates 600,1000,2000

A request has `--items` prompts of `--tokens` tokens and asks how likely two labels are after each,
as `/v1/score` does. Requests come when they are due, at random times, `rate / items` of them a
second; each takes until the last of its items is answered. Three ways to ask the same:

    score    only the labels: nothing is sampled, and their values are read behind the next step
    sample   one token, greedy, with the log-probabilities of the labels
    prompt   the same, and the log-probability of every token of the prompt

in turn at each rate. One engine in this process; a GPU has its random weights. Knows no Ray.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from configs.load import load_config
from configs.schema import AppConfig
from engine.request import RequestKey, SamplingParams
from load_tests.lab.devices import describe_device
from load_tests.lab.in_process import EngineInProcess
from load_tests.lab.shapes import SHAPES, write_shapes
from load_tests.prompts import RandomPrompts
from load_tests.tables import render_rows

DEMO_MODEL = Path("demo_model") / "laps-demo"
LABELS = (5, 77)
MAX_P99_MS = 500.0  # the highest good rate is the last one below it
WARM_UP_REQUESTS = 3
POLL_S = 2e-4
WAYS = {
    "score": SamplingParams(max_tokens=0, temperature=0.0, label_token_ids=LABELS),
    "sample": SamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=2, logprob_token_ids=LABELS
    ),
    "prompt": SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        logprobs=2,
        logprob_token_ids=LABELS,
        prompt_logprobs=0,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreLoad:
    """Requests that come at random times, by one seed the same ones in every way."""

    rate: float  # items/s
    num_items: int  # of a request
    num_tokens: int  # of an item
    duration_s: float  # of the arrivals
    seed: int

    def arrivals_s(self) -> list[float]:
        """Seconds from the start at which requests are due; at least one."""
        rng = random.Random(self.seed)
        times_s: list[float] = []
        now_s = 0.0
        while now_s <= self.duration_s or not times_s:
            times_s.append(now_s)
            now_s += rng.expovariate(self.rate / self.num_items)
        return times_s


def serve(
    ours: EngineInProcess,
    load: ScoreLoad,
    params: SamplingParams,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[float]:
    """Seconds that each request took from when it was due, in the order of arrival."""
    arrivals_s = load.arrivals_s()
    prompts = RandomPrompts(ours.engine.spec.vocab_size, seed=load.seed)
    due = deque((i, at_s, prompts.draw(load.num_items, load.num_tokens))
                for i, at_s in enumerate(arrivals_s))  # fmt: skip
    request_of: dict[RequestKey, int] = {}
    num_open = [load.num_items] * len(arrivals_s)
    took_s = [0.0] * len(arrivals_s)
    start_s = now()
    while due or request_of:
        while due and due[0][1] <= now() - start_s:
            index, _, items = due.popleft()
            request_of |= dict.fromkeys((ours.submit(item, params) for item in items), index)
        if not request_of:
            sleep(max(0.0, due[0][1] - (now() - start_s)))
            continue
        output = ours.step()
        for _, record in output.tokens:
            index = request_of.pop(record.key)
            num_open[index] -= 1
            if num_open[index] == 0:
                took_s[index] = now() - start_s - arrivals_s[index]
        if not output.has_progressed:
            sleep(POLL_S)
    return took_s


def measure(
    ours: EngineInProcess, args: argparse.Namespace, log: Callable[[str], None]
) -> list[list[str]]:
    """The table's rows, a rate each, and the last one with each way's highest good rate.

    `log` gets each figure as soon as it is measured.
    """
    header = ["items/s", *(f"{way} {what}" for way in WAYS for what in ("p50 ms", "p99 ms"))]
    rows, best = [header], dict.fromkeys(WAYS, 0.0)
    for rate in args.rates:
        cells = [f"{rate:g}"]
        for way, params in WAYS.items():
            load = _load(args, rate, args.seconds, args.seed)
            took_ms = [1e3 * seconds for seconds in serve(ours, load, params)]
            p99_ms = _quantile(took_ms, 99)
            if p99_ms < MAX_P99_MS:
                best[way] = max(best[way], rate)
            p50_ms = statistics.median(took_ms)
            log(f"{rate:g} items/s, {way}: p50 {p50_ms:.1f} ms, p99 {p99_ms:.1f} ms")
            cells += [f"{p50_ms:.1f}", f"{p99_ms:.1f}"]
        rows.append(cells)
    limits = [cell for way in WAYS for cell in (f"{best[way]:g} items/s", "")]
    return [*rows, [f"p99 < {MAX_P99_MS:g} ms", *limits]]


def _load(args: argparse.Namespace, rate: float, duration_s: float, seed: int) -> ScoreLoad:
    return ScoreLoad(
        rate=rate,
        num_items=args.items,
        num_tokens=args.tokens,
        duration_s=duration_s,
        seed=seed,
    )


def _quantile(values: list[float], percent: int) -> float:
    """By nearest rank."""
    return sorted(values)[-(-percent * len(values) // 100) - 1]


def bench_config(folder: Path, args: argparse.Namespace) -> AppConfig:
    """The engine under test; items have nothing in common, so no prefix is looked up."""
    is_gpu = args.device == "cuda"
    overrides: dict[str, object] = {
        "model.path": str(folder),
        "model.device": args.device,
        "model.dtype": "bfloat16" if is_gpu else "auto",
        "model.weights": "safetensors" if args.shapes is None else "random",
        "model.max_model_len": None if args.shapes is None else 4096,
        "cache.enable_prefix_caching": False,
        "scheduler.max_num_batched_tokens": 8192 if is_gpu else 512,
        "scheduler.max_num_seqs": 256 if is_gpu else 64,
    }
    return load_config(None, overrides)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, default=DEMO_MODEL)
    model.add_argument("--shapes", choices=sorted(SHAPES), help="random weights instead")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--items", type=int, default=10, help="of a request")
    parser.add_argument("--tokens", type=int, default=300, help="of an item")
    parser.add_argument(
        "--rates",
        type=lambda text: [float(rate) for rate in text.split(",")],
        default=[10.0, 20.0],
        help="items/s, separated by commas",
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals, at each rate")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def run(args: argparse.Namespace, scratch: Path, log: Callable[[str], None]) -> str:
    """Build the engine, measure, and return what is to be printed; `log` as in `measure`."""
    folder = args.model if args.shapes is None else write_shapes(args.shapes, scratch)
    ours = EngineInProcess(bench_config(folder, args))
    log("the engine is ready")
    for params in WAYS.values():
        warm_up_s = WARM_UP_REQUESTS * args.items / args.rates[0]
        serve(ours, _load(args, args.rates[0], warm_up_s, args.seed + 1), params)
    rows = measure(ours, args, log)
    about = describe_device(args.device) | {
        "engine": ours.engine.describe(),
        "compiled_since_ready": ours.engine.compilations.names,
    }
    return "\n\n".join([render_rows(rows), *(f"{name}: {value}" for name, value in about.items())])


def main() -> None:
    args = build_parser().parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(run(args, Path(scratch), partial(print, flush=True)))


if __name__ == "__main__":
    main()
