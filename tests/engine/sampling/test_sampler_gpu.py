"""The sampler on a GPU: what it draws on a CPU, without ever waiting."""

import pytest
import torch

from engine.request import SamplingParams
from engine.sampling.sampled import SampledTensors
from engine.sampling.sampler import Sampler
from kernels.sampling.rows import greedy
from tests.engine.sampling.drawn import Drawn, to_host
from tests.harness.seeds import fresh_seed

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 32_003
EOS = (2, 5)
PROMPT = [1, 8, 8, 300, 17]
PARAMS = [
    SamplingParams(max_tokens=99, temperature=0.0),
    SamplingParams(max_tokens=99, seed=1),
    SamplingParams(max_tokens=99, seed=-(2**63), temperature=0.6, top_p=0.9),
    SamplingParams(max_tokens=99, seed=2**64 - 1, top_k=7, logprobs=3),
    SamplingParams(max_tokens=99, seed=2**40, min_p=0.1, repetition_penalty=1.3),
    SamplingParams(max_tokens=99, temperature=0.0, frequency_penalty=0.8, logprobs=0),
    SamplingParams(max_tokens=99, seed=5, temperature=2.0, presence_penalty=1.5, min_tokens=6),
    SamplingParams(max_tokens=99, temperature=0.0, logit_bias={3: 4.0, 8: -50.0}),
    SamplingParams(max_tokens=99, seed=6, temperature=0.6, top_k=20, top_p=0.95),
    SamplingParams(max_tokens=99, temperature=0.0, logprobs=20),
    SamplingParams(
        max_tokens=99, seed=9, temperature=1.2, top_k=60, top_p=0.97, min_p=0.01,
        repetition_penalty=0.9, frequency_penalty=0.2, logit_bias={1: 2.0}, min_tokens=20,
    ),
]  # fmt: skip
ROWS = list(range(len(PARAMS)))


def new_sampler(device: str) -> Sampler:
    sampler = Sampler(VOCAB_SIZE, 16, EOS, device)
    for row, params in enumerate(PARAMS):
        sampler.add(row, params, PROMPT, [])
    return sampler


def random_steps(num_steps: int, dtype: torch.dtype) -> torch.Tensor:
    seed = fresh_seed()
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn((num_steps, len(PARAMS), VOCAB_SIZE), generator=generator) * 2.5
    return steps.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_draws_what_a_cpu_draws(dtype: torch.dtype) -> None:
    steps = random_steps(12, dtype)
    on_cpu, on_gpu = new_sampler("cpu"), new_sampler("cuda")
    num_different = 0
    for logits in steps:
        expected = to_host(on_cpu.sample(logits, ROWS))
        found = to_host(on_gpu.sample(logits.cuda(), ROWS))
        assert found.is_finite == expected.is_finite
        num_different += sum(
            a != b for a, b in zip(found.token_ids, expected.token_ids, strict=True)
        )
        assert_close_logprobs(found, expected)
    # Two scores within a rounding error of each other may change places; nothing else may.
    assert num_different <= 1, f"{num_different} draws of {12 * len(PARAMS)}"


def assert_close_logprobs(found: Drawn, expected: Drawn) -> None:
    pairs = zip(found.logprobs, expected.logprobs, found.token_ids, expected.token_ids, strict=True)
    for ours, theirs, token_id, expected_id in pairs:
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None and token_id == expected_id:
            assert ours.chosen == pytest.approx(theirs.chosen, abs=1e-4)
            assert ours.top_ids == theirs.top_ids
            assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-4)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_verb_waits_for_the_gpu() -> None:
    """Twice the same rows and steps: the second time nothing is new, and waiting is an error."""
    steps = random_steps(4, torch.bfloat16).cuda()
    expected: list[Drawn] = []
    for mode in ("default", "error"):
        sampler = Sampler(VOCAB_SIZE, 16, EOS, "cuda")
        torch.cuda.synchronize()
        sampled: list[SampledTensors] = []
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for step, logits in enumerate(steps):
                for row, params in enumerate(PARAMS):
                    if step in (0, 2):
                        sampler.add(row, params, PROMPT, [7, 3])
                early = greedy(logits) if step % 2 else None
                sampled.append(sampler.sample(logits, ROWS, early))
                if step == 1:
                    for row in ROWS:
                        sampler.remove(row)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        drawn = [to_host(tensors) for tensors in sampled]
        expected = expected or drawn
        assert drawn == expected


def test_rows_may_change_while_earlier_steps_still_run() -> None:
    steps = random_steps(6, torch.bfloat16).cuda()
    calm, rushed = new_sampler("cuda"), new_sampler("cuda")
    expected = [to_host(calm.sample(logits, ROWS)) for logits in steps]
    busy = torch.randn((8192, 8192), device="cuda")
    for _ in range(20):
        busy = busy @ busy * 1e-4
    sampled = [rushed.sample(logits, ROWS) for logits in steps]
    for row in ROWS:  # the GPU has not come to the first step yet
        rushed.remove(row)
        rushed.add(row, PARAMS[-1 - row], [4] * 50, [9] * row)
    assert [to_host(tensors) for tensors in sampled] == expected


def test_bad_rows_beside_good_ones() -> None:
    logits = random_steps(1, torch.bfloat16)[0].cuda()
    expected = to_host(new_sampler("cuda").sample(logits, ROWS))
    for bad in (torch.nan, torch.inf, None):
        for victim in ROWS:
            broken = logits.clone()
            if bad is None:
                broken[victim] = -torch.inf
            else:
                broken[victim, [100, *EOS]] = bad
            found = to_host(new_sampler("cuda").sample(broken, ROWS))
            for row in ROWS:
                is_bad = row == victim
                assert found.is_finite[row] is not is_bad
                assert found.token_ids[row] == (0 if is_bad else expected.token_ids[row])
                assert found.logprobs[row] == (None if is_bad else expected.logprobs[row])
