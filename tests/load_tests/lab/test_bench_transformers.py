"""The engine figure compares equal work, and would notice a wrong token."""

import random
from pathlib import Path

import pytest

from load_tests.lab.bench_transformers import Agreement, TransformersModel, bench_config, measure
from load_tests.lab.in_process import EngineInProcess
from tests.harness.seeds import seed_of

pytestmark = pytest.mark.slow

MODEL = Path(__file__).resolve().parents[3] / "demo_model" / "laps-demo"
SEED = seed_of(__name__)
NUM_TOKENS = 5


@pytest.fixture(scope="module")
def engine() -> EngineInProcess:
    return EngineInProcess(bench_config(None, str(MODEL), threads=1))


@pytest.fixture(scope="module")
def reference(engine: EngineInProcess) -> TransformersModel:
    config = bench_config(None, str(MODEL), threads=1)
    return TransformersModel(config, engine.engine.kv_store.dtype)


def random_prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(SEED)
    return [[rng.randrange(10, 3000) for _ in range(n)] for n in lengths]


def test_both_sides_do_the_same_work_and_agree(
    engine: EngineInProcess, reference: TransformersModel
) -> None:
    rates, agreement = measure(
        engine, reference, random_prompts(3, 17, 40), num_tokens=NUM_TOKENS, num_rounds=2
    )
    assert agreement.num_streams == 6  # three one by one, three together
    assert agreement.num_mismatches == 0, f"seed {SEED}"
    assert len(rates.ours_1) == len(rates.theirs_1) == 6
    assert len(rates.ours_many) == len(rates.theirs_many) == 2
    assert len(rates.figures(3)) == 7


def test_a_token_that_transformers_would_not_choose_counts_as_a_mismatch(
    reference: TransformersModel,
) -> None:
    [prompt] = random_prompts(13)
    [right] = reference.generate([prompt], NUM_TOKENS)
    wrong = [*right[:2], (right[2] + 1) % 3000, *right[3:]]
    agreement = Agreement()
    agreement.count(reference, prompt, wrong, right)
    agreement.count(reference, prompt, right, right)
    assert (agreement.num_mismatches, agreement.num_near_ties) == (1, 0), f"seed {SEED}"
    assert agreement.num_compared_tokens == 3 + NUM_TOKENS


def test_padding_a_batch_leaves_the_reference_tokens_as_they_are(
    reference: TransformersModel,
) -> None:
    prompts = random_prompts(5, 31)
    alone = [reference.generate([prompt], NUM_TOKENS)[0] for prompt in prompts]
    assert reference.generate(prompts, NUM_TOKENS) == alone, f"seed {SEED}"
