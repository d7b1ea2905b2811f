"""Random histories of a whole engine give the same bits with every step as two batches.

Chunks, mixed steps, prefix hits, preempted requests, drafts, scores and log-probabilities: in
arithmetic whose sums are exact, so that nothing but a mistake can show.
"""

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.request import SamplingParams
from engine.runner.graphs import OverlapStatistics
from tests.engine.ranks.exact_models import snapped_mixtures
from tests.engine.ranks.rank_stories import EVERY_STEP
from tests.engine.speculation.exact_engines import exact_arithmetic, start_exact
from tests.engine.speculation.guessed_engines import Asked, guess, run, save_exact_model
from tests.harness.in_process import Answer
from tests.harness.seeds import seed_of
from tests.harness.tiny_models import VOCAB_SIZE

SEED = seed_of(__name__)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.1, "top_p": 0.9, "logprobs": 0},
    {"temperature": 0.0, "frequency_penalty": 0.7},
    {"temperature": 1.2, "allowed_token_ids": (4, 8, 15, 16, 23, 42, 99)},
    {"temperature": 0.0, "max_tokens": 2, "prompt_logprobs": 3},
    {"temperature": 0.0, "max_tokens": 0, "label_token_ids": (5, 6)},
)
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen2MoeForCausalLM": {"mlp_only_layers": [1]},
}


def _asked(draw: random.Random) -> list[Asked]:
    """Requests of every kind; some prompts go on from others, so that they find their blocks."""
    prompts = [draw.choices(range(3, VOCAB_SIZE), k=draw.randint(1, 40)) for _ in range(5)]
    prompts += [prompts[k] + draw.choices(range(3, VOCAB_SIZE), k=9) for k in range(4)]
    draw.shuffle(prompts)
    fields = [{"max_tokens": draw.randint(2, 14), "ignore_eos": True} | kind for kind in KINDS * 2]
    return [
        (draw.choice(prompts), SamplingParams(**kind, seed=draw.getrandbits(63))) for kind in fields
    ]


def _engine(folder: Path, draw: random.Random, *, splits: bool, drafter: str = "none") -> Engine:
    engine = start_exact(
        folder,
        speculation__drafter=drafter,
        # So few that requests are preempted while others decode.
        cache__num_blocks=draw.choice((26, 40)),
        scheduler__max_num_batched_tokens=draw.choice((9, 32)),
        scheduler__overlap=draw.random() < 0.5,
    )
    if splits:
        threshold = draw.choice((0.48, 0.1))
        engine.executor.overlap_two_batches(EVERY_STEP, threshold=threshold)
    return engine


def _told(found: list[Answer]) -> list[Any]:
    """Everything that a client gets; not how much of a prompt was found in the cache."""
    return [
        (one.tokens, one.finish, [(r.logprobs, _prompt(r.prompt)) for r in one.records])
        for one in found
    ]


def _prompt(scores: Any) -> Any:
    if scores is None:
        return None
    return scores.labels, [number for piece in scores.pieces for number in piece.chosen]


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2, 3))]
)
def test_any_history_is_that_of_whole_steps(number: int, architecture: str, tmp_path: Path) -> None:
    seed = SEED + number
    save_exact_model(tmp_path, architecture, seed=seed, **MODELS[architecture])
    asked = _asked(random.Random(seed))
    with ExitStack() as stack:
        stack.enter_context(exact_arithmetic())
        stack.enter_context(snapped_mixtures())
        whole = run(_engine(tmp_path, random.Random(seed), splits=False), asked)
        for num_drafts in (0, 3):
            drafter = "ngram" if num_drafts else "none"  # replaced by one that guesses better
            engine = _engine(tmp_path, random.Random(seed), splits=True, drafter=drafter)
            if num_drafts:
                guess(engine, asked, whole, num_drafts=num_drafts, error_rate=0.3, seed=seed)
            assert _told(run(engine, asked)) == _told(whole), f"seed {seed}, {num_drafts} drafts"
            told = engine.executor.statistics().two_batches
            assert isinstance(told, OverlapStatistics)
            assert told.num_split_prompts > 0
