"""The turns of bench_host_tier on vLLM in this process, with and without its own KV offloading.

    python -m load_tests.lab.bench_host_tier_vllm --shapes qwen3-8b --scale 1 --duration-s 60 \\
        --max-model-len 16384 --host-gib 32
    python -m load_tests.lab.bench_host_tier_vllm ... --host-gib 0      # the same without it

The same conversations, scaled alike, over as many blocks of 16 tokens, one turn at a time, random
weights, greedy. vLLM keeps prefixes in its cache, and with `--host-gib` offloads to pinned memory
of that size by its native connector (`kv_offloading_size`), which copies blocks as they are
computed. One kind of run a process: an engine does not give its memory back. Prompt tokens that
vLLM says it found count as found, wherever they were; those from its host memory it does not tell
apart, so that column is 0. Needs an installed vLLM (written for 0.26).
"""

import argparse
import importlib
import tempfile
import time
from pathlib import Path
from typing import Any

from configs.process_environment import set_defaults
from load_tests.lab.bench_engine_vllm import environment
from load_tests.lab.bench_host_tier import BLOCK_SIZE, HEADER, Ask, Result, build_parser, draw, play
from load_tests.lab.shapes import SHAPES, write_shapes
from load_tests.tables import describe_machine, render_rows


class VllmTurns:
    """Answers one prompt at a time on vLLM's synchronous engine."""

    def __init__(self, options: dict[str, object]) -> None:
        """options: of vllm.LLM. Raises ImportError without vLLM."""
        vllm: Any = importlib.import_module("vllm")
        self.version: str = vllm.__version__
        self._sampling_params = vllm.SamplingParams
        self._engine = vllm.LLM(**options).llm_engine
        self._num_asked = 0

    def ask(self, prompt: list[int], ask: Ask, result: Result) -> None:
        sampling = self._sampling_params(
            max_tokens=ask.turn.num_output_tokens,
            ignore_eos=True,
            temperature=0.0,
            detokenize=False,
        )
        self._num_asked += 1
        began_s, tokens, num_found = time.perf_counter(), list[int](), 0
        given = {"prompt_token_ids": prompt}
        self._engine.add_request(f"turn-{self._num_asked}", given, sampling)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if not tokens and output.outputs[0].token_ids:
                    result.note_first(time.perf_counter() - began_s, ask)
                tokens = list(output.outputs[0].token_ids)
                num_found = output.num_cached_tokens or num_found
        result.num_found_tokens += num_found
        result.num_prompt_tokens += len(prompt)
        result.tokens.append(tokens)

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def llm_options(model: Path, num_blocks: int, args: argparse.Namespace) -> dict[str, object]:
    options: dict[str, object] = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": args.max_model_len,
        "max_num_batched_tokens": 8192,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": num_blocks + 1,  # one of them holds nothing
        "enable_prefix_caching": True,
        "gpu_memory_utilization": 0.9,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]},
    }
    if args.host_gib > 0:
        options["kv_offloading_size"] = args.host_gib
    return options


def main() -> None:
    parser = build_parser()
    parser.set_defaults(shapes="qwen3-8b", device="cuda")
    args = parser.parse_args()
    if args.device != "cuda" or args.disk_host_gib is not None:
        parser.error("vLLM runs on a GPU here, and has no disk tier")
    sessions, num_blocks = draw(args)
    set_defaults(environment(args.shapes))
    vocab_size, rows = SHAPES[args.shapes]["vocab_size"], [HEADER]
    assert isinstance(vocab_size, int)
    with tempfile.TemporaryDirectory() as scratch:
        model = write_shapes(args.shapes, Path(scratch))
        turns = VllmTurns(llm_options(model, num_blocks, args))
        try:
            for number in range(args.rounds):
                salt = 10**7 * (1 + number)  # new prompts: what was said before stays cached
                given = turns.ask, vocab_size
                play(*given, sessions[:3], args.gap_s, grows=False, salt=salt + 10**6)
                for grows, about in ((True, "conversations"), (False, "all different")):
                    apart = salt + 5 * 10**6 * grows
                    result = play(*given, sessions, args.gap_s, grows=grows, salt=apart)
                    name = f"vLLM {turns.version}, {about}, {args.host_gib:g} GiB"
                    rows.append([name, *result.cells()])
                    print("  ".join(rows[-1]), flush=True)
        finally:
            turns.close()
    print(render_rows(rows))
    print("\n".join(f"{name}: {value}" for name, value in describe_machine().items()))


if __name__ == "__main__":
    main()
