"""The turns of bench_host_tier on vLLM in this process, with and without its own KV offloading.

    python -m load_tests.lab.bench_host_tier_vllm --shapes qwen3-8b --scale 1 --duration-s 60 \\
        --max-model-len 8192 --at-once 8 --max-output-tokens 32 --host-gib 12
    python -m load_tests.lab.bench_host_tier_vllm ... --host-gib 0      # the same without it

The same conversations, scaled alike, over as many blocks of 16 tokens, so many turns `--at-once`,
random weights, greedy. vLLM keeps prefixes in its cache, and with `--host-gib` offloads to pinned
memory of that size by its native connector (`kv_offloading_size`), which copies blocks as they are
computed. One kind of run a process: an engine does not give its memory back. Prompt tokens that
vLLM says it found count as found, wherever they were; those from its host memory it does not tell
apart, so that column is 0. Needs an installed vLLM (written for 0.26).
"""

import argparse
import importlib
import tempfile
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from configs.process_environment import set_defaults
from load_tests.lab.bench_engine_vllm import environment
from load_tests.lab.bench_host_tier import (
    BLOCK_SIZE,
    HEADER,
    WARM_SALT,
    Progress,
    Prompts,
    build_parser,
    draw,
    in_order,
    play,
)
from load_tests.lab.shapes import SHAPES, write_shapes
from load_tests.tables import describe_machine, render_rows


class VllmPlayer:
    """vLLM's synchronous engine, as a `Player`."""

    def __init__(self, options: dict[str, object]) -> None:
        """options: of vllm.LLM. Raises ImportError without vLLM."""
        vllm: Any = importlib.import_module("vllm")
        self.version: str = vllm.__version__
        self._sampling_params = vllm.SamplingParams
        self._engine = vllm.LLM(**options).llm_engine
        self._num_asked = 0
        self._nums_known: dict[str, int] = {}  # tokens of each answer so far

    def begin(self, prompt: list[int], num_tokens: int) -> Hashable:
        sampling = self._sampling_params(
            max_tokens=num_tokens, ignore_eos=True, temperature=0.0, detokenize=False
        )
        self._num_asked += 1
        key = f"turn-{self._num_asked}"
        self._engine.add_request(key, {"prompt_token_ids": prompt}, sampling)
        self._nums_known[key] = 0
        return key

    def step(self) -> Sequence[Progress]:
        found = []
        for output in self._engine.step():
            key, tokens = output.request_id, list(output.outputs[0].token_ids)
            new = tokens[self._nums_known[key] :]
            self._nums_known[key] = len(tokens)
            found.append(Progress(key, new, output.num_cached_tokens or 0))
        return found

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
        # Releases before a default was set do nothing by the size alone.
        options |= {"kv_offloading_size": args.host_gib, "kv_offloading_backend": "native"}
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
    asks, few = list(in_order(sessions, args.gap_s)), list(in_order(sessions[:3], args.gap_s))
    with tempfile.TemporaryDirectory() as scratch:
        model = write_shapes(args.shapes, Path(scratch))
        player = VllmPlayer(llm_options(model, num_blocks, args))
        try:
            for number in range(args.rounds):
                # New prompts in each run: what was said before stays cached.
                salt = 10 * (number + 1) * WARM_SALT
                play(player, Prompts(sessions[:3], vocab_size, salt, grows=False), few, 1)
                for grows, about in ((True, "conversations"), (False, "all different")):
                    salt += WARM_SALT
                    prompts = Prompts(sessions, vocab_size, salt, grows=grows)
                    result = play(player, prompts, asks, args.at_once)
                    name = f"vLLM {player.version}, {about}, {args.host_gib:g} GiB"
                    rows.append([name, *result.cells()])
                    print("  ".join(rows[-1]), flush=True)
        finally:
            player.close()
    print(render_rows(rows))
    print("\n".join(f"{name}: {value}" for name, value in describe_machine().items()))


if __name__ == "__main__":
    main()
