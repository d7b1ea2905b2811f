"""Steps that compute no queries in the last layer but those they need give the same tokens."""

import random

import pytest

from engine.request import SamplingParams
from engine.runner import executor
from tests.harness.in_process import answer, start_engine


def test_skipping_queries_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in one piece and in chunks, beside rows that decode and rows not sampled yet."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 1500) for _ in range(n)] for n in (1, 2, 40, 97, 130, 16, 33)]
    work = [
        (
            prompt,
            SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=2),
        )
        for prompt in prompts
    ]
    outcomes = []
    for threshold in (1, 10**9):
        monkeypatch.setattr(executor, "_MIN_TOKENS_TO_SKIP_QUERIES", threshold)
        engine = start_engine(cache__num_blocks=128, scheduler__max_num_batched_tokens=64)
        outcomes.append(answer(engine, work))
    for skipped, whole in zip(*outcomes, strict=True):
        assert skipped.tokens == whole.tokens
        for ours, theirs in zip(skipped.records, whole.records, strict=True):
            assert ours.logprobs is not None
            assert theirs.logprobs is not None
            assert ours.logprobs.chosen == pytest.approx(theirs.logprobs.chosen, abs=1e-4)
