"""Many ways of computing one request's logits, and a hash of their bits for each.

Neighbours, chunks and the order of rows are drawn from a seed; ranks that share the model draw the
same.
"""

import hashlib
import random
from collections.abc import Callable

import torch

from engine.layers.context import SINGLE_RANK, Comm
from engine.models.llama import CausalLM
from engine.runner.executor_options import DEFAULT_OPTIONS, ExecutorOptions
from tests.engine.runner.step_driver import StepDriver

LENGTH = 150
NUM_IDS = 130  # that any tiny model knows; its file would import transformers
Start = Callable[[int], StepDriver]  # of a seed


def one_prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(NUM_IDS) for _ in range(LENGTH)]


def fixed_driver(
    model: CausalLM,
    seed: int,
    comm: Comm = SINGLE_RANK,
    options: ExecutorOptions = DEFAULT_OPTIONS,
) -> StepDriver:
    sizes = {"block_size": 16, "num_blocks": 160}
    return StepDriver(model, seed=seed, **sizes, fixed_tile=True, comm=comm, options=options)


def hash_ways(start: Start, num_trials: int) -> set[str]:
    """Of a prompt's logits, alone and so many times among others; one hash, or bits differ."""
    prompt = one_prompt(99)
    hashes = {_hash_alone(start, prompt)}
    return hashes | {_hash_among_others(start, prompt, seed) for seed in range(num_trials)}


def _hash_alone(start: Start, prompt: list[int]) -> str:
    """All logits of `prompt` in one step of its own."""
    driver = start(0)
    driver.admit(0, prompt)
    return _digest(driver.logits({0: LENGTH})[0])


def _hash_among_others(start: Start, prompt: list[int], seed: int) -> str:
    """All logits of `prompt`, in random chunks, beside random neighbours."""
    rng = random.Random(seed)
    driver = start(seed)
    driver.admit(0, prompt)
    neighbours = list(range(1, rng.randrange(1, 8)))
    for row in neighbours:
        driver.admit(row, [rng.randrange(NUM_IDS) for _ in range(rng.randrange(1, 250))])
    lines = []
    while (left := LENGTH - driver.num_computed[0]) > 0:
        largest = rng.choice((1, 1, 2, 30, LENGTH))
        num_new = {0: rng.randrange(1, min(left, largest) + 1)}
        for row in neighbours:
            row_left = len(driver.tokens[row]) - driver.num_computed[row]
            if row_left and rng.random() < 0.7:
                num_new[row] = rng.randrange(1, min(row_left, rng.choice((1, 40, 250))) + 1)
        rows = list(num_new)
        rng.shuffle(rows)
        lines.append(driver.logits({row: num_new[row] for row in rows})[0])
    return _digest(torch.cat(lines))


def _digest(logits: torch.Tensor) -> str:
    assert logits.isfinite().all(), "what is not a number has the same bits everywhere"
    return hashlib.blake2b(logits.cpu().numpy().tobytes()).hexdigest()
