"""What a handoff costs a drafter: second token and acceptance with its features, and without.

    python -m load_tests.lab.draft_handoffs --head /tmp/laps-demo-eagle3
    python -m load_tests.lab.draft_handoffs --draft-model demo_model/laps-demo-draft --device cuda
    python -m load_tests.lab.draft_handoffs --shapes qwen3-8b --draft-shapes qwen3-0.6b \\
        --device cuda --prompt-tokens 4096

Held-out files begin, the shipped model goes on, greedy. Prompts move from a prefill to a decode
engine, which drafts with an EAGLE-3 head, with a draft model, or not at all. The ways:

    no drafts     neither of both
    features      vectors of the hidden states move with the KV, as the engine does it; drafts are
                  then those of one worker without a handoff
    without       the prompt's vectors are zeroed on arrival: as if only KV moved
    draft model   its KV of the prompt moves with the target's (speculation.prompts_on_prefill)
    computed      nothing of it moves: it needs ids alone, and computes its KV on the decode side

All engines run in this process, the copy is a memory copy, and one request runs at a time. The
second token counts from the moment when the KV is there; so it has what a drafter computes of the
prompt on the decode side in it. On a CPU every way must give the same tokens. With --shapes the
weights and prompts are random: then only times mean something, and no draft is right.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from configs.load import load_config
from engine.models.spec import load_spec
from engine.request import SamplingParams
from engine.scheduling.drafting import DraftCounts
from load_tests.lab.bench_accepted import save_random_weights
from load_tests.lab.quant_accuracy import held_out_windows
from load_tests.lab.shapes import SHAPES, write_shapes
from load_tests.prompts import RandomPrompts
from load_tests.tables import describe_machine, render_rows
from load_tests.testbed.local_handoff import LocalPair

APART = {"unified": 0, "prefill": 1, "decode": 1}
MODEL = Path(__file__).parents[2] / "demo_model" / "laps-demo"


@dataclass(slots=True, kw_only=True)
class Way:
    """One way, and what it came to."""

    name: str
    pair: LocalPair
    zeroes: bool = False
    first_ms: list[float] = field(default_factory=list)
    second_ms: list[float] = field(default_factory=list)
    rest_ms: list[float] = field(default_factory=list)  # a token, after the second
    answers: list[list[int]] = field(default_factory=list)

    def run(self, prompt: Sequence[int], params: SamplingParams) -> None:
        moved_s, began_s = 0.0, time.perf_counter()

        def arrived(block_ids: list[int]) -> None:
            nonlocal moved_s
            store = self.pair.decode.kv_store
            if self.zeroes:
                first = store.layout.block_shape[0] - store.layout.num_feature_layers
                store.tensor[block_ids, first:] = 0
            moved_s = time.perf_counter()

        (found,) = self.pair.answer([(prompt, params)], arrived)
        first_s, *times_s = found.times_s  # the first came from the prefill side
        self.first_ms.append(1e3 * (first_s - began_s))
        self.second_ms.append(1e3 * (times_s[0] - moved_s))
        self.rest_ms.append(1e3 * (times_s[-1] - times_s[0]) / (len(times_s) - 1))
        self.answers.append(found.tokens)

    def row(self) -> list[str]:
        counts: DraftCounts = self.pair.decode.core.scheduler.drafting.counts
        shares = zip(counts.accepted_at, counts.drafted_at, strict=True)
        length = 1 + counts.num_accepted / counts.num_verified if counts.num_verified else 1.0
        return [
            self.name,
            f"{statistics.median(self.first_ms):.1f}",
            f"{statistics.median(self.second_ms):.1f}",
            f"{statistics.median(self.rest_ms):.2f}",
            f"{length:.2f}",
            " ".join(f"{accepted / max(drafted, 1):.2f}" for accepted, drafted in shares),
        ]


def build_ways(args: argparse.Namespace) -> list[Way]:
    def pair(drafter: str, folder: str | None = None, *, moves: bool = False) -> LocalPair:
        settings: dict[str, object] = {
            **{f"workers.{role}": number for role, number in APART.items()},
            "speculation.prompts_on_prefill": moves,
            "model.path": args.model,
            "model.device": args.device,
            "model.weights": "random" if args.shapes else "safetensors",
            "cache.num_blocks": 512,
            "cache.enable_prefix_caching": False,
            "scheduler.max_num_seqs": 4,
            "speculation.drafter": drafter,
        }
        if folder is not None:
            settings |= {
                "speculation.model_path": folder,
                "speculation.adaptive": False,
                "speculation.max_drafts": args.drafts,
            }
        return LocalPair(load_config(None, settings))

    ways = [Way(name="no drafts", pair=pair("none"))]
    if args.head is not None:
        ways += [
            Way(name="features", pair=pair("eagle3", args.head)),
            Way(name="without", pair=pair("eagle3", args.head), zeroes=True),
        ]
    if args.draft_model is not None:
        given = "draft_model", args.draft_model
        ways += [
            Way(name="draft model", pair=pair(*given, moves=True)),
            Way(name="computed", pair=pair(*given)),
        ]
    return ways


def _prompts(args: argparse.Namespace) -> list[list[int]]:
    if args.shapes is None:
        return [window[: args.prompt_tokens] for window in held_out_windows(args.prompts)]
    vocab_size = load_spec(Path(args.model)).vocab_size
    return RandomPrompts(vocab_size, seed=0).draw(args.prompts, args.prompt_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--shapes", choices=sorted(SHAPES), help="instead of --model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--head", help="folder of an EAGLE-3 head")
    parser.add_argument("--draft-model", help="folder of a model of the same vocabulary")
    parser.add_argument("--draft-shapes", choices=sorted(SHAPES), help="instead of --draft-model")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--drafts", type=int, default=3)
    args = parser.parse_args()
    if not (args.head or args.draft_model or args.draft_shapes):
        parser.error("nothing to compare with: name a --head, a --draft-model, or both")
    with tempfile.TemporaryDirectory() as scratch:
        _write_shapes(args, Path(scratch))
        measure(args)


def _write_shapes(args: argparse.Namespace, scratch: Path) -> None:
    """Models of the shapes that are asked for, in place of the folders."""
    if args.shapes is not None:
        args.model = str(write_shapes(args.shapes, scratch))
    if args.draft_shapes is not None:
        folder = write_shapes(args.draft_shapes, scratch / "draft")
        save_random_weights(folder)
        args.draft_model = str(folder)


def measure(args: argparse.Namespace) -> None:
    """Ask in every way, and print what each came to."""
    ways = build_ways(args)
    params = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
    for prompt in _prompts(args):
        for way in ways:
            way.run(prompt, params)
    for way in ways if args.device == "cpu" else ():  # a GPU rounds steps of other sizes otherwise
        assert way.answers == ways[0].answers, f"{way.name} gave other tokens"
    print(describe_machine())
    times = ["first token, ms", "second token, ms", "ms a token"]
    header = ["", *times, "accepted length", "acceptance by position"]
    print(render_rows([header, *(way.row() for way in ways)]))


if __name__ == "__main__":
    main()
