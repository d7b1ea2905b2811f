"""Answers with drafts are those without, bit by bit, whatever is asked for and guessed."""

import random
from pathlib import Path

import pytest

from engine.request import SamplingParams
from tests.engine.speculation.exact_engines import exact_arithmetic, start_exact
from tests.engine.speculation.guessed_engines import (
    Asked,
    assert_same,
    guess,
    run,
    save_exact_model,
)
from tests.harness.in_process import Answer
from tests.harness.seeds import seed_of
from tests.harness.tiny_models import VOCAB_SIZE

SEED = seed_of(__name__)
KINDS = (
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 0.6, "top_p": 0.8, "logprobs": 3},
    {"temperature": 1.1, "top_k": 9, "min_p": 0.05, "logprobs": 0},
    {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.3, "logprobs": 2},
    {"temperature": 0.9, "repetition_penalty": 1.4},
    {"temperature": 0.8, "frequency_penalty": -0.6, "repetition_penalty": 0.8},
    {"temperature": 1.0, "logit_bias": {5: 6.0, 17: -100.0, 40: 4.0}},
    {"temperature": 1.5, "min_tokens": 9, "stop_token_ids": (3, 44, 90), "ignore_eos": False},
    {"temperature": 2.0, "stop_token_ids": tuple(range(0, 60, 7))},
    {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 3))},
    {"temperature": 1.0, "allowed_token_ids": (4, 8, 15, 16, 23, 42, 99)},
    {"temperature": 1.0, "banned_sequences": ((7,), (11, 12), (20, 21, 22), (12, 11))},
    {"temperature": 1.2, "logprobs": 2, "logprob_token_ids": (9, 2)},
    {"temperature": 1.0, "frequency_penalty": 1.0, "allowed_token_ids": (1, 3, 4, 5, 6)},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exact")
    save_exact_model(path, seed=SEED)
    return path


def _asked(num_tokens: int = 16) -> list[Asked]:
    draw = random.Random(SEED)
    fields = [{"max_tokens": num_tokens, "ignore_eos": True, **kind} for kind in KINDS]
    return [
        (
            draw.choices(range(3, VOCAB_SIZE), k=draw.randint(1, 30)),
            SamplingParams(**kind, seed=draw.getrandbits(64) - 2**63),
        )
        for kind in fields
    ]


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return _asked()


@pytest.fixture(scope="module")
def plain(folder: Path, asked: list[Asked]) -> list[Answer]:
    with exact_arithmetic():
        return run(start_exact(folder, speculation__drafter="none"), asked)


@pytest.mark.parametrize(
    ("num_drafts", "error_rate", "overlap"),
    [
        (3, 0.3, False),
        (8, 0.0, True),
        pytest.param(1, 0.0, True, marks=pytest.mark.nightly),
        pytest.param(8, 0.15, False, marks=pytest.mark.nightly),
        pytest.param(5, 1.0, False, marks=pytest.mark.nightly),
        pytest.param(5, 0.5, True, marks=pytest.mark.nightly),
    ],
)
def test_every_number_is_that_without_drafts(
    folder: Path,
    asked: list[Asked],
    plain: list[Answer],
    num_drafts: int,
    error_rate: float,
    overlap: bool,
) -> None:
    engine = start_exact(folder, scheduler__overlap=overlap)
    guess(engine, asked, plain, num_drafts=num_drafts, error_rate=error_rate, seed=SEED)
    with exact_arithmetic():
        assert_same(run(engine, asked), plain)
        counts = engine.core.scheduler.drafting.counts
        assert counts.num_drafted > 60
        assert (counts.num_accepted == counts.num_drafted) == (error_rate == 0.0)
        assert_same(run(engine, asked), plain)  # and now from cached prefixes
    assert engine.core.scheduler.statistics().num_cached_tokens > 0


@pytest.mark.parametrize(
    "overlap", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["in turn", "overlapped"]
)
def test_preempted_requests_go_on_as_without_drafts(
    folder: Path, asked: list[Asked], plain: list[Answer], overlap: bool
) -> None:
    engine = start_exact(
        folder, cache__num_blocks=18, model__max_model_len=64, scheduler__overlap=overlap
    )
    guess(engine, asked, plain, num_drafts=4, error_rate=0.2, seed=SEED)
    with exact_arithmetic():
        assert_same(run(engine, asked), plain)
    assert engine.core.scheduler.statistics().num_preemptions > 0


def test_ngrams_change_nothing_and_are_right_where_answers_repeat(
    folder: Path, asked: list[Asked], plain: list[Answer]
) -> None:
    engine = start_exact(folder, speculation__max_temperature=9.0, speculation__max_drafts=6)
    with exact_arithmetic():
        assert_same(run(engine, asked), plain)
        before = engine.core.scheduler.statistics().num_steps
        assert_same(run(engine, asked), plain)
    assert engine.core.scheduler.drafting.counts.num_accepted > 0
    assert engine.core.scheduler.statistics().num_steps <= 2 * before


def test_the_controller_changes_nothing(
    folder: Path, asked: list[Asked], plain: list[Answer]
) -> None:
    engine = start_exact(folder, speculation__adaptive=True, speculation__max_temperature=9.0)
    with exact_arithmetic():
        assert_same(run(engine, asked), plain)


@pytest.mark.parametrize("length", [1, 3])
def test_an_answer_ends_with_its_context_or_its_length(folder: Path, length: int) -> None:
    draw = random.Random(SEED + length)
    asked = [
        (draw.choices(range(3, VOCAB_SIZE), k=40 - length - i), params)
        for i, params in enumerate(
            [
                SamplingParams(max_tokens=99, temperature=1.0, seed=SEED, ignore_eos=True),
                SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True),
            ]
        )
    ]
    with exact_arithmetic():
        expected = run(
            start_exact(folder, speculation__drafter="none", model__max_model_len=40), asked
        )
        engine = start_exact(folder, model__max_model_len=40)
        guess(engine, asked, expected, num_drafts=8, error_rate=0.0)
        assert_same(run(engine, asked), expected)
    assert [len(found.tokens) for found in expected] == [length, length]
