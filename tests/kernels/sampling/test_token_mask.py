"""Tokens banned by bits: torch against plain Python, Triton in the interpreter and on a GPU."""

import random

import pytest
import torch

from kernels.sampling.mask_words import num_mask_words
from kernels.sampling.token_mask import ban_tokens
from tests.kernels.interpreter import run_interpreted
from tests.kernels.sampling.sample_cases import fresh_generator

VOCAB_SIZES = (1, 31, 32, 33, 77, 4095, 4096, 4097, 9001)
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_case(vocab_size: int, dtype: torch.dtype, generator: torch.Generator) -> Case:
    """Logits whose lines lie apart, some of which have masks, of which some ban all or none."""
    num_lines = random.randrange(1, 7)
    num_masks = random.randrange(num_lines + 1)
    wide = torch.randn((num_lines, vocab_size + 5), generator=generator).to(dtype)
    lines = torch.randperm(num_lines, generator=generator)[:num_masks].int()
    shape = (num_masks, num_mask_words(vocab_size))
    words = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int32)
    words[2:3] = 0
    words[3:4] = -1
    return wide[:, :vocab_size], lines, words


def by_hand(logits: torch.Tensor, lines: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    expected = logits.clone()
    for line, mask in zip(lines.tolist(), words.tolist(), strict=True):
        for token in range(logits.shape[1]):
            if not mask[token // 32] >> (token % 32) & 1:
                expected[line, token] = -torch.inf
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_banned_where_its_bit_is_zero_and_nowhere_else(dtype: torch.dtype) -> None:
    generator = fresh_generator()
    for vocab_size in VOCAB_SIZES:
        logits, lines, words = random_case(vocab_size, dtype, generator)
        expected = by_hand(logits, lines, words)
        ban_tokens(logits, lines, words)
        assert torch.equal(logits, expected), f"vocabulary of {vocab_size}"


def test_masks_of_another_vocabulary_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match=r"\(1, 2\)"):
        ban_tokens(torch.zeros(1, 77), torch.zeros(1).int(), torch.zeros(1, 2).int())


def check_kernel(device: str, *dtypes: torch.dtype) -> None:
    from kernels.sampling.token_mask_triton import ban_tokens as fused_ban_tokens

    generator = fresh_generator()
    for dtype in dtypes:
        for vocab_size in VOCAB_SIZES:
            logits, lines, words = random_case(vocab_size, dtype, generator)
            wide = torch.full((logits.shape[0], vocab_size + 5), 7.0, dtype=dtype, device=device)
            found = wide[:, :vocab_size]
            found.copy_(logits)
            # Masks arrive inside a larger copy, at any multiple of four bytes.
            packed = torch.cat([words.flatten().new_zeros(3), words.flatten()]).to(device)
            fused_ban_tokens(found, lines.to(device), packed[3:].view(words.shape))
            ban_tokens(logits, lines, words)
            assert torch.equal(found.cpu(), logits), f"vocabulary of {vocab_size}, {dtype}"
            assert (wide[:, vocab_size:] == 7.0).all(), "written beyond a line's end"


def check_interpreted() -> None:
    check_kernel("cpu", torch.float32, torch.float16)


def test_the_kernel_bans_the_same_in_the_interpreter() -> None:
    run_interpreted("tests.kernels.sampling.test_token_mask:check_interpreted")


@pytest.mark.gpu
def test_the_kernel_bans_the_same_on_a_gpu() -> None:
    for _ in range(5):
        check_kernel("cuda", torch.float32, torch.bfloat16, torch.float16)
