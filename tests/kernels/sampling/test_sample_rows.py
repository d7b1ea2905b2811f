"""Argmax and draws of whole rows: Triton in the interpreter and on a GPU, and torch."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.sampling.choices import Draws, GreedyChoice
from kernels.sampling.noise import gumbel, noise_bits, noise_bits_reference
from kernels.sampling.rows import best_words, greedy, greedy_of_words
from tests.harness.chi_square import chi_square_limit
from tests.harness.gpus import gpu
from tests.kernels.cross_compile import compiled_for
from tests.kernels.interpreter import drawn, run_interpreted
from tests.kernels.sampling.sample_cases import (
    ALL_KNOBS,
    Knobs,
    build_draws,
    check_draws,
    fresh_generator,
    random_logits,
)

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
QWEN_VOCAB_SIZE = 151_936


def triton_greedy(logits: Tensor) -> GreedyChoice:
    from kernels.sampling.rows_triton import greedy as fused

    return fused(logits)


def triton_words(logits: Tensor, first_id: int) -> Tensor:
    from kernels.sampling.rows_triton import best_words as fused

    return fused(logits, first_id)


def triton_choice(words: Tensor) -> GreedyChoice:
    from kernels.sampling.rows_triton import greedy_of_words as fused

    return fused(words)


def triton_draw(logits: Tensor, draws: Draws) -> GreedyChoice:
    from kernels.sampling.rows_triton import draw

    return draw(logits, draws)


# ---- checks, on any device -----------------------------------------------------------------------


def check_greedy(device: str, vocab_size: int, dtype: torch.dtype) -> None:
    generator = fresh_generator()
    logits = random_logits(generator, 9, vocab_size, dtype)
    logits[4] = -0.0
    logits[4, 1::2] = 0.0  # equal to -0
    logits[5, vocab_size - 1] = torch.nan
    logits[6, vocab_size // 2] = torch.inf
    logits[7] = -torch.inf
    logits[8] = -torch.inf
    logits[8, vocab_size - 1] = torch.finfo(dtype).min
    wide = torch.full((9, 2 * vocab_size), torch.nan, dtype=dtype)
    wide[:, :vocab_size] = logits
    expected = greedy(logits)
    assert expected.is_finite.tolist() == [True] * 5 + [False] * 3 + [True]
    for given in (logits.to(device), wide.to(device)[:, :vocab_size], logits.to(device)[3:4]):
        found = triton_greedy(given)
        first = 3 if given.shape[0] == 1 else 0
        last = first + given.shape[0]
        assert found.token_ids.dtype == torch.int64
        assert found.is_finite.dtype == torch.bool
        assert found.token_ids.tolist() == expected.token_ids[first:last].tolist()
        assert found.is_finite.tolist() == expected.is_finite[first:last].tolist()
    assert triton_greedy(logits.to(device)[:0]).token_ids.shape == (0,)
    check_parts(device, logits, expected)


def check_parts(device: str, logits: Tensor, expected: GreedyChoice) -> None:
    """Of rows whose parts are on four ranks, one of which has no ids, and one a single id."""
    num_ids = logits.shape[1]
    starts = (0, num_ids // 3, num_ids // 3, num_ids - 1)
    parts = [
        logits[:, start:end].to(device)
        for start, end in zip(starts, (*starts[1:], num_ids), strict=True)
    ]
    by_twin = [best_words(part.cpu(), start) for part, start in zip(parts, starts, strict=True)]
    words = [
        triton_words(part, start) if part.shape[1] else best_words(part, start)
        for part, start in zip(parts, starts, strict=True)
    ]
    assert [one.tolist() for one in words] == [one.tolist() for one in by_twin]
    for found in (greedy_of_words(torch.stack(by_twin)), triton_choice(torch.stack(words))):
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.is_finite.tolist() == expected.is_finite.tolist()


def check_random_draws(device: str, vocab_size: int, dtype: torch.dtype, num_laps: int) -> None:
    """Every set of knobs on every kind of row."""
    generator = fresh_generator()
    for lap in range(num_laps):
        logits = random_logits(generator, 4, vocab_size, dtype)
        lines = [(p + lap) % 4 for p in range(len(ALL_KNOBS))]
        draws = build_draws(generator, lines, ALL_KNOBS, device)
        on_device = logits.to(device)
        found = triton_draw(on_device, draws)
        assert torch.equal(on_device.cpu(), logits)
        assert found.is_finite.all()
        check_draws(logits, draws, found.token_ids.tolist())


def check_batch_independence(device: str, vocab_size: int, dtype: torch.dtype) -> None:
    generator = fresh_generator()
    num_draws = len(ALL_KNOBS)
    logits = random_logits(generator, num_draws, vocab_size, dtype).to(device)
    together = build_draws(generator, list(range(num_draws)), ALL_KNOBS, device)
    expected = triton_draw(logits, together).token_ids.tolist()
    for p in torch.randperm(num_draws, generator=generator)[:5].tolist():
        fields = {
            field.name: getattr(together, field.name)[p : p + 1].clone()
            for field in dataclasses.fields(Draws)
        }
        assert triton_draw(logits, Draws(**fields)).token_ids.tolist() == [expected[p]]
        fields["lines"] = torch.zeros_like(fields["lines"])
        alone = triton_draw(logits[p : p + 1].clone(), Draws(**fields))
        assert alone.token_ids.tolist() == [expected[p]]


def check_edges(device: str, all_knobs: list[Knobs]) -> None:
    """Ties, a single possible token, and bad rows beside good ones."""
    generator = fresh_generator()
    vocab_size = 9001
    logits = torch.zeros((7, vocab_size))  # 0: everything ties
    logits[1, 5000:] = -1.0  # k = 1 keeps 5000 equals
    logits[2] = -torch.inf
    logits[2, 8999] = -3.0
    logits[3, 17] = torch.nan
    logits[4, 17] = torch.inf
    logits[5] = -torch.inf
    logits[6] = torch.randn(vocab_size, generator=generator)
    for knobs in all_knobs:
        draws = build_draws(generator, list(range(7)), [knobs] * 7, device)
        found = triton_draw(logits.to(device), draws)
        assert found.is_finite.tolist() == [True, True, True, False, False, False, True]
        tokens = found.token_ids.tolist()
        assert tokens[2:6] == [8999, 0, 0, 0]
        sound = [0, 1, 2, 6]
        picked = {
            field.name: getattr(draws, field.name)[torch.tensor(sound, device=device)]
            for field in dataclasses.fields(Draws)
        }
        check_draws(logits, Draws(**picked), [tokens[line] for line in sound])


def check_distribution(device: str, num_draws: int) -> None:
    """Chi-square of many draws of one row against its float64 softmax, cut and whole."""
    generator = fresh_generator()
    logits = torch.randn(41, generator=generator) * 1.5
    for knobs in (Knobs(temperature=1.4), Knobs(top_k=12), Knobs(top_p=0.8, temperature=0.9)):
        draws = build_draws(generator, [0] * num_draws, [knobs] * num_draws, device)
        tokens = triton_draw(logits.unsqueeze(0).to(device), draws).token_ids.cpu()
        probs = (logits.double() / knobs.temperature).softmax(0)
        order = probs.argsort(descending=True)
        if knobs.top_k:
            probs[order[knobs.top_k :]] = 0
        before = probs[order].cumsum(0) - probs[order]
        probs[order[before >= knobs.top_p]] = 0
        observed = torch.bincount(tokens, minlength=41).double()
        assert observed[probs == 0].sum() == 0
        expected = probs / probs.sum() * num_draws
        # Rare tokens share a cell: the statistic needs about five expected in each.
        is_common = expected > 8
        cells = torch.cat([expected[is_common], expected[~is_common].sum().clamp(min=1e-9)[None]])
        counts = torch.cat([observed[is_common], observed[~is_common].sum()[None]])
        statistic = float(((counts - cells) ** 2 / cells)[cells > 2].sum())
        assert statistic < chi_square_limit(int(is_common.sum())), knobs


def check_noise(device: str) -> None:
    """The bits exactly, their logarithms nearly."""
    generator = fresh_generator()
    seeds = torch.randint(-(2**63), 2**63 - 1, (9,), generator=generator)
    seeds[:4] = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    indices = torch.randint(0, 2**32, (9,), generator=generator)
    indices[3:6] = torch.tensor([0, 1, 2**32 - 1])
    tokens = torch.cat([torch.arange(2000), torch.tensor([151_935, 2**31 - 1])])
    bits, numbers = triton_noise(seeds.to(device), indices.to(device), tokens.to(device))
    assert torch.equal(bits.cpu(), noise_bits(seeds, indices, tokens))
    assert bits[3, 2000].item() == noise_bits_reference(-(2**63), 0, 151_935)
    assert bits[0, 2001].item() == noise_bits_reference(0, int(indices[0]), 2**31 - 1)
    torch.testing.assert_close(numbers.cpu(), gumbel(seeds, indices, tokens), rtol=1e-6, atol=1e-6)


def triton_noise(seeds: Tensor, indices: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What the draw computes inline: int64 and fp32 [S, V]."""
    import triton

    from tests.kernels.sampling.sample_noise_kernel import noise_kernel

    shape = (seeds.shape[0], tokens.shape[0])
    bits = torch.full(shape, -1, dtype=torch.int64, device=seeds.device)
    numbers = torch.full(shape, torch.nan, device=seeds.device)
    grid = (shape[0], triton.cdiv(shape[1], 1024))
    noise_kernel[grid](seeds, indices, tokens, bits, numbers, shape[1], BLOCK=1024)
    return bits, numbers


# ---- in the interpreter --------------------------------------------------------------------------


CHECKS_OF_DRAWS: list[Callable[[], None]] = [
    *(
        partial(check_edges, "cpu", [knobs])
        for knobs in (Knobs(), Knobs(top_k=1), Knobs(top_k=3, top_p=0.9, min_p=0.1))
    ),
    partial(check_random_draws, "cpu", 1031, torch.float32, 1),
    # More segments than are listed at first.
    partial(check_random_draws, "cpu", 20_011, torch.float16, 1),
    partial(check_random_draws, "cpu", 20_011, torch.float32, 1),
    partial(check_batch_independence, "cpu", 9001, torch.float32),
]


def interpreted() -> None:
    """Called in a process of its own, where Triton interprets; some checks of draws, drawn anew."""
    _interpreted(2)


def all_interpreted() -> None:
    _interpreted(len(CHECKS_OF_DRAWS))


def _interpreted(number: int) -> None:
    check_noise("cpu")
    for vocab_size in (2, 1031, 4097):
        check_greedy("cpu", vocab_size, torch.float32)
    check_greedy("cpu", 1031, torch.float16)
    for check in drawn(CHECKS_OF_DRAWS, number):
        check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "checks", ["interpreted", pytest.param("all_interpreted", marks=pytest.mark.nightly)]
)
def test_the_kernels_draw_what_float64_allows(checks: str) -> None:
    run_interpreted(f"tests.kernels.sampling.test_sample_rows:{checks}")


# ---- torch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_torch_argmax_names_the_first_best_and_bad_rows(dtype: torch.dtype) -> None:
    logits = torch.zeros((5, 331), dtype=dtype)
    logits[0, [330, 40, 41]] = 2.5
    logits[1, 7] = torch.nan
    logits[2, 7] = torch.inf
    logits[3] = -torch.inf
    logits[4] = -torch.inf
    logits[4, 17] = -1e4
    found = greedy(logits)
    assert found.token_ids.tolist() == [40, 0, 0, 0, 17]
    assert found.is_finite.tolist() == [True, False, False, False, True]


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_noise_on_a_gpu() -> None:
    check_noise("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_argmax_on_a_gpu(dtype: torch.dtype) -> None:
    for vocab_size in (2, 331, 4097, QWEN_VOCAB_SIZE):
        check_greedy("cuda", vocab_size, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("vocab_size", [331, 20_011, QWEN_VOCAB_SIZE])
def test_draws_on_a_gpu(vocab_size: int, dtype: torch.dtype) -> None:
    check_random_draws("cuda", vocab_size, dtype, 4)
    check_batch_independence("cuda", vocab_size, dtype)


@pytest.mark.gpu
def test_edges_on_a_gpu() -> None:
    check_edges("cuda", ALL_KNOBS)


@pytest.mark.gpu
def test_draws_on_a_gpu_follow_the_softmax() -> None:
    check_distribution("cuda", 60_000)


@pytest.mark.gpu
def test_an_argmax_in_a_cuda_graph_follows_its_logits() -> None:
    generator = fresh_generator()
    logits = random_logits(generator, 8, QWEN_VOCAB_SIZE, torch.bfloat16).cuda()
    triton_greedy(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choice = triton_greedy(logits)
    for _ in range(3):
        fresh = random_logits(generator, 8, QWEN_VOCAB_SIZE, torch.bfloat16)
        logits.copy_(fresh)
        graph.replay()
        assert choice.token_ids.tolist() == greedy(fresh).token_ids.tolist()


def test_the_best_of_several_ranks_compiles_once_for_all_numbers_of_rows() -> None:
    """A step with another number of them compiles nothing while requests wait."""
    from kernels.sampling import rows_triton

    kept: list[Any] = []
    with compiled_for(gpu("H200"), rows_triton, kept=kept):
        for num_rows in (1, 3, 16):
            rows_triton.greedy_of_words(torch.zeros((4, num_rows), dtype=torch.int64))
    assert len(kept) == 3
    assert len({made.hash for made in kept}) == 1
