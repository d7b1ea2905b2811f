"""Rows of a batch: greedy and drawn together, invariance, resuming, bad logits, statistics."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.request import SamplingParams
from engine.sampling.sampler import Sampler
from kernels.sampling.rows import greedy
from tests.engine.sampling.drawn import Drawn, sample, to_host
from tests.harness.chi_square import chi_square_limit

VOCAB_SIZE = 331
EOS = (2, 5)

# Every knob, alone and mixed, greedy and drawn.
MANY_PARAMS = [
    SamplingParams(max_tokens=99, temperature=0.0),
    SamplingParams(max_tokens=99, seed=1),
    SamplingParams(max_tokens=99, seed=-(2**63), temperature=0.6, top_p=0.9),
    SamplingParams(max_tokens=99, seed=2**64 - 1, top_k=7, logprobs=3),
    SamplingParams(max_tokens=99, seed=2**40, min_p=0.1, repetition_penalty=1.3),
    SamplingParams(max_tokens=99, temperature=0.0, frequency_penalty=0.8, logprobs=0),
    SamplingParams(max_tokens=99, seed=5, temperature=2.0, presence_penalty=1.5, min_tokens=6),
    SamplingParams(max_tokens=99, temperature=0.0, logit_bias={3: 4.0, 8: -50.0}),
    SamplingParams(
        max_tokens=99, seed=9, temperature=1.2, top_k=60, top_p=0.97, min_p=0.01,
        repetition_penalty=0.9, frequency_penalty=0.2, logit_bias={1: 2.0}, min_tokens=20,
    ),
]  # fmt: skip
PROMPT = [1, 8, 8, 300, 17]


def new_sampler(params: list[SamplingParams], max_rows: int = 16) -> Sampler:
    """Row i of the sampler has params[i]."""
    sampler = Sampler(VOCAB_SIZE, max_rows, EOS, "cpu")
    for row, row_params in enumerate(params):
        sampler.add(row, row_params, PROMPT, [])
    return sampler


def step_logits(generator: torch.Generator, num_steps: int, num_rows: int) -> Tensor:
    return torch.randn((num_steps, num_rows, VOCAB_SIZE), generator=generator) * 2


def test_greedy_is_the_first_of_the_best() -> None:
    logits = torch.zeros((3, VOCAB_SIZE))
    logits[1, [330, 40, 41]] = 2.5
    logits[2] = -torch.inf
    logits[2, 17] = -1e30
    plain = SamplingParams(max_tokens=9, temperature=0.0)
    biased = SamplingParams(max_tokens=9, temperature=0.0, logit_bias={9: -1.0})
    for params in (plain, biased):
        assert sample(new_sampler([params] * 3), logits, [0, 1, 2]).token_ids == [0, 40, 17]


def test_a_row_draws_the_same_alone_and_in_any_batch_in_any_order(
    generator: torch.Generator,
) -> None:
    num_rows, num_steps = len(MANY_PARAMS), 12
    logits = step_logits(generator, num_steps, num_rows)
    alone = [[] for _ in MANY_PARAMS]  # type: list[list[tuple[int, object]]]
    for row in range(num_rows):
        sampler = new_sampler(MANY_PARAMS)
        for step in range(num_steps):
            drawn = sample(sampler, logits[step, row : row + 1], [row])
            alone[row].append((drawn.token_ids[0], drawn.logprobs[0]))
    together = new_sampler(MANY_PARAMS)
    num_drawn = [0] * num_rows
    while min(num_drawn) < num_steps:
        order = torch.randperm(num_rows, generator=generator).tolist()
        size = int(torch.randint(1, num_rows + 1, (1,), generator=generator))
        rows = [row for row in order[:size] if num_drawn[row] < num_steps]
        lines = [logits[num_drawn[row], row] for row in rows]
        drawn = sample(together, torch.stack(lines) if lines else logits[0, :0], rows)
        for row, token_id, logprobs in zip(rows, drawn.token_ids, drawn.logprobs, strict=True):
            assert (token_id, logprobs) == alone[row][num_drawn[row]], (row, num_drawn[row])
            num_drawn[row] += 1


def test_another_sampler_goes_on_exactly_where_the_first_left_off(
    generator: torch.Generator,
) -> None:
    num_rows, num_steps, moved_after = len(MANY_PARAMS), 14, 5
    logits = step_logits(generator, num_steps, num_rows)
    rows = list(range(num_rows))
    stays = new_sampler(MANY_PARAMS)
    tokens = [sample(stays, logits[step], rows).token_ids for step in range(num_steps)]
    moved_to = [(row * 4 + 3) % 11 for row in rows]
    receives = Sampler(VOCAB_SIZE, 16, EOS, "cpu")
    for row, params in enumerate(MANY_PARAMS):
        output_ids = [tokens[step][row] for step in range(moved_after)]
        receives.add(moved_to[row], params, PROMPT, output_ids)
    for step in range(moved_after, num_steps):
        assert sample(receives, logits[step], moved_to).token_ids == tokens[step], step


def test_a_row_given_to_another_request_starts_afresh(generator: torch.Generator) -> None:
    logits = step_logits(generator, 6, len(MANY_PARAMS))
    rows = list(range(len(MANY_PARAMS)))
    fresh = new_sampler(MANY_PARAMS)
    expected = [sample(fresh, logits[step], rows) for step in range(6)]
    used = new_sampler([*MANY_PARAMS[1:], MANY_PARAMS[0]])
    for step in range(6):
        sample(used, logits[step], rows)
    for row in rows:
        used.remove(row)
    for row in rows[::-1]:
        used.add(row, MANY_PARAMS[row], PROMPT, [])
    assert [sample(used, logits[step], rows) for step in range(6)] == expected


@pytest.mark.parametrize("bad", ["nan", "inf", "all -inf"])
def test_a_bad_row_is_reported_and_disturbs_nobody(bad: str, generator: torch.Generator) -> None:
    rows = list(range(len(MANY_PARAMS)))
    logits = step_logits(generator, 3, len(rows))
    clean = new_sampler(MANY_PARAMS)
    expected = [sample(clean, logits[step], rows) for step in range(3)]
    for victim in rows:
        hurt = new_sampler(MANY_PARAMS)
        assert sample(hurt, logits[0], rows) == expected[0]
        broken = logits[1].clone()
        if bad == "all -inf":
            broken[victim] = -torch.inf
        else:
            broken[victim, [100, *EOS]] = float(bad)  # eos may be banned, which hides nothing
        assert lines_of(sample(hurt, broken, rows), [victim]) == Drawn(
            token_ids=[0], logprobs=[None], is_finite=[False]
        )
        others = [row for row in rows if row != victim]
        again = new_sampler(MANY_PARAMS)
        sample(again, logits[0], rows)
        found = sample(again, broken, rows)
        assert lines_of(found, others) == lines_of(expected[1], others)
        assert sample(again, logits[2, others], others) == lines_of(expected[2], others)


def lines_of(drawn: Drawn, lines: list[int]) -> Drawn:
    return Drawn(
        token_ids=[drawn.token_ids[i] for i in lines],
        logprobs=[drawn.logprobs[i] for i in lines],
        is_finite=[drawn.is_finite[i] for i in lines],
    )


def test_some_minus_infinities_are_fine(generator: torch.Generator) -> None:
    logits = step_logits(generator, 1, len(MANY_PARAMS))[0]
    logits[:, 50:] = -torch.inf
    drawn = sample(new_sampler(MANY_PARAMS), logits, list(range(len(MANY_PARAMS))))
    assert all(drawn.is_finite)
    assert max(drawn.token_ids) < 50


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_every_token_is_banned_draws_nothing(temperature: float) -> None:
    params = SamplingParams(max_tokens=9, temperature=temperature, min_tokens=1, top_p=0.5)
    logits = torch.full((2, VOCAB_SIZE), -torch.inf)
    logits[:, EOS] = 0.0
    logits[1, 7] = 0.0
    sampler = new_sampler([params, params])
    found = sample(sampler, logits, [0, 1])
    assert found.is_finite == [False, True]
    assert found.token_ids == [0, 7]


def test_logits_are_left_as_they_are(generator: torch.Generator) -> None:
    logits = step_logits(generator, 1, len(MANY_PARAMS))[0]
    before = logits.clone()
    sample(new_sampler(MANY_PARAMS), logits, list(range(len(MANY_PARAMS))))
    sample(new_sampler(MANY_PARAMS[8:]), logits[8:], [0])
    assert torch.equal(logits, before)


def test_an_empty_batch_draws_nothing() -> None:
    found = sample(new_sampler(MANY_PARAMS), torch.zeros((0, VOCAB_SIZE)), [])
    assert found == Drawn(token_ids=[], logprobs=[], is_finite=[])


def test_it_works_inside_and_outside_of_inference_mode(generator: torch.Generator) -> None:
    logits = step_logits(generator, 3, len(MANY_PARAMS))
    rows = list(range(len(MANY_PARAMS)))
    expected_from, sampler = new_sampler(MANY_PARAMS), None
    with torch.inference_mode():
        sampler = new_sampler(MANY_PARAMS)
        assert sample(sampler, logits[0] * 1.0, rows) == sample(expected_from, logits[0], rows)
    assert sample(sampler, logits[1], rows) == sample(expected_from, logits[1], rows)
    with torch.inference_mode():
        assert sample(sampler, logits[2], rows) == sample(expected_from, logits[2], rows)


def test_misuse_is_noticed() -> None:
    sampler = new_sampler(MANY_PARAMS[:2], max_rows=3)
    logits = torch.zeros((2, VOCAB_SIZE))
    with pytest.raises(AssertionError, match="twice"):
        sample(sampler, logits, [1, 1])
    with pytest.raises(AssertionError, match="never added"):
        sample(sampler, logits, [0, 2])
    with pytest.raises(AssertionError, match="float64"):
        sample(sampler, logits.double(), [0, 1])
    with pytest.raises(AssertionError, match="logits"):
        sample(sampler, logits, [0])
    with pytest.raises(AssertionError, match="in use"):
        sampler.add(1, MANY_PARAMS[0], PROMPT, [])
    with pytest.raises(AssertionError, match="row 3 of 3"):
        sampler.add(3, MANY_PARAMS[0], PROMPT, [])


class CountingOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of the tensor operations run while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_plain_greedy_rows_cost_one_maximum_whatever_other_rows_use() -> None:
    """Absent features must not run a single tensor operation."""
    plain = SamplingParams(max_tokens=9, temperature=0.0)
    sampler = new_sampler([*MANY_PARAMS, *[plain] * 4])
    for row in (6, 8):  # leaving no trace of what the row was used for
        sampler.remove(row)
        sampler.add(row, plain, PROMPT, [])
    logits = torch.zeros((4, VOCAB_SIZE))
    with CountingOps() as ops:
        sampler.sample(logits, [9, 12, 6, 8])
    assert ops.names.count("aten.max.dim") == 1
    # The others are the finiteness test over [S], however its parts are named.
    assert len(ops.names) <= 6, ops.names


def test_a_choice_made_early_is_used_and_left_as_it_is(generator: torch.Generator) -> None:
    logits = step_logits(generator, 1, len(MANY_PARAMS))[0]
    logits[2] = torch.nan
    rows = list(range(len(MANY_PARAMS)))
    early = greedy(logits)
    before = (early.token_ids.clone(), early.is_finite.clone())
    given = to_host(new_sampler(MANY_PARAMS).sample(logits, rows, early))
    assert given == sample(new_sampler(MANY_PARAMS), logits, rows)
    assert torch.equal(early.token_ids, before[0])
    assert torch.equal(early.is_finite, before[1])
    sampler, first = new_sampler(MANY_PARAMS), logits[:1]
    with CountingOps() as ops:
        sampler.sample(first, [0], early)  # a plain row
    assert ops.names == []


def test_plain_rows_are_those_that_need_an_argmax_only() -> None:
    sampler = new_sampler(MANY_PARAMS)
    assert [row for row in range(len(MANY_PARAMS)) if sampler.is_plain([row])] == [0]
    assert not sampler.is_plain([0, 5])
    sampler.remove(5)
    sampler.add(5, MANY_PARAMS[0], PROMPT, [])
    assert sampler.is_plain([5, 0])
    assert sampler.is_plain([])


def test_half_precision_logits_are_drawn_as_their_fp32_values(generator: torch.Generator) -> None:
    rows = list(range(len(MANY_PARAMS)))
    for dtype in (torch.bfloat16, torch.float16):
        logits = step_logits(generator, 3, len(rows)).to(dtype)
        half, single = new_sampler(MANY_PARAMS), new_sampler(MANY_PARAMS)
        for step in range(3):
            expected = sample(single, logits[step].float(), rows)
            assert sample(half, logits[step], rows) == expected


def test_draws_over_rows_and_steps_follow_the_softmax() -> None:
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
    kept = logits.topk(40).indices
    probs = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
    probs[kept] = (logits[kept].double() / 1.4).softmax(dim=-1)
    num_rows, num_steps = 64, 250
    params = [
        SamplingParams(max_tokens=999, seed=1000 + i, temperature=1.4, top_k=40)
        for i in range(num_rows)
    ]
    sampler = new_sampler(params, max_rows=num_rows)
    batch, rows = logits.expand(num_rows, -1), list(range(num_rows))
    drawn = [sample(sampler, batch, rows).token_ids for _ in range(num_steps)]
    observed = torch.bincount(torch.tensor(drawn).flatten(), minlength=VOCAB_SIZE).double()
    assert observed[probs == 0].sum() == 0
    expected = probs[kept] * num_rows * num_steps
    assert expected.min() > 5, "cells too small for the statistic"
    statistic = float(((observed[kept] - expected) ** 2 / expected).sum())
    assert statistic < chi_square_limit(39)


def test_seeds_make_different_answers_and_the_same_seed_the_same(
    generator: torch.Generator,
) -> None:
    params = [SamplingParams(max_tokens=99, seed=seed) for seed in (3, 4, 3, 3 + 2**32)]
    sampler = new_sampler(params)
    lines = step_logits(generator, 30, 1).expand(30, 4, -1)
    answers = zip(*[sample(sampler, line, [0, 1, 2, 3]).token_ids for line in lines], strict=True)
    first, second, same, high_bits = (list(answer) for answer in answers)
    assert first == same
    assert first != second
    assert first != high_bits
