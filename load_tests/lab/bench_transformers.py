"""Tokens per second of the engine in this process, beside transformers on the same model.

    python -m load_tests.lab.bench_transformers                  # the shipped model, one thread
    python -m load_tests.lab.bench_transformers --model DIR --threads 2 --rounds 5 --json

Both sides run in one process and take turns (single streams request by request, batches round by
round), with the same dtype and threads, in inference mode, warm. The prefix cache is off, or later
rounds would not compute their prompts. Ratios are of neighbours in time, and figures are medians,
so that a machine that others use too disturbs both sides alike. Knows no Ray and no HTTP:
`bench_http` adds those.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from configs.load import load_config
from configs.schema import AppConfig
from engine.text.tokenizing import load_tokenizer
from load_tests.lab.in_process import EngineInProcess
from load_tests.prompts import build_prompts, draw_lengths
from load_tests.tables import Figure, at_least, describe_machine, median_figure, render, to_json

DECISIVE = 1e-2  # logit margin below which another order of sums may choose another token
WARM_TOKENS = 8


class TransformersModel:
    """`transformers.generate` on the same folder, greedy, without an end of sequence."""

    def __init__(self, config: AppConfig, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        folder, device = config.model.path, config.model.device
        loader: Any = AutoModelForCausalLM
        model = loader.from_pretrained(folder, dtype=dtype).to(device)
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0  # masked wherever it is read
        self._model = model.eval()
        self._device = device

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """One batch, padded on the left, with an attention mask."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = self._model.generate(
                ids.to(self._device),
                attention_mask=mask.to(self._device),
                max_new_tokens=num_tokens,
                do_sample=False,
            )
        tokens: list[list[int]] = out[:, longest:].tolist()
        return tokens

    def margin(self, known: Sequence[int], ours: int, theirs: int) -> float:
        """How much larger the logit of `theirs` is than that of `ours` after `known`."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(known)], device=self._device)).logits[0, -1]
        return float(logits[theirs] - logits[ours])


@dataclass(slots=True, kw_only=True)
class Agreement:
    """How our greedy tokens compare with theirs; a stream is compared until it first differs."""

    num_streams: int = 0
    num_compared_tokens: int = 0
    num_near_ties: int = 0  # differs where two logits are closer than DECISIVE
    num_mismatches: int = 0  # differs elsewhere: one of the two is wrong

    def count(
        self, model: TransformersModel, prompt: Sequence[int], ours: list[int], theirs: list[int]
    ) -> None:
        assert len(ours) == len(theirs), f"{len(ours)} tokens of ours, {len(theirs)} of theirs"
        self.num_streams += 1
        for index, (our_id, their_id) in enumerate(zip(ours, theirs, strict=True)):
            self.num_compared_tokens += 1
            if our_id == their_id:
                continue
            margin = model.margin([*prompt, *theirs[:index]], our_id, their_id)
            if abs(margin) < DECISIVE:
                self.num_near_ties += 1
            else:
                self.num_mismatches += 1
            return


@dataclass(slots=True, kw_only=True)
class Rates:
    """Tokens per second: of single streams by request, of batches by round."""

    ours_1: list[float] = field(default_factory=list)
    theirs_1: list[float] = field(default_factory=list)
    ours_many: list[float] = field(default_factory=list)
    theirs_many: list[float] = field(default_factory=list)

    def figures(self, num_streams: int) -> list[Figure]:
        many = f"{num_streams} streams"
        starts = range(0, len(self.ours_1), num_streams)
        singly = [statistics.median(self.ours_1[i : i + num_streams]) for i in starts]
        return [
            median_figure("1 stream, ours", self.ours_1, "tokens/s"),
            median_figure("1 stream, transformers", self.theirs_1, "tokens/s"),
            median_figure(f"{many}, ours", self.ours_many, "tokens/s"),
            median_figure(f"{many}, transformers, padded batch", self.theirs_many, "tokens/s"),
            at_least(
                "1 stream: ours / transformers", _ratios(self.ours_1, self.theirs_1), "x", 1.0
            ),
            at_least(f"{many}: ours / ours one by one", _ratios(self.ours_many, singly), "x", 3.0),
            at_least(
                f"{many}: ours / transformers", _ratios(self.ours_many, self.theirs_many), "x", 1.0
            ),
        ]


def measure(
    ours: EngineInProcess,
    theirs: TransformersModel,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    num_rounds: int,
) -> tuple[Rates, Agreement]:
    """Run every side once per round, in turn. Raises AssertionError if a rate is of wrong work."""
    rates, agreement = Rates(), Agreement()
    for side in (ours, theirs):
        side.generate(prompts, WARM_TOKENS)
        side.generate(prompts[:1], WARM_TOKENS)
    for round_index in range(num_rounds):
        theirs_by_prompt = []
        for prompt in prompts:
            [our_ids] = _timed(rates.ours_1, ours.generate, [prompt], num_tokens)
            [their_ids] = _timed(rates.theirs_1, theirs.generate, [prompt], num_tokens)
            theirs_by_prompt.append(their_ids)
            if round_index == 0:
                agreement.count(theirs, prompt, our_ids, their_ids)
        batch = _timed(rates.ours_many, ours.generate, prompts, num_tokens)
        _timed(rates.theirs_many, theirs.generate, prompts, num_tokens)
        if round_index == 0:
            for prompt, our_ids, their_ids in zip(prompts, batch, theirs_by_prompt, strict=True):
                agreement.count(theirs, prompt, our_ids, their_ids)
    return rates, agreement


def bench_config(path: Path | None, model: str | None, threads: int) -> AppConfig:
    """A config for one engine in this process, without prefix reuse between rounds."""
    config = load_config(
        path, {"workers.torch_threads": threads, "cache.enable_prefix_caching": False}
    )
    folder = Path(model or config.model.path).resolve()
    return msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, path=str(folder))
    )


def encoder(folder: Path) -> Callable[[str], list[int]]:
    """Text to ids with the model's own tokenizer."""
    tokenizing = load_tokenizer(folder)

    def encode(text: str) -> list[int]:
        [ids] = tokenizing.encode_batch([text], add_special_tokens=False)
        if isinstance(ids, Exception):
            raise ids
        return ids

    return encode


def _timed(
    rates: list[float],
    generate: Callable[[Sequence[Sequence[int]], int], list[list[int]]],
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
) -> list[list[int]]:
    started_s = time.perf_counter()
    answers = generate(prompts, num_tokens)
    took_s = time.perf_counter() - started_s
    assert all(len(answer) == num_tokens for answer in answers), "not every token was generated"
    rates.append(len(prompts) * num_tokens / took_s)
    return answers


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, help="YAML file; default: the built-in values")
    parser.add_argument("--model", help="model folder; default: the config's")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both sides")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    config = bench_config(args.config, args.model, args.threads)
    ours = EngineInProcess(config)
    theirs = TransformersModel(config, ours.engine.kv_store.dtype)
    lengths = draw_lengths(args.streams, 16, 256, seed=args.seed)
    prompts = build_prompts(encoder(Path(config.model.path)), lengths, seed=args.seed)
    rates, agreement = measure(
        ours, theirs, prompts, num_tokens=args.tokens, num_rounds=args.rounds
    )
    figures = rates.figures(args.streams)
    about = describe_machine() | {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "dtype": ours.engine.layout.dtype,
        "rounds": args.rounds,
        "seed": args.seed,
        "mean_prompt_tokens": statistics.mean(lengths),
        "new_tokens": args.tokens,
        "agreement": {name: getattr(agreement, name) for name in Agreement.__slots__},
    }
    if args.json:
        print(to_json(figures, about))
    else:
        print(render(figures), *(f"{k}: {v}" for k, v in about.items()), sep="\n")


if __name__ == "__main__":
    main()
