"""Bias, penalties and the min_tokens ban, against transformers and float64 formulae."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from engine.request import SamplingParams
from engine.sampling.bias import LogitBias, MinTokens
from engine.sampling.penalties import OccurrencePenalty, RepetitionPenalty, TokenCounts
from engine.sampling.sampler import Sampler
from engine.sampling.staging import Staging
from tests.engine.sampling.drawn import sample

VOCAB_SIZE = 517
ON_CPU = Staging(torch.device("cpu"))


def greedy(**knobs: object) -> SamplingParams:
    return SamplingParams(max_tokens=99, temperature=0.0, **knobs)  # type: ignore[arg-type]


def random_ids(generator: torch.Generator, num_tokens: int, below: int = 40) -> list[int]:
    ids: list[int] = torch.randint(0, below, (num_tokens,), generator=generator).tolist()
    return ids


@pytest.mark.parametrize("penalty", [0.3, 0.9, 1.3, 2.0])
def test_repetition_penalty_is_transformers_over_prompt_and_output(
    penalty: float, generator: torch.Generator
) -> None:
    feature = RepetitionPenalty(VOCAB_SIZE, 4, ON_CPU)
    prompt_ids, output_ids = random_ids(generator, 23), random_ids(generator, 7, VOCAB_SIZE)
    feature.add(2, greedy(repetition_penalty=penalty), prompt_ids, output_ids)
    feature.observe([2, 0], torch.tensor([499, 3]))  # row 0 is not ours
    logits = torch.randn((3, VOCAB_SIZE), generator=generator)
    logits[1, prompt_ids[0]] = -torch.inf
    shaped = logits.clone()
    feature.apply(shaped, [3, 2, 0])
    seen = torch.tensor([prompt_ids + output_ids + [499]])
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(seen, logits[1:2].clone())
    torch.testing.assert_close(shaped[1:2], theirs, rtol=2e-7, atol=0)
    assert torch.equal(shaped[[0, 2]], logits[[0, 2]])


def test_frequency_and_presence_penalties_follow_openais_formula_over_output_only(
    generator: torch.Generator,
) -> None:
    feature = OccurrencePenalty(VOCAB_SIZE, 4, ON_CPU)
    knobs = [(0.7, 0.0), (0.0, -1.1), (-2.0, 2.0)]
    outputs = [random_ids(generator, n) for n in (0, 31, 90)]
    for row, ((frequency, presence), output_ids) in enumerate(zip(knobs, outputs, strict=True)):
        params = greedy(frequency_penalty=frequency, presence_penalty=presence)
        feature.add(row, params, random_ids(generator, 50), output_ids)
    for token_id in (8, 8, 516):
        feature.observe([2, 0, 1], torch.tensor([token_id] * 3))
        for output_ids in outputs:
            output_ids.append(token_id)
    logits = torch.randn((3, VOCAB_SIZE), generator=generator)
    shaped = logits.clone()
    feature.apply(shaped, [1, 2, 0])
    for line, row in enumerate([1, 2, 0]):
        counts = torch.bincount(torch.tensor(outputs[row]), minlength=VOCAB_SIZE).double()
        frequency, presence = knobs[row]
        expected = logits[line].double() - frequency * counts - presence * (counts > 0)
        torch.testing.assert_close(shaped[line].double(), expected, rtol=1e-6, atol=1e-5)


def test_a_removed_rows_table_is_used_again_and_starts_empty() -> None:
    counts = TokenCounts(VOCAB_SIZE, 8, ON_CPU)
    for lap in range(10):
        for row in (5, 1, 7):
            counts.add(row, [lap, lap, row])
        counted = counts.gather(torch.from_numpy(counts.slots_of([1])))
        assert counted.nonzero()[:, 1].tolist() == sorted({lap, 1})
        for row in (1, 5, 7):
            counts.remove(row)
    assert counts.num_slots == 4
    assert 5 not in counts


def test_no_table_exists_until_a_row_needs_one_and_it_never_exceeds_max_rows() -> None:
    counts = TokenCounts(VOCAB_SIZE, 5, ON_CPU)
    assert counts.num_slots == 0
    for row in range(5):
        counts.add(row, [])
    assert counts.num_slots == 5
    with pytest.raises(AssertionError, match="more than 5 rows"):
        counts.add(5, [])


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(AssertionError, match=f"token id {VOCAB_SIZE}"):
        TokenCounts(VOCAB_SIZE, 2, ON_CPU).add(0, [1, VOCAB_SIZE])
    with pytest.raises(AssertionError, match="logit_bias"):
        LogitBias(VOCAB_SIZE, ON_CPU).add(0, greedy(logit_bias={VOCAB_SIZE: 1.0}), [], [])
    with pytest.raises(AssertionError, match="eos ids"):
        Sampler(VOCAB_SIZE, 2, (VOCAB_SIZE,), "cpu")


def test_logit_bias_is_added_to_the_named_tokens_only(generator: torch.Generator) -> None:
    feature = LogitBias(VOCAB_SIZE, ON_CPU)
    feature.add(3, greedy(logit_bias={0: 1.5, 516: -2.25, 40: 100.0}), [], [])
    logits = torch.randn((2, VOCAB_SIZE), generator=generator)
    shaped = logits.clone()
    feature.apply(shaped, [3, 1])
    expected = logits.clone()
    expected[0, 0] += 1.5
    expected[0, 516] -= 2.25
    expected[0, 40] += 100.0
    assert torch.equal(shaped, expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_100_forces_and_of_minus_100_excludes(
    temperature: float, generator: torch.Generator
) -> None:
    sampler = Sampler(VOCAB_SIZE, 2, (), "cpu")
    logits = torch.randn((2, VOCAB_SIZE), generator=generator) * 3
    best = int(logits[1].argmax())
    for row, bias in enumerate([{77: 100.0}, {best: -100.0}]):
        params = SamplingParams(max_tokens=9, temperature=temperature, logit_bias=bias, seed=5)
        sampler.add(row, params, [], [])
    for _ in range(20):
        forced, excluded = sample(sampler, logits, [0, 1]).token_ids
        assert forced == 77
        assert excluded != best


def test_bias_comes_before_the_penalties() -> None:
    sampler = Sampler(4, 1, (), "cpu")
    # Biased first: 6 / 3 = 2 loses to 3. Penalised first: 1 / 3 + 5 would win.
    params = greedy(logit_bias={0: 5.0}, repetition_penalty=3.0)
    sampler.add(0, params, [0], [])
    assert sample(sampler, torch.tensor([[1.0, 3.0, 0.0, 0.0]]), [0]).token_ids == [1]


def eos_loving_logits(num_rows: int) -> torch.Tensor:
    """Best tokens in order: 2 (eos), 3 (eos), 9, 4."""
    logits = torch.zeros((num_rows, VOCAB_SIZE))
    logits[:, [2, 3, 9, 4]] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    return logits


def test_eos_and_stop_ids_are_banned_for_exactly_min_tokens() -> None:
    sampler = Sampler(VOCAB_SIZE, 4, (2, 3), "cpu")
    sampler.add(0, greedy(min_tokens=3), [1], [])
    sampler.add(1, greedy(min_tokens=3, stop_token_ids=(9, 10**9, -1)), [1], [])
    sampler.add(2, greedy(min_tokens=3), [1], [7, 7])  # two came from elsewhere
    sampler.add(3, greedy(min_tokens=3), [1], [7, 7, 7, 7])
    drawn = [sample(sampler, eos_loving_logits(4), [0, 1, 2, 3]).token_ids for _ in range(5)]
    assert [list(tokens) for tokens in zip(*drawn, strict=True)] == [
        [9, 9, 9, 2, 2],
        [4, 4, 4, 2, 2],
        [9, 2, 2, 2, 2],
        [2, 2, 2, 2, 2],
    ]


def test_ignore_eos_leaves_eos_possible_but_not_the_clients_own_stop_ids() -> None:
    sampler = Sampler(VOCAB_SIZE, 2, (2, 3), "cpu")
    sampler.add(0, greedy(min_tokens=9, ignore_eos=True), [1], [])
    sampler.add(1, greedy(min_tokens=1, ignore_eos=True, stop_token_ids=(2,)), [1], [])
    assert sample(sampler, eos_loving_logits(2), [0, 1]).token_ids == [2, 3]
    assert sample(sampler, eos_loving_logits(2), [0, 1]).token_ids == [2, 2]


def test_the_ban_lets_a_row_go_once_it_is_over() -> None:
    feature = MinTokens(VOCAB_SIZE, (2,), ON_CPU)
    assert feature.add(0, greedy(min_tokens=1), [], [])
    feature.observe([0], torch.tensor([9]))
    logits = eos_loving_logits(1)
    feature.apply(logits, [0])
    assert torch.equal(logits, eos_loving_logits(1))
    feature.remove(0)  # still allowed


def test_penalties_see_the_tokens_drawn_here() -> None:
    sampler = Sampler(VOCAB_SIZE, 1, (), "cpu")
    sampler.add(0, greedy(frequency_penalty=1.5), [1], [])
    logits = torch.zeros((1, VOCAB_SIZE))
    logits[0, [5, 6]] = torch.tensor([10.0, 9.0])
    drawn = [sample(sampler, logits, [0]).token_ids[0] for _ in range(4)]
    # 10, 9 | 8.5, 9 | 8.5, 7.5 | 7, 7.5
    assert drawn == [5, 6, 5, 6]


def test_tokens_appended_to_several_rows_are_as_if_they_had_entered_with_them(
    generator: torch.Generator,
) -> None:
    hot = {"temperature": 0.8, "seed": 5, "max_tokens": 99}
    rows_params = {
        0: SamplingParams(**hot, frequency_penalty=1.5),  # type: ignore[arg-type]
        1: greedy(repetition_penalty=1.7, presence_penalty=0.6),
        2: SamplingParams(**hot),  # type: ignore[arg-type]
        3: greedy(),
        4: greedy(min_tokens=3),
    }
    appended = {4: random_ids(generator, 1), 0: random_ids(generator, 4), 3: [2, 2, 3]}
    appended |= {1: random_ids(generator, 2), 2: random_ids(generator, 4)}
    prompts = {row: random_ids(generator, 9) for row in rows_params}
    followed, entered = (Sampler(VOCAB_SIZE, 5, (0,), "cpu") for _ in range(2))
    for row, params in rows_params.items():
        followed.add(row, params, prompts[row], [])
        entered.add(row, params, prompts[row], appended[row])
    followed.append(list(appended.items()))
    for _ in range(3):
        logits = torch.randn((5, VOCAB_SIZE), generator=generator)
        logits[:, :40] += 3.0  # so that penalties decide
        rows = [2, 0, 4, 1, 3]
        assert sample(followed, logits.clone(), rows) == sample(entered, logits.clone(), rows)
