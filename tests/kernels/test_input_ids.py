"""Tokens known only on the device: Triton in the interpreter and on a GPU, and torch."""

import pytest
import torch

from kernels.input_ids import keep_last_tokens, resolve_input_ids
from tests.kernels.interpreter import run_interpreted
from tests.kernels.sampling.sample_cases import fresh_generator

SIZES = (1, 2, 255, 256, 257, 700)


def check_resolve(device: str) -> None:
    from kernels.input_ids_triton import resolve

    generator = fresh_generator()
    last_tokens = torch.randint(0, 150_000, (31,), generator=generator, dtype=torch.int32)
    for size in SIZES:
        ids = torch.randint(-31, 150_000, (size,), generator=generator, dtype=torch.int32)
        ids[::2] = -1 - ids[::2].abs() % 31
        found = resolve(ids.to(device), last_tokens.to(device))
        assert torch.equal(found.cpu(), resolve_input_ids(ids, last_tokens))


def check_keep(device: str) -> None:
    from kernels.input_ids_triton import keep

    generator = fresh_generator()
    for size in SIZES:
        rows = torch.randperm(size + 5, generator=generator)[:size].int()
        token_ids = torch.randint(0, 150_000, (size,), generator=generator)
        is_finite = torch.rand(size, generator=generator) < 0.7
        expected, found = torch.zeros((2, size + 5), dtype=torch.int32).unbind()
        found = found.to(device)
        given = (tensor.to(device) for tensor in (token_ids, is_finite, rows))
        drawn = keep(*given, found)
        assert torch.equal(drawn.cpu(), keep_last_tokens(token_ids, is_finite, rows, expected))
        assert torch.equal(found.cpu(), expected)


def check_all(device: str) -> None:
    check_resolve(device)
    check_keep(device)


def test_the_host_is_told_tokens_and_which_rows_have_none() -> None:
    last_tokens = torch.full((4,), 9, dtype=torch.int32)
    drawn = keep_last_tokens(
        torch.tensor([0, 50, 60]),
        torch.tensor([False, True, True]),
        torch.tensor([3, 0, 2], dtype=torch.int32),
        last_tokens,
    )
    assert drawn.tolist() == [-1, 50, 60]
    assert last_tokens.tolist() == [50, 9, 60, 0]


def test_both_operations_in_the_interpreter() -> None:
    run_interpreted("tests.kernels.test_input_ids:check_all", "cpu")


@pytest.mark.gpu
def test_both_operations_on_a_gpu() -> None:
    check_all("cuda")
