"""Engines whose drafts come from a test: of an exact small model, or of the shipped one."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.engine import Engine
from engine.kv.cache import check_blocks
from engine.request import Request, SamplingParams
from engine.scheduling.dp_scheduler import DpScheduler
from engine.scheduling.drafting import Drafting
from engine.speculation.drafter import FixedDrafts
from tests.engine.ranks.exact_models import save_whole_numbers
from tests.harness.drafters import Guesser
from tests.harness.in_process import Answer, answer
from tests.harness.tiny_models import VOCAB_SIZE, save_model

Asked = tuple[Sequence[int], SamplingParams]
Kind = Mapping[str, Any]  # of a request: fields of its SamplingParams


def with_shared_prefix(seed: int, kinds: Sequence[Kind]) -> list[Asked]:
    """A request of each kind; their prompts of 35 tokens begin with the same 13."""
    draw = random.Random(seed)
    shared = draw.choices(range(3, VOCAB_SIZE), k=13)
    given = {"max_tokens": 11, "ignore_eos": True}
    return [
        (
            shared + draw.choices(range(3, VOCAB_SIZE), k=22),
            SamplingParams(**{**given, "seed": draw.getrandbits(60), **kind}),
        )
        for kind in kinds
    ]


def save_exact_model(
    folder: Path, architecture: str = "LlamaForCausalLM", *, seed: int, **settings: object
) -> None:
    save_model(folder, architecture, seed=seed, **settings)
    save_whole_numbers(folder, seed)


def guess(
    engine: Engine,
    asked: Sequence[Asked],
    answers: Sequence[Answer],
    *,
    num_drafts: int,
    error_rate: float,
    seed: int = 0,
) -> None:
    """From now on the engine's drafts are the tokens of `answers`, some of them wrong."""
    known = [found.tokens for found in answers]

    def answer_of(request: Request) -> Sequence[int]:
        return known[int(request.key.request_id, 16)]

    guesser = Guesser(
        answer_of, vocab_size=engine.spec.vocab_size, error_rate=error_rate, seed=seed
    )
    scheduler = engine.core.scheduler
    holds = scheduler.drafting.holds
    scheduler.drafting = Drafting(guesser, FixedDrafts(num_drafts), holds=holds)


def run(engine: Engine, asked: Sequence[Asked]) -> list[Answer]:
    """The answers; afterwards nothing is held."""
    found = answer(engine, asked)
    scheduler = engine.core.scheduler
    check_blocks(engine.cache, list(scheduler.owners()))
    assert engine.cache.num_held == 0
    of_rank = scheduler.of_rank if isinstance(scheduler, DpScheduler) else [scheduler]
    for one in of_rank:
        assert one.num_free_rows == one._config.max_num_seqs
        assert one.drafting.kept_keys() == set()
    return found


def assert_same(ours: Sequence[Answer], theirs: Sequence[Answer]) -> None:
    """Every record with every number; only what a prefix hit changes may differ."""
    for our, their in zip(ours, theirs, strict=True):
        assert our.tokens == their.tokens
        assert our.finish == their.finish
        for ours_, theirs_ in zip(our.records, their.records, strict=True):
            assert (ours_.index, ours_.stop_token_id) == (theirs_.index, theirs_.stop_token_id)
            assert ours_.logprobs == theirs_.logprobs
