"""The works of bench_engine on vLLM in this process, as a peer to be measured beside.

    python -m load_tests.lab.bench_engine_vllm --shapes qwen3-8b > vllm.txt
    python -m load_tests.lab.bench_engine --shapes qwen3-8b --quick --peer vllm.txt
    python -m load_tests.lab.bench_engine_vllm --quantization fp8 --kv-dtype fp8
    python -m load_tests.lab.bench_engine_vllm --w4a16 --works decode_bs --kv-gib 41
    python -m load_tests.lab.bench_engine_vllm --shapes qwen3-30b-a3b --tensor-parallel 2 \\
        --expert-parallel --rounds 2

Random weights, greedy, no end of sequence, no prefix cache, and new prompts of random ids in every
round, as for ours; a mixture's routes are drawn uniformly, as ours are by `--pin-routing`. A
prefill lasts until every prompt has one token; decode steps are timed from when all rows have a
token until each has 128 more, as ours with `--quick`. Medians of rounds. Prints a `ROW` for each
work, what a reader must know as `ABOUT {json}`, and one `RESULT {json}` line, which bench_engine's
`--peer` reads. `--turn`: as bench_engine's. Needs an installed vLLM (written for 0.26); knows
nothing of this project's engine.
"""

import argparse
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.process_environment import set_defaults
from load_tests.lab.shapes import SHAPES, write_shapes
from load_tests.lab.turns import add_turn_option, wait_turn
from load_tests.lab.works import DECODE_STEPS, WARM_UPS, WORKS, Kind, Work
from load_tests.prompts import RandomPrompts
from load_tests.tables import describe_machine

MAX_MODEL_LEN, MAX_ROWS, BATCHED_TOKENS = 16384, 256, 8192
GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]  # tokens of a batch; all decode works' rows
MAX_STEPS_APART = 72  # of the first row's first token and the last row's
NUM_DECODE_TOKENS = 1 + DECODE_STEPS + MAX_STEPS_APART
MORE_SHORT_ROUNDS = 4  # a short prefill's rounds differ more
GIB = 2**30

# What is set already stays. One process steps the engine; other ranks do not inherit this one's
# CUDA; FlashInfer's sampler would be compiled; sums between GPUs do not use multicast.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "NCCL_NVLS_ENABLE": "0",
}
UNIFORM_ROUTES = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # a mixture has one


class VllmBench:
    """Times works on vLLM's synchronous engine."""

    def __init__(self, options: Mapping[str, object], vocab_size: int, *, seed: int) -> None:
        """Starts it with `options` of vllm.LLM. Raises ImportError without vLLM."""
        vllm: Any = importlib.import_module("vllm")
        self.version: str = vllm.__version__
        self._sampling_params = vllm.SamplingParams
        self._llm = vllm.LLM(**options)
        self._random = RandomPrompts(vocab_size, seed=seed)
        self._num_requests = 0

    def warm_up(self) -> None:
        """What bench_engine runs before its first figure."""
        for num_rows, num_tokens, num_new in WARM_UPS:
            self._seconds(num_rows, num_tokens, num_new)

    def rounds_s(self, work: Work, num_rounds: int) -> list[float]:
        """A duration of every round: of the whole prefill, or of one decode step on average."""
        if work.kind is Kind.DECODE:
            return [self._step_s(work) for _ in range(num_rounds)]
        num_rounds += MORE_SHORT_ROUNDS if work.kind is Kind.SHORT_PREFILL else 0
        return [self._seconds(work.num_rows, work.num_tokens, 1) for _ in range(num_rounds)]

    def close(self) -> None:
        """Ends the other ranks, too."""
        self._llm.llm_engine.engine_core.shutdown()

    def _seconds(self, num_rows: int, num_tokens: int, num_new: int) -> float:
        """From handing over `num_rows` prompts until each has `num_new` tokens on the host."""
        prompts = self._prompts(num_rows, num_tokens)
        sampling = self._sampling(num_new)
        started_s = time.perf_counter()
        answers = self._llm.generate(prompts, sampling, use_tqdm=False)
        took_s = time.perf_counter() - started_s
        lengths = [len(answer.outputs[0].token_ids) for answer in answers]
        assert lengths == [num_new] * num_rows, "not every token was generated"
        return took_s

    def _step_s(self, work: Work) -> float:
        """Seconds a step, over the DECODE_STEPS steps after the last row's first token.

        Raises ValueError if the rows do not decode together for so long.
        """
        engine = self._llm.llm_engine
        sampling = self._sampling(NUM_DECODE_TOKENS)
        for prompt in self._prompts(work.num_rows, work.num_tokens):
            self._num_requests += 1
            engine.add_request(f"decode-{self._num_requests}", prompt, sampling)
        counts: dict[str, int] = {}  # tokens by row
        firsts: dict[str, int] = {}  # those of them that came before the timed steps
        began_s = 0.0
        while engine.has_unfinished_requests():
            for output in engine.step():
                counts[output.request_id] = len(output.outputs[0].token_ids)
            if not firsts and len(counts) == work.num_rows and min(counts.values()) > 0:
                firsts, began_s = dict(counts), time.perf_counter()
            gains = [counts[row] - first for row, first in firsts.items()]
            if gains and min(gains) >= DECODE_STEPS:
                took_s = time.perf_counter() - began_s
                self._abort(list(counts))
                if max(gains) > DECODE_STEPS + 1:  # some row waited; 1 for a step in flight
                    break
                return took_s / max(gains)
        raise ValueError(
            f"{work.key}: its rows did not decode together for {DECODE_STEPS} steps: "
            "the KV cache may be too small (--kv-gib)"
        )

    def _abort(self, rows: list[str]) -> None:
        engine = self._llm.llm_engine
        engine.abort_request(rows)
        while engine.has_unfinished_requests():
            engine.step()

    def _prompts(self, num_rows: int, num_tokens: int) -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": ids} for ids in self._random.draw(num_rows, num_tokens)]

    def _sampling(self, num_new: int) -> Any:  # noqa: ANN401 - vLLM has no types here
        return self._sampling_params(
            max_tokens=num_new,
            ignore_eos=True,  # `min_tokens` would mask logits in every step
            temperature=0.0,
            detokenize=False,
        )


def llm_options(model: Path, args: argparse.Namespace) -> dict[str, object]:
    """Keywords of vllm.LLM for the folder `model` and the command line's switches."""
    compilation: dict[str, object] = {"cudagraph_capture_sizes": GRAPH_SIZES}
    options: dict[str, object] = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": args.seed,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_ROWS,
        "max_num_batched_tokens": BATCHED_TOKENS,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.9,
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_dtype,
        "tensor_parallel_size": args.tensor_parallel,
        "enable_expert_parallel": args.expert_parallel,
        "compilation_config": compilation,
    }
    if args.tensor_parallel > 1:
        options["distributed_executor_backend"] = "mp"  # Ray is installed, too
        compilation["pass_config"] = {"fuse_allreduce_rms": False}  # it would choose multicast
    if args.kv_gib is not None:
        options["kv_cache_memory_bytes"] = int(args.kv_gib * GIB)
        options["gpu_memory_utilization"] = 0.05  # only what must be free to start
    return options


def environment(shapes: str) -> dict[str, str]:
    """What vLLM is to find in its environment for this model."""
    is_mixture = any(name in SHAPES[shapes] for name in EXPERT_COUNTS)
    return ENVIRONMENT | (UNIFORM_ROUTES if is_mixture else {})


def run_works(bench: VllmBench, works: Sequence[Work], num_rounds: int) -> dict[str, float]:
    """Time every work, in order: the median by its key, in its own unit. Prints each."""
    table = {}
    for work in works:
        values = [work.in_unit(round_s) for round_s in bench.rounds_s(work, num_rounds)]
        table[work.key] = round(statistics.median(values), 3)
        rounds = " ".join(f"{value:.5g}" for value in values)
        print(f"ROW {work.key}: {table[work.key]:g} {work.kind.value}, of {rounds}", flush=True)
    return table


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", choices=sorted(SHAPES), default="qwen3-8b")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--quantization", help="vLLM's: fp8 rounds the weights as they are made")
    weights.add_argument("--w4a16", action="store_true", help="4-bit weights in groups of 128")
    parser.add_argument("--kv-dtype", default="auto", help="vLLM's kv_cache_dtype: fp8")
    parser.add_argument("--kv-gib", type=float, help="of KV cache a GPU; default: what fits")
    parser.add_argument("--tensor-parallel", type=int, choices=(1, 2, 4, 8), default=1)
    parser.add_argument("--expert-parallel", action="store_true", help="whole experts a rank")
    parser.add_argument("--works", nargs="*", default=[""], help="parts of names; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="of each work; short prefills 4 more")
    add_turn_option(parser)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def run(args: argparse.Namespace, scratch: Path) -> dict[str, float]:
    """Start vLLM below `scratch` and measure what `args` asks for.

    Raises ValueError if no work is asked for, or no round of it.
    """
    works = [work for work in WORKS if any(part in work.key for part in args.works)]
    if not works or args.rounds < 1:
        raise ValueError(f"nothing to measure: --works {args.works} --rounds {args.rounds}")
    set_defaults(environment(args.shapes))
    model = write_shapes(args.shapes, scratch, "int4" if args.w4a16 else "dense")
    vocab_size = SHAPES[args.shapes]["vocab_size"]
    assert isinstance(vocab_size, int)
    bench = VllmBench(llm_options(model, args), vocab_size, seed=args.seed)
    about = describe_machine() | {"vllm": bench.version} | vars(args)
    print("ABOUT", json.dumps(about, default=str), flush=True)
    try:
        bench.warm_up()
        print("ready and warm", flush=True)
        if wait_turn(args.turn):
            bench.warm_up()
        return run_works(bench, works, args.rounds)
    finally:  # its ranks are processes of their own
        bench.close()


def main() -> None:
    args = build_parser().parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        table = run(args, Path(scratch))
    print("RESULT", json.dumps(table))


if __name__ == "__main__":
    main()
