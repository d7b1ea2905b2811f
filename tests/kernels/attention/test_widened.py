"""FlashAttention-3 over copies of e4m3 numbers, against float64 of what the numbers stand for."""

import importlib.util
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention.protocol import AttentionShape
from tests.kernels.attention.attention_cases import ROW_SETS
from tests.kernels.attention.test_attention_fp8 import Stored, stored_problem
from tests.kernels.interpreter import run_interpreted

WINDOWS = (None, 3, 70)
PROMPTS = {
    "fresh": [(0, 66), (0, 130), (0, 200)],
    "history": [(63, 65), (100, 90), (17, 150), (130, 2)],
    "few_queries": [(200, 2), (3, 5)],
}
LONG_PROMPTS = {
    "fresh": [(0, 2000), (0, 129), (0, 1000), (0, 4)],
    "history": [(1063, 165), (3000, 1031), (17, 500), (5000, 2)],
    "few_queries": [(4000, 2), (3, 5)],
}


def library_attention(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    fa_version: int,
    out: Tensor | None,
) -> Tensor:
    """What the library does, in plain torch."""
    assert causal
    assert fa_version == 3
    assert cu_seqlens_k.dtype == cu_seqlens_q.dtype == torch.int32
    out = torch.empty(q.shape, dtype=q.dtype) if out is None else out
    k, v = (t.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    starts = zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True)
    (first_q, first_k), *ends = starts
    for end_q, end_k in ends:
        num_q, num_k = end_q - first_q, end_k - first_k
        assert num_q <= max_seqlen_q
        assert num_k <= max_seqlen_k
        scores = torch.einsum("qhd,khd->hqk", q[first_q:end_q].double(), k[first_k:end_k])
        distance = torch.arange(num_q)[:, None] + num_k - num_q - torch.arange(num_k)
        is_seen = distance >= 0
        if window_size != (-1, -1):
            is_seen &= distance <= window_size[0]
        weights = (scores * softmax_scale).masked_fill(~is_seen, -torch.inf).softmax(-1)
        out[first_q:end_q] = torch.einsum("hqk,khd->qhd", weights, v[first_k:end_k]).to(q.dtype)
        first_q, first_k = end_q, end_k
    return out


def _backend(case: Stored) -> Any:
    from kernels.attention.widened import WidenedAttention  # Triton's interpreter may be chosen

    return WidenedAttention(
        case.problem.shape,
        block_size=case.problem.block_size,
        dtype=case.dtype,
        device=case.store.device,
    )


def _check(
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    shape = AttentionShape(
        num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, layer_windows=WINDOWS
    )
    case = stored_problem(rows, shape, block_size=block_size, dtype=dtype, device=device)
    case.check(_backend(case))


def interpreted_cases() -> None:
    """Called in a process of its own, where Triton interprets."""
    library = SimpleNamespace(flash_attn_varlen_func=library_attention)
    with (
        patch("kernels.attention.flash_attn.why_not", lambda *_: None),
        patch("kernels.attention.flash_attn.import_library", lambda **_: library),
    ):
        for rows in PROMPTS.values():
            _check(rows, (4, 2), 64, block_size=16, dtype=torch.float32, device="cpu")
        _check(PROMPTS["history"], (3, 1), 64, block_size=48, dtype=torch.float16, device="cpu")
        _check_choice()
    for dtype in (torch.float32, torch.float16):  # the interpreter cuts bfloat16 off
        _check_copies(dtype)


def _check_copies(dtype: torch.dtype) -> None:
    """The kernel's copies are its torch twin's, to the bit."""
    from kernels.attention.gathering import key_lines
    from kernels.kv.widen import widen, widen_torch

    rows, block_size = [(63, 65), (0, 7), (100, 1)], 16
    shape = AttentionShape(num_heads=3, num_kv_heads=3, head_dim=40, layer_windows=(None, None))
    case = stored_problem(rows, shape, block_size=block_size, dtype=dtype)
    step = case.problem.step
    num_keys = step.num_computed_tokens + step.num_new_tokens
    cu_keys = torch.tensor([0, *num_keys.cumsum()], dtype=torch.int32)
    of_keys = [np.full(num, row) for row, num in enumerate(num_keys)]
    positions = np.concatenate([np.arange(num) for num in num_keys])
    lines = key_lines(step, np.concatenate(of_keys), positions, block_size=block_size, num_layers=2)
    for layer in range(2):
        copies = widen(
            case.store, layer, case.scales, step.device_rows, cu_keys,
            num_keys=int(num_keys.sum()), max_keys=int(num_keys.max()), dtype=dtype,
        )  # fmt: skip
        expected = widen_torch(case.store, layer, case.scales, torch.from_numpy(lines), dtype)
        for copied, twin in zip(copies, expected, strict=True):
            assert torch.equal(copied, twin)


def _check_choice() -> None:
    """Few queries a key, and more keys than are copied, are attended where they lie."""
    from kernels.attention.gathering import MAX_GATHERED_KEYS
    from kernels.attention.triton import TritonMetadata
    from kernels.attention.widened import CopiedKeys

    for rows, expected in (
        (PROMPTS["fresh"], CopiedKeys),
        (PROMPTS["history"], CopiedKeys),
        (PROMPTS["few_queries"], TritonMetadata),
        ([(0, 63)], TritonMetadata),
        ([(MAX_GATHERED_KEYS - 100, 100)], CopiedKeys),
        ([(MAX_GATHERED_KEYS - 99, 100)], TritonMetadata),
    ):
        shape = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=64, layer_windows=(None,))
        case = stored_problem([(0, 2)], shape, block_size=16, dtype=torch.float32, device="cpu")
        from kernels.attention.protocol import build_step

        blocks = [[0] * -(-sum(row) // 16) for row in rows]
        step = build_step([new for _, new in rows], [old for old, _ in rows], blocks, "cpu")
        assert isinstance(_backend(case).plan(step), expected), rows


@pytest.mark.slow
def test_copied_keys_are_attended_as_float64_does_in_the_interpreter() -> None:
    run_interpreted("tests.kernels.attention.test_widened:interpreted_cases")


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="FlashAttention-3 is vLLM's")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"), [((4, 4), 64, 16), ((8, 2), 128, 16), ((6, 2), 128, 48)]
)
def test_copied_keys_are_attended_as_float64_does_on_a_gpu(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    for rows in (*PROMPTS.values(), *LONG_PROMPTS.values(), ROW_SETS["everything"]):
        several = [row for row in rows if row[1] > 1]
        _check(several, heads, head_dim, block_size=block_size, dtype=dtype, device="cuda")
