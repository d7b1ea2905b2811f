"""Log-probabilities against float64, and their order among equals."""

import pytest
import torch

from engine.request import SamplingParams
from engine.sampling.logprobs import best_tokens
from engine.sampling.sampler import Sampler
from tests.engine.sampling.drawn import Drawn, to_host

VOCAB_SIZE = 613


def sample(logits: torch.Tensor, *params: SamplingParams) -> Drawn:
    sampler = Sampler(logits.shape[1], len(params), (2,), "cpu")
    for row, row_params in enumerate(params):
        sampler.add(row, row_params, [1, 2, 3], [])
    return to_host(sampler.sample(logits, list(range(len(params)))))


def greedy(**knobs: object) -> SamplingParams:
    return SamplingParams(max_tokens=9, temperature=0.0, **knobs)  # type: ignore[arg-type]


def test_they_are_the_log_softmax_of_the_unprocessed_logits(generator: torch.Generator) -> None:
    logits = torch.randn((4, VOCAB_SIZE), generator=generator) * 4
    found = sample(
        logits,
        greedy(logprobs=5),
        greedy(),
        SamplingParams(max_tokens=9, seed=8, temperature=9.0, top_k=99, logprobs=20),
        greedy(logprobs=2, logit_bias={44: 100.0}, presence_penalty=1.0),
    )
    reference = logits.double().log_softmax(dim=-1)
    assert found.logprobs[1] is None
    for i, k in ((0, 5), (2, 20), (3, 2)):
        logprobs = found.logprobs[i]
        assert logprobs is not None
        best, best_ids = reference[i].topk(k)
        assert logprobs.top_ids == best_ids.tolist()
        assert logprobs.top_logprobs == pytest.approx(best.tolist(), abs=1e-5)
        chosen = reference[i, found.token_ids[i]].item()
        assert logprobs.chosen == pytest.approx(chosen, abs=1e-5)
    assert found.token_ids[3] == 44


def test_zero_means_only_the_chosen_token(generator: torch.Generator) -> None:
    logits = torch.randn((1, VOCAB_SIZE), generator=generator)
    (logprobs,) = sample(logits, greedy(logprobs=0)).logprobs
    assert logprobs is not None
    assert (logprobs.top_ids, logprobs.top_logprobs) == ([], [])
    assert logprobs.chosen == pytest.approx(logits.double().log_softmax(-1).max().item(), abs=1e-5)


def test_a_row_may_name_tokens_in_place_of_the_best(generator: torch.Generator) -> None:
    logits = torch.randn((3, VOCAB_SIZE), generator=generator)
    logits[1, 7] = -torch.inf
    named = (600, 7, 0)
    found = sample(
        logits,
        greedy(logprobs=5),
        greedy(logprobs=1, logprob_token_ids=named),
        greedy(logprobs=0, logprob_token_ids=(12,)),
    ).logprobs
    reference = logits.double().log_softmax(dim=-1)
    for line, ids in ((0, reference[0].topk(5).indices.tolist()), (1, [*named]), (2, [12])):
        logprobs = found[line]
        assert logprobs is not None
        assert logprobs.top_ids == ids
        assert logprobs.top_logprobs == pytest.approx(reference[line, ids].tolist(), abs=1e-5)


def test_equal_values_come_lower_id_first() -> None:
    logits = torch.tensor([[0.0, 3.0, -0.0, 3.0, 0.0, -5.0, 3.0, -5.0]])
    (logprobs,) = sample(logits, greedy(logprobs=8)).logprobs
    assert logprobs is not None
    assert logprobs.top_ids == [1, 3, 6, 0, 2, 4, 5, 7]


def test_the_best_tokens_are_those_of_a_stable_sort(generator: torch.Generator) -> None:
    coarse = torch.randint(-20, 20, (5, VOCAB_SIZE), generator=generator) / 4
    wide = torch.randn((5, VOCAB_SIZE), generator=generator) * 1e30
    for logits in (coarse, wide, -coarse.abs(), torch.zeros_like(coarse)):
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        for k in (0, 1, 17, VOCAB_SIZE):
            assert torch.equal(best_tokens(logits, k), order[:, :k])


def test_more_than_the_vocabulary_lists_the_vocabulary(generator: torch.Generator) -> None:
    logits = torch.randn((1, 7), generator=generator)
    (logprobs,) = sample(logits, greedy(logprobs=20)).logprobs
    assert logprobs is not None
    assert sorted(logprobs.top_ids) == list(range(7))


def test_tokens_the_model_rules_out_are_not_listed() -> None:
    logits = torch.full((1, 9), -torch.inf)
    logits[0, [3, 8]] = 0.0
    (logprobs,) = sample(logits, greedy(logprobs=5)).logprobs
    assert logprobs is not None
    assert logprobs.top_ids == [3, 8]
    assert [logprobs.chosen, *logprobs.top_logprobs] == pytest.approx([-0.6931472] * 3, abs=1e-6)


def test_the_greedy_token_is_listed_first_even_when_rounding_makes_values_equal() -> None:
    # One ulp apart as logits, equal once the large normaliser is subtracted.
    logits = torch.zeros((1, VOCAB_SIZE))
    logits[0, 4] = torch.nextafter(torch.tensor(0.0), torch.tensor(1.0))
    found = sample(logits, greedy(logprobs=2))
    assert found.token_ids == [4]
    assert found.logprobs[0] is not None
    assert found.logprobs[0].top_ids == [4, 0]
