"""Requests of many lengths, half of them drawn, for engines on GPUs with and without drafts."""

import random

from engine.request import SamplingParams
from tests.harness.in_process import GREEDY
from tests.harness.tiny_models import VOCAB_SIZE


def mixed_work(count: int = 30) -> list[tuple[list[int], SamplingParams]]:
    """The same ones whenever it is called."""
    rng = random.Random(3)
    work = []
    for number in range(count):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((1, 2, 5, 17, 64, 400)))]
        drawn = SamplingParams(max_tokens=25, temperature=0.9, top_k=20, seed=number)
        work.append((prompt, rng.choice((GREEDY, drawn))))
    return work
