"""How long the masks of a step of structured output take, by the number of threads.

    python -m load_tests.lab.bench_masks --rows 64 --vocab-size 151936 --threads 1 2 4 8

Outputs of one endless schema, each somewhere else, drawn at random under their masks, and a
vocabulary of pieces of source text. Each step's masks are computed by all numbers of threads in
turn, from copies of the same matchers. One core or more; needs no GPU, no model and no engine.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.constraints.compiling import GrammarMatcher, compile_constraint
from engine.constraints.json_schema import restrict
from engine.constraints.vocabulary import Vocabulary, load_vocabulary
from engine.request import Constraint, ConstraintKind
from engine.sampling.mask_threads import MaskThreads
from kernels.sampling.mask_words import num_mask_words
from load_tests.lab.bench_constrained import ENDLESS, write_vocabulary
from load_tests.tables import describe_machine, render_rows

MAX_TOKENS_APART = 40  # of the outputs at the first step
NUM_CHECKED = 4  # steps whose masks are compared


def start_outputs(
    vocabulary: Vocabulary, num_rows: int, rng: random.Random
) -> list[GrammarMatcher]:
    """Matchers of outputs that are in different places."""
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(restrict(ENDLESS, "schema")))
    grammar = compile_constraint(vocabulary, constraint)
    found = [grammar.matcher() for _ in range(num_rows)]
    masks = _new_masks(num_rows, vocabulary)
    for matcher in found:
        for _ in range(rng.randrange(MAX_TOKENS_APART)):
            matcher.fill_next_token_bitmask(masks, 0)
            draw(matcher, masks[0], rng)
    return found


def draw(matcher: GrammarMatcher, line: Tensor, rng: random.Random) -> None:
    """Append one of the tokens that a line allows."""
    allowed = np.flatnonzero(np.unpackbits(line.numpy().view(np.uint8), bitorder="little"))
    assert matcher.accept_token(int(rng.choice(allowed)))


def fill(matchers: Sequence[GrammarMatcher], masks: Tensor, threads: MaskThreads) -> float:
    """Milliseconds for all lines of `masks`, from copies of the matchers."""
    copies = [matcher.fork() for matcher in matchers]
    masks.fill_(-1)
    works = [partial(one.fill_next_token_bitmask, masks, i) for i, one in enumerate(copies)]
    started_s = time.perf_counter()
    threads.run(works)
    return 1e3 * (time.perf_counter() - started_s)


def _new_masks(num_rows: int, vocabulary: Vocabulary) -> Tensor:
    return torch.empty((num_rows, num_mask_words(vocabulary.vocab_size)), dtype=torch.int32)


def measure(vocabulary: Vocabulary, args: argparse.Namespace) -> dict[int, list[float]]:
    """Number of threads -> milliseconds of each step."""
    rng = random.Random(args.seed)
    matchers = start_outputs(vocabulary, args.rows, rng)
    masks = _new_masks(args.rows, vocabulary)
    threads = {number: MaskThreads(number) for number in args.threads}
    taken_ms: dict[int, list[float]] = {number: [] for number in threads}
    for step in range(args.steps):
        first: Tensor | None = None
        for number in rng.sample(list(threads), len(threads)):
            taken_ms[number].append(fill(matchers, masks, threads[number]))
            if step < NUM_CHECKED:
                first = masks.clone() if first is None else first
                assert torch.equal(masks, first), f"{number} threads: other masks"
        for matcher, line in zip(matchers, masks, strict=True):
            draw(matcher, line, rng)
    return taken_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, size = Path(scratch), args.vocab_size
        write_vocabulary(folder, size, args.seed)
        vocabulary = load_vocabulary(folder, vocab_size=size, eos_token_ids=(size - 1,))
    rows: list[tuple[str, ...]] = [("threads", "p50, ms", "p90", "p99", "mean")]
    for number, taken in measure(vocabulary, args).items():
        taken_ms = sorted(taken)
        marks = [taken_ms[min(len(taken_ms) - 1, len(taken_ms) * n // 100)] for n in (50, 90, 99)]
        mean_ms = sum(taken_ms) / len(taken_ms)
        rows.append((str(number), *(f"{value:.2f}" for value in (*marks, mean_ms))))
    about = describe_machine() | {"usable_cpus": len(os.sched_getaffinity(0)), **vars(args)}
    print(render_rows(rows), *(f"{name}: {value}" for name, value in about.items()), sep="\n")


if __name__ == "__main__":
    main()
