"""Temperature and the three cuts, against transformers' processors and float64 arithmetic."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.request import SamplingParams
from engine.sampling.sampler import Sampler
from engine.sampling.truncation import MinP, Temperature, TopK, TopP
from kernels.sampling.noise import gumbel
from tests.engine.sampling.drawn import sample

VOCAB_SIZE = 1031
NO_IDS: Any = torch.zeros((1, 0), dtype=torch.int64)  # what the warpers do not look at


def random_logits(generator: torch.Generator, num_rows: int, spread: float = 3.0) -> Tensor:
    return torch.randn((num_rows, VOCAB_SIZE), generator=generator) * spread


def cut(
    feature: TopK | TopP | MinP | Temperature, logits: Tensor, *params: SamplingParams
) -> Tensor:
    """What `feature` makes of a copy of `logits`, with one row of parameters for each line."""
    for row, row_params in enumerate(params):
        feature.add(row, row_params, [], [])
    shaped = logits.clone()
    feature.apply(shaped, list(range(len(params))))
    return shaped


def params_with(**knobs: object) -> SamplingParams:
    return SamplingParams(max_tokens=9, **knobs)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 5.0])
def test_temperature_divides_as_transformers_does_up_to_a_shift(
    temperature: float, generator: torch.Generator
) -> None:
    logits = random_logits(generator, 3)
    params = params_with(temperature=temperature)
    ours = cut(Temperature(), logits, params, params, params)
    theirs = TemperatureLogitsWarper(temperature)(NO_IDS, logits.double())
    torch.testing.assert_close(
        ours.double(), theirs - theirs.amax(dim=-1, keepdim=True), rtol=1e-6, atol=1e-6
    )
    assert ours.amax(dim=-1).tolist() == [0.0] * 3


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-46, 5e-324, 1e30])
def test_extreme_temperatures_never_make_nan(
    temperature: float, generator: torch.Generator
) -> None:
    logits = random_logits(generator, 2, spread=100.0)
    logits[0, 5] = -torch.inf
    logits[1, 7] = logits[1, 11] = 1e6
    params = params_with(temperature=temperature)
    shaped = cut(Temperature(), logits, params, params)
    assert not shaped.isnan().any()
    assert shaped.amax(dim=-1).tolist() == [0.0, 0.0]
    assert shaped[1, 7] == shaped[1, 11] == 0.0


@pytest.mark.parametrize("k", [1, 2, 17, VOCAB_SIZE - 1])
def test_top_k_keeps_what_transformers_keeps(k: int, generator: torch.Generator) -> None:
    logits = random_logits(generator, 3)
    ours = cut(TopK(VOCAB_SIZE), logits, *[params_with(top_k=k)] * 3)
    assert torch.equal(ours, TopKLogitsWarper(k)(NO_IDS, logits))


def test_top_k_keeps_ties_at_the_kth_as_transformers_does(generator: torch.Generator) -> None:
    logits = torch.randint(0, 9, (4, VOCAB_SIZE), generator=generator).float()
    ours = cut(TopK(VOCAB_SIZE), logits, *[params_with(top_k=5)] * 4)
    assert torch.equal(ours, TopKLogitsWarper(5)(NO_IDS, logits))
    assert ours[0].isfinite().sum() > 5


@pytest.mark.parametrize("k", [0, VOCAB_SIZE, VOCAB_SIZE + 1, 10**9])
def test_top_k_of_zero_or_beyond_the_vocabulary_keeps_everything(k: int) -> None:
    assert not TopK(VOCAB_SIZE).add(0, params_with(top_k=k), [], [])


def test_every_row_has_its_own_k_p_and_m(generator: torch.Generator) -> None:
    logits = random_logits(generator, 3)
    tops = cut(TopK(VOCAB_SIZE), logits, *[params_with(top_k=k) for k in (3, 0, 40)])
    assert tops.isfinite().sum(dim=-1).tolist() == [3, VOCAB_SIZE, 40]
    for feature_of, knob in ((TopP, "top_p"), (MinP, "min_p")):
        params = [params_with(**{knob: value}) for value in (0.3, 0.9, 0.05)]
        together = cut(feature_of(), logits, *params)
        for i, row_params in enumerate(params):
            alone = cut(feature_of(), logits[i : i + 1], row_params)
            assert torch.equal(alone[0], together[i]), (knob, i)


def mass_above(logits: Tensor) -> Tensor:
    """Float64 probability of all strictly better tokens, for each token of [P, vocab]."""
    better = logits.unsqueeze(1) > logits.unsqueeze(2)  # [P, token, other]
    return (better.double() @ logits.double().softmax(dim=-1).unsqueeze(2)).squeeze(2)


@pytest.mark.parametrize("spread", [0.0001, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.999, 0.9999999])
def test_top_p_keeps_what_float64_and_transformers_keep(
    top_p: float, spread: float, generator: torch.Generator
) -> None:
    logits = random_logits(generator, 5, spread)
    kept = cut(TopP(), logits, *[params_with(top_p=top_p)] * 5).isfinite()
    above = mass_above(logits)
    theirs = TopPLogitsWarper(top_p)(NO_IDS, logits).isfinite()
    # Tokens within fp32 rounding of the boundary may fall on either side, and nothing else may.
    clear = (above - top_p).abs() > 2e-6
    assert torch.equal(kept[clear], ((above < top_p) | (above == 0))[clear])
    # Random fp32 logits do repeat now and then; of equals at the boundary they keep but some.
    sole = (logits.unsqueeze(1) == logits.unsqueeze(2)).sum(dim=-1) == 1
    assert torch.equal(kept[clear & sole], theirs[clear & sole])
    assert kept.any(dim=-1).all()
    assert torch.equal(logits.where(kept, -torch.inf).argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 511, 512, 513, 5000])
def test_top_p_is_the_smallest_sufficient_set_at_every_vocabulary_size(
    vocab_size: int, generator: torch.Generator
) -> None:
    # Flat, middling and peaked rows leave the search for the cutoff at different stages.
    spreads = torch.tensor([[0.0001], [1.0], [8.0]])
    logits = torch.randn((3, vocab_size), generator=generator) * spreads
    kept = cut(TopP(), logits, *[params_with(top_p=0.95)] * 3).isfinite()
    probs = logits.double().softmax(dim=-1)
    for i in range(3):
        mass = probs[i][kept[i]].sum().item()
        assert mass >= 0.95 - 1e-6
        last = logits[i] == logits[i][kept[i]].min()  # almost always one token
        assert mass - probs[i][last].sum().item() < 0.95 + 1e-6


def test_top_p_keeps_or_drops_equal_tokens_together() -> None:
    logits = torch.tensor([[0.0, 2.0, 0.0, 0.0, -9.0, 2.0], [1.0] * 6])
    kept = cut(TopP(), logits, params_with(top_p=0.5), params_with(top_p=0.01)).isfinite()
    assert kept.tolist() == [[False, True, False, False, False, True], [True] * 6]
    kept = cut(TopP(), logits[:1], params_with(top_p=0.9)).isfinite()
    assert kept.tolist() == [[True, True, True, True, False, True]]


@pytest.mark.parametrize("min_p", [1e-9, 0.02, 0.3, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p: float, generator: torch.Generator) -> None:
    logits = random_logits(generator, 4)
    logits[1, :7] = logits[1].max()
    ours = cut(MinP(), logits, *[params_with(min_p=min_p)] * 4).isfinite()
    theirs = MinPLogitsWarper(min_p)(NO_IDS, logits).isfinite()
    distance = logits.double() - logits.double().amax(dim=-1, keepdim=True) - math.log(min_p)
    clear = (distance.abs() > 1e-5) | (distance == 0)
    assert torch.equal(ours[clear], theirs[clear])
    if min_p == 1.0:
        assert ours.sum(dim=-1).tolist() == [1, (logits[1] == logits[1].max()).sum(), 1, 1]


def test_the_cuts_leave_greedy_rows_alone() -> None:
    params = params_with(temperature=0.0, top_k=1, top_p=0.1, min_p=0.9, seed=3)
    for feature in (TopK(VOCAB_SIZE), TopP(), MinP(), Temperature()):
        assert not feature.add(0, params, [], [])


def test_a_draw_is_the_argmax_of_transformers_pipeline_plus_noise(
    generator: torch.Generator,
) -> None:
    """The whole order: repetition penalty, temperature, top_k, top_p, min_p, then noise."""
    prompt_ids = torch.randint(0, VOCAB_SIZE, (50,), generator=generator).tolist()
    seen: Any = torch.tensor([prompt_ids])
    for case in range(20):
        seed = int(torch.randint(0, 2**62, (1,), generator=generator))
        logits = random_logits(generator, 1)
        knobs = torch.rand(5, generator=generator).tolist()
        params = SamplingParams(
            max_tokens=9,
            repetition_penalty=0.5 + 1.5 * knobs[0],
            temperature=0.1 + 2 * knobs[1],
            top_k=1 + int(knobs[2] * 100),
            top_p=0.05 + 0.9 * knobs[3],
            min_p=0.2 * knobs[4],
            seed=seed,
        )
        theirs = LogitsProcessorList(
            [
                RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
                TemperatureLogitsWarper(params.temperature),
                TopKLogitsWarper(params.top_k),
                TopPLogitsWarper(params.top_p),
                MinPLogitsWarper(params.min_p),
            ]
        )(seen, logits.clone())
        noise = gumbel(torch.tensor([seed]), torch.tensor([0]), torch.arange(VOCAB_SIZE))
        sampler = Sampler(VOCAB_SIZE, 3, (2,), "cpu")
        sampler.add(1, params, prompt_ids, [])
        drawn = sample(sampler, logits, [1]).token_ids
        assert drawn == (theirs + noise).argmax(dim=-1).tolist(), (case, params)


@pytest.mark.parametrize(
    "knobs",
    [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-6}],
    ids=lambda knobs: next(iter(knobs)),
)
def test_each_knob_at_its_extreme_draws_the_best_token(
    knobs: dict[str, float], generator: torch.Generator
) -> None:
    sampler = Sampler(VOCAB_SIZE, 8, (), "cpu")
    for row in range(8):
        sampler.add(row, SamplingParams(max_tokens=9, seed=row, **knobs), [], [])  # type: ignore[arg-type]
    for _ in range(10):
        logits = random_logits(generator, 8)
        best = logits.argmax(dim=-1)
        logits[torch.arange(8), best] += 0.001  # at 1e-6, a thousand times the noise's scale
        assert sample(sampler, logits, list(range(8))).token_ids == best.tolist()
