"""The counter hash against its plain-Python twin, golden values, and fixed-seed statistics."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kernels.sampling.noise import (
    gumbel,
    noise_bits,
    noise_bits_reference,
    uniform,
    uniform_reference,
    unit_interval,
    unit_interval_reference,
)
from tests.harness.chi_square import chi_square_limit
from tests.harness.seeds import fresh_seed

Words = npt.NDArray[np.uint32]

# Never to be changed: every seeded request's answer hangs on them.
GOLDEN_BITS = {
    (0, 0, 0): 0xDAF3778A,
    (0, 0, 1): 0xF61DD247,
    (0, 1, 0): 0x2CBC4022,
    (1, 0, 0): 0x4D785E6A,
    (42, 0, 100): 0x16A441CB,
    (-1, 7, 4095): 0x20918267,
    (2**63 - 1, 4096, 151935): 0xD60F3492,
    (-(2**63), 2**32 - 1, 2**32 - 1): 0x51EE4D31,
    (0x0123456789ABCDEF, 1000, 50000): 0xE35C43B9,
}
GOLDEN_U = {
    (0, 0, 0): "0x1.b5e6f00000000p-1",
    (0, 1, 0): "0x1.65e2020000000p-3",
    (42, 0, 100): "0x1.6a441c0000000p-4",
}
# fp32(bits) + 0.5 rounds in every way somewhere among these.
EDGE_WORDS = [0, 1, 2, 2**23 - 1, 2**23, 2**24 - 1, 2**24, 2**24 + 1, 2**25 + 3, 2**31, 2**32 - 257]
EDGE_WORDS += [2**32 - 256, 2**32 - 129, 2**32 - 128, 2**32 - 2, 2**32 - 1]


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def assert_pairs_fill_the_square_evenly(left: torch.Tensor, right: torch.Tensor) -> None:
    """Chi-square of 16 x 16 cells: fails for any dependence that moves mass between them."""
    cells = (left * 16).long() * 16 + (right * 16).long()
    observed = torch.bincount(cells.flatten(), minlength=256).double()
    expected = cells.numel() / 256
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert statistic < chi_square_limit(255)


@pytest.mark.parametrize(("key", "bits"), GOLDEN_BITS.items())
def test_the_hash_is_what_it_always_was(key: tuple[int, int, int], bits: int) -> None:
    assert noise_bits_reference(*key) == bits
    assert noise_bits(*(int64(part) for part in key)).tolist() == [[bits]]


@pytest.mark.parametrize(("key", "u"), GOLDEN_U.items())
def test_the_uniform_number_is_what_it_always_was(key: tuple[int, int, int], u: str) -> None:
    assert uniform_reference(*key) == float.fromhex(u)
    assert uniform(*(int64(part) for part in key)).item() == float.fromhex(u)


def test_torch_and_plain_integers_agree_bit_for_bit() -> None:
    torch_seed = fresh_seed()
    generator = torch.Generator().manual_seed(torch_seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (13,), generator=generator)
    seeds[:4] = int64(0, -1, 2**63 - 1, -(2**63))
    indices = torch.randint(0, 2**32, (13,), generator=generator)
    indices[3:6] = int64(0, 1, 2**32 - 1)
    token_ids = torch.cat(
        [int64(0, 2**32 - 1), torch.randint(0, 2**32, (31,), generator=generator)]
    )
    bits = noise_bits(seeds, indices, token_ids).tolist()
    numbers = uniform(seeds, indices, token_ids).tolist()
    for s, (seed, index) in enumerate(zip(seeds.tolist(), indices.tolist(), strict=True)):
        for t, token_id in enumerate(token_ids.tolist()):
            assert bits[s][t] == noise_bits_reference(seed, index, token_id), (
                seed,
                index,
                token_id,
            )
            assert numbers[s][t] == uniform_reference(seed, index, token_id), (
                seed,
                index,
                token_id,
            )


def test_wrapping_32_bit_arithmetic_gives_the_same_words() -> None:
    """As a GPU computes it: uint32 throughout, products simply overflow."""

    def half1(x: Words) -> Words:
        return (x ^ (x >> np.uint32(15))) * np.uint32(0x2C1B3C6D)

    def half2(x: Words) -> Words:
        y = (x ^ (x >> np.uint32(12))) * np.uint32(0x297A2D39)
        return y ^ (y >> np.uint32(15))

    def mix(x: Words) -> Words:
        return half2(half1(x))

    words = np.array([0x89ABCDEF, 0x01234567, 4_000_000_000], dtype=np.uint32).reshape(3, 1)
    low, high, index = words
    token_ids = np.arange(2**32 - 1009, 2**32, dtype=np.uint32)
    k0 = mix(mix(mix(low ^ np.uint32(0x9E3779B9)) ^ high) ^ index)
    k1 = mix(mix(mix(high ^ np.uint32(0x7F4A7C15)) ^ low) ^ index)
    wrapped = half2(half1(mix(token_ids ^ np.uint32(0x1B56C4E9)) ^ k0) + k1)
    ours = noise_bits(
        int64(0x0123456789ABCDEF), int64(4_000_000_000), torch.from_numpy(token_ids.astype("int64"))
    )
    assert ours[0].tolist() == wrapped.tolist()


def test_signed_and_unsigned_spellings_of_a_seed_are_the_same_seed() -> None:
    assert noise_bits_reference(-5, 3, 7) == noise_bits_reference(2**64 - 5, 3, 7)


def test_words_become_numbers_strictly_between_zero_and_one() -> None:
    numbers = unit_interval(int64(*EDGE_WORDS))
    assert numbers.dtype == torch.float32
    assert numbers.tolist() == [unit_interval_reference(word) for word in EDGE_WORDS]
    assert numbers.tolist() == sorted(numbers.tolist())
    assert numbers[0].item() == 2.0**-33
    assert numbers[-1].item() == 1 - 2.0**-24


def test_noise_is_finite_even_at_the_extremes_and_follows_its_formula() -> None:
    numbers = unit_interval(int64(*EDGE_WORDS)).double()
    from_formula = -torch.log(-torch.log1p(-numbers))
    assert from_formula.isfinite().all()
    assert from_formula.max() < 22.88
    assert from_formula.min() > -2.82
    seeds, indices, tokens = torch.arange(11), torch.arange(11) * 3, torch.arange(1031)
    expected = -torch.log(-torch.log1p(-uniform(seeds, indices, tokens).double()))
    torch.testing.assert_close(
        gumbel(seeds, indices, tokens).double(), expected, rtol=1e-6, atol=1e-6
    )


def test_numbers_do_not_depend_on_what_else_is_asked_for() -> None:
    seeds, indices, tokens = torch.arange(7) * 10**15, torch.arange(7), torch.arange(257)
    together = gumbel(seeds, indices, tokens)
    for i in range(7):
        assert torch.equal(gumbel(seeds[i : i + 1], indices[i : i + 1], tokens)[0], together[i])
    assert torch.equal(gumbel(seeds, indices, tokens[100:]), together[:, 100:])


def test_inputs_of_the_wrong_type_or_shape_are_refused() -> None:
    good = torch.arange(3)
    with pytest.raises(AssertionError, match=r"seeds is torch\.int32"):
        noise_bits(good.int(), good, good)
    with pytest.raises(AssertionError, match="token_ids has shape"):
        noise_bits(good, good, good.view(1, 3))
    with pytest.raises(AssertionError, match="2 seeds, 3 indices"):
        noise_bits(good[:2], good, good)


def test_numbers_are_uniform() -> None:
    numbers = uniform(torch.arange(16), torch.arange(16), torch.arange(65_536))  # 2**20 numbers
    observed = torch.histc(numbers, bins=1024, min=0.0, max=1.0).double()
    statistic = float(((observed - 1024) ** 2 / 1024).sum())
    assert statistic < chi_square_limit(1023)
    # The tail decides draws: expect 1024 numbers below 2**-10, 32 below 2**-15; five sigma.
    for exponent in (10, 15):
        expected = 2.0 ** (20 - exponent)
        num_below = int((numbers < 2.0**-exponent).sum())
        assert abs(num_below - expected) < 5 * math.sqrt(expected)


@pytest.mark.parametrize("step", [1, 2, 64, 2**12])
def test_neighbouring_tokens_are_independent(step: int) -> None:
    numbers = uniform(torch.arange(8), torch.zeros(8, dtype=torch.int64), torch.arange(16_384))
    assert_pairs_fill_the_square_evenly(numbers[:, :-step], numbers[:, step:])


@pytest.mark.parametrize("step", [1, 2, 16])
def test_neighbouring_indices_are_independent(step: int) -> None:
    indices = torch.arange(257)
    numbers = uniform(torch.full((257,), 42), indices, torch.arange(511))
    assert_pairs_fill_the_square_evenly(numbers[:-step], numbers[step:])


@pytest.mark.parametrize("step", [1, 2**16, 2**32, 2**48])
def test_neighbouring_seeds_are_independent(step: int) -> None:
    seeds = torch.arange(257) * step
    numbers = uniform(seeds, torch.zeros(257, dtype=torch.int64), torch.arange(511))
    assert_pairs_fill_the_square_evenly(numbers[:-1], numbers[1:])


def test_seed_and_index_are_not_interchangeable() -> None:
    tokens = torch.arange(16_384)
    swapped = uniform(int64(3, 8), int64(8, 3), tokens)
    assert_pairs_fill_the_square_evenly(swapped[0], swapped[1])
    # Shifting the seed by one and the index back by one must not give the same stream either.
    diagonal = uniform(torch.arange(9), torch.arange(9).flip(0), tokens)
    assert_pairs_fill_the_square_evenly(diagonal[:-1], diagonal[1:])


def test_each_input_bit_flips_half_of_the_output_bits() -> None:
    generator = torch.Generator().manual_seed(7)
    seeds = torch.randint(-(2**63), 2**63 - 1, (256,), generator=generator)
    indices = torch.randint(0, 2**16, (256,), generator=generator)
    tokens = torch.randint(0, 2**18, (16,), generator=generator)
    before = noise_bits(seeds, indices, tokens)
    flips = [(1 << bit if bit < 63 else -(2**63), 0, 0) for bit in range(64)]
    flips += [(0, 1 << bit, 0) for bit in range(32)] + [(0, 0, 1 << bit) for bit in range(32)]
    for seed_flip, index_flip, token_flip in flips:
        after = noise_bits(seeds ^ seed_flip, indices ^ index_flip, tokens ^ token_flip)
        for out_bit in range(32):
            share = (((before ^ after) >> out_bit) & 1).double().mean().item()
            assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(4096), (seed_flip, index_flip, out_bit)


def test_the_best_noisy_logit_is_a_draw_from_the_softmax() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(41, generator=generator) * 2
    probs = logits.double().softmax(dim=-1)
    num_draws = 40_000
    seeds = torch.arange(num_draws) % 8
    indices = torch.arange(num_draws) // 8
    drawn = (logits + gumbel(seeds, indices, torch.arange(41))).argmax(dim=-1)
    observed = torch.bincount(drawn, minlength=41).double()
    expected = probs * num_draws
    assert expected.min() > 5, "cells too small for the statistic"
    assert float(((observed - expected) ** 2 / expected).sum()) < chi_square_limit(40)
