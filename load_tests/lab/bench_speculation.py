"""Tokens per second with and without drafts, beside transformers' assisted generation.

    python -m load_tests.lab.bench_speculation                  # the shipped pair, one thread
    python -m load_tests.lab.bench_speculation --rows 1 16 --temperatures 0 --device cuda
    python -m load_tests.lab.bench_speculation --drafters --random-weights --acceptance 0.6

All engines run in one process and take turns, round by round, on the same prompts and seeds, warm
and without a prefix cache. Figures are medians of rounds, ratios of neighbours in time. Accepted
length = tokens that a row got for each step in which it had drafts. transformers assists one stream
at a time, and samples with other noise. With --acceptance the drafts are the answer's own tokens,
each right with that probability (answers of the engine without drafts, which runs before): what
random weights can show, and the output says so. Knows no Ray and no HTTP.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from configs.load import load_config
from engine.messages import TokenRecord
from engine.request import Request, RequestKey, SamplingParams
from engine.scheduling.contracts import StepOutput
from engine.speculation.drafter import HostDrafter
from engine.text.tokenizing import load_tokenizer
from load_tests.lab.in_process import EngineInProcess
from load_tests.prompts import build_prompts
from load_tests.tables import describe_machine

MODELS = Path(__file__).parents[2] / "demo_model"


class Synthetic(HostDrafter):
    """The drafter of --acceptance: known answers, each token right with one probability."""

    def __init__(self, acceptance: float, vocab_size: int) -> None:
        self.answers: dict[tuple[int, ...], list[int]] = {}  # by prompt
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._draw = random.Random(0)

    @property
    def pass_s(self) -> float:
        return 0.0

    @property
    def spent_s(self) -> float:
        return 0.0

    def propose(self, asked: Sequence[tuple[Request, int]]) -> list[list[int]]:
        return [self._guess(request, num_drafts) for request, num_drafts in asked]

    def _guess(self, request: Request, num_drafts: int) -> list[int]:
        answer = self.answers.get(tuple(request.tokens[: request.num_prompt_tokens]), [])
        start = request.num_output_tokens
        return [
            token_id
            if self._draw.random() < self._acceptance
            else (token_id + 1) % self._vocab_size
            for token_id in answer[start : start + num_drafts]
        ]

    def add_finished(self, request: Request) -> None:
        """Does nothing."""

    def forget(self, request: Request) -> None:
        """Does nothing."""


@dataclass(slots=True, kw_only=True)
class Side:
    """One engine, and what it did for one number of rows and one temperature."""

    name: str
    engine: EngineInProcess
    rates: list[float] = field(default_factory=list)  # tokens/s, a round
    num_drafted: int = 0
    num_accepted: int = 0
    num_verified: int = 0
    num_other: int = 0  # answers with another token than without drafts

    def run(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
        """One round; returns the answers."""
        found: dict[RequestKey, list[int]] = {}
        counts = self.engine.engine.core.scheduler.drafting.counts
        before = counts.num_drafted, counts.num_accepted, counts.num_verified
        start_s = time.perf_counter()
        for prompt, its_params in zip(prompts, params, strict=True):
            found[self.engine.submit(prompt, its_params)] = []

        def keep(output: StepOutput) -> None:
            record: TokenRecord
            for _, record in output.tokens:
                found[record.key].append(record.token_id)

        self.engine.run_until_idle(keep)
        self.rates.append(sum(map(len, found.values())) / (time.perf_counter() - start_s))
        self.num_drafted += counts.num_drafted - before[0]
        self.num_accepted += counts.num_accepted - before[1]
        self.num_verified += counts.num_verified - before[2]
        return list(found.values())

    def clear(self) -> None:
        """Forget the rounds so far."""
        self.rates.clear()
        self.num_drafted = self.num_accepted = self.num_verified = self.num_other = 0

    @property
    def accepted_length(self) -> float | None:
        return 1 + self.num_accepted / self.num_verified if self.num_verified else None


class Assisted:
    """transformers on the same folders, one stream, with the help that `name` says."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        from transformers import AutoModelForCausalLM

        loader: Any = AutoModelForCausalLM
        self.name = name
        self.rates: list[float] = []
        self._device = args.device
        self._model = loader.from_pretrained(args.model, dtype=torch.float32).to(args.device)
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self._help: dict[str, Any] = {}
        if name == "transformers, assistant":
            assistant = loader.from_pretrained(args.draft, dtype=torch.float32).to(args.device)
            self._help = {"assistant_model": assistant}
        elif name == "transformers, prompt lookup":
            self._help = {"prompt_lookup_num_tokens": args.max_drafts}

    def run(self, prompts: list[list[int]], temperature: float, num_tokens: int) -> None:
        sampling: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            sampling |= {"temperature": temperature, "top_k": 0}
        start_s, num_made = time.perf_counter(), 0
        with torch.inference_mode():
            for prompt in prompts:
                ids = torch.tensor([prompt], device=self._device)
                mask = torch.ones_like(ids)
                out = self._model.generate(
                    ids, attention_mask=mask, max_new_tokens=num_tokens, **sampling, **self._help
                )
                num_made += out.shape[1] - len(prompt)
        self.rates.append(num_made / (time.perf_counter() - start_s))


def start(args: argparse.Namespace, drafter: str, *, adaptive: bool) -> EngineInProcess:
    """An engine with this drafter, for all rows that are measured."""
    settings: dict[str, object] = {
        "model.path": args.model,
        "model.device": args.device,
        "model.weights": "random" if args.random_weights else "safetensors",
        "cache.num_blocks": args.num_blocks,
        "cache.enable_prefix_caching": False,
        "scheduler.max_num_seqs": max(args.rows),
        "speculation.drafter": drafter,
        "speculation.max_drafts": args.max_drafts,
        "speculation.max_temperature": 9.0,
        "speculation.adaptive": adaptive,
    }
    if drafter != "none":
        settings["speculation.attention_backend"] = args.attention_backend
        if args.graph_tokens is not None:
            settings["speculation.max_graph_tokens"] = args.graph_tokens
    if drafter in ("draft_model", "eagle3"):
        settings["speculation.model_path"] = args.head if drafter == "eagle3" else args.draft
    return EngineInProcess(load_config(None, settings))


def build_sides(args: argparse.Namespace) -> list[Side]:
    sides = [Side(name="no drafts", engine=start(args, "none", adaptive=True))]
    for drafter in args.drafters:
        for adaptive in (False, True):
            kind = "adaptive" if adaptive else f"always {args.max_drafts}"
            engine = start(args, drafter, adaptive=adaptive)
            sides.append(Side(name=f"{drafter}, {kind}", engine=engine))
    for adaptive in (False, True) if args.acceptance is not None else ():
        engine = start(args, "ngram", adaptive=adaptive)
        drafter = Synthetic(args.acceptance, engine.engine.spec.vocab_size)
        engine.engine.core.scheduler.drafting.drafter = drafter
        kind = "adaptive" if adaptive else f"always {args.max_drafts}"
        sides.append(Side(name=f"synthetic acceptance {args.acceptance}, {kind}", engine=engine))
    return sides


def _encoder(folder: str) -> Callable[[str], Sequence[int]]:
    tokenizing = load_tokenizer(Path(folder))

    def encode(text: str) -> Sequence[int]:
        (ids,) = tokenizing.encode_batch([text], add_special_tokens=True)
        assert isinstance(ids, list), ids
        return ids

    return encode


def measure(
    sides: Sequence[Side], args: argparse.Namespace, num_rows: int, temperature: float
) -> None:
    """All rounds of one figure; prompts are new in every round, seeds are the same on all sides."""
    encode = _encoder(args.model)
    for number in range(-1, args.rounds):
        prompts = build_prompts(
            encode,
            [args.prompt_tokens] * num_rows,
            seed=1000 * num_rows + number,
        )
        params = [
            SamplingParams(
                max_tokens=args.tokens, temperature=temperature, seed=seed, ignore_eos=True
            )
            for seed in range(num_rows)
        ]
        answers: list[list[int]] = []
        for side in sides:
            drafter = side.engine.engine.core.scheduler.drafting.drafter
            if isinstance(drafter, Synthetic):
                drafter.answers = {tuple(p): a for p, a in zip(prompts, answers, strict=True)}
            found = side.run(prompts, params)
            answers = answers or found
            side.num_other += sum(a != b for a, b in zip(found, answers, strict=True))
            if number < 0:
                side.clear()


def report(sides: Sequence[Side], num_rows: int, temperature: float) -> None:
    plain = sides[0]
    for side in sides:
        ratios = [a / b for a, b in zip(side.rates, plain.rates, strict=True)]
        length = side.accepted_length
        print(
            f"| {num_rows} | {temperature:g} | {side.name} | {statistics.median(side.rates):.0f}"
            f" | {statistics.median(ratios):.2f} | {'' if length is None else f'{length:.2f}'}"
            f" | {side.num_drafted - side.num_accepted} | {side.num_other} |",
            flush=True,
        )


def report_transformers(args: argparse.Namespace, temperature: float) -> None:
    kinds = ("transformers", "transformers, assistant", "transformers, prompt lookup")
    theirs = [Assisted(name, args) for name in kinds]
    encode = _encoder(args.model)
    for number in range(-1, args.rounds):
        prompts = build_prompts(
            encode,
            [args.prompt_tokens],
            seed=1000 + number,
        )
        for one in theirs:
            one.run(prompts, temperature, args.tokens)
    for one in theirs:
        ratio = statistics.median(one.rates[1:]) / statistics.median(theirs[0].rates[1:])
        rate = statistics.median(one.rates[1:])
        print(f"| 1 | {temperature:g} | {one.name} | {rate:.0f} | {ratio:.2f} of its own | | | |")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(MODELS / "laps-demo"))
    parser.add_argument("--draft", default=str(MODELS / "laps-demo-draft"))
    parser.add_argument("--head", help="folder of an EAGLE-3 head, for --drafters eagle3")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--drafters", nargs="*", default=["ngram", "draft_model"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--max-drafts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--num-blocks", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--acceptance", type=float)
    parser.add_argument("--attention-backend", choices=("prefill", "decode"), default="prefill")
    parser.add_argument("--graph-tokens", type=int, help="0 = no graphs with drafts; default: auto")
    parser.add_argument("--without-transformers", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    print(describe_machine())
    print("| rows | temperature | drafts | tokens/s | x | accepted length | wasted | other |")
    print("|---|---|---|---|---|---|---|---|")
    sides = build_sides(args)
    for temperature in args.temperatures:
        for num_rows in args.rows:
            for side in sides:
                side.clear()
            measure(sides, args, num_rows, temperature)
            report(sides, num_rows, temperature)
        if not args.without_transformers:
            report_transformers(args, temperature)


if __name__ == "__main__":
    main()
