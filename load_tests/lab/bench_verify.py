"""Attention of rows that verify drafts: the kernel that reads keys once, beside others, on a GPU.

    python -m load_tests.lab.bench_verify
    python -m load_tests.lab.bench_verify --rows 64 --queries 2 4 --keys 4096

Per layer, in a CUDA graph over several layers, so that keys come from memory. `verify` is
`kernels.attention.triton_verify`, beside the backend of prompts (`--prefill`, as configured with
speculation.attention_backend prefill) and a decode step of one token a row. The floor is the time
to read keys and values once. Results are held against the prefill backend; exits with 1 if one
differs.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.attention.names import AttentionName, AttentionNames
from kernels.attention.protocol import AttentionBackend, AttentionShape, AttentionStep, build_step
from kernels.attention.select import build_attention
from kernels.attention.triton import TritonAttention
from kernels.attention.triton_verify import TritonVerify
from load_tests.lab.moe_step import H200_MEASURED, MAX_ERROR, graph_us
from load_tests.tables import render_rows

NUM_LAYERS = 8  # whose keys together are far more than an L2 cache holds
BLOCK_SIZE = 16
DTYPE = torch.bfloat16
SHAPE = AttentionShape(
    num_heads=32, num_kv_heads=8, head_dim=128, layer_windows=(None,) * NUM_LAYERS
)


def _step(num_rows: int, num_queries: int, num_keys: int) -> AttentionStep:
    num_blocks = -(-num_keys // BLOCK_SIZE)
    blocks = torch.randperm(num_rows * num_blocks).view(num_rows, num_blocks).tolist()
    return build_step([num_queries] * num_rows, [num_keys - num_queries] * num_rows, blocks, "cuda")


def _time(backend: AttentionBackend, step: AttentionStep, store: Tensor) -> tuple[float, Tensor]:
    """Microseconds a layer, and what the first layer gives."""
    generator = torch.Generator("cuda").manual_seed(step.num_tokens)
    size = (step.num_tokens, SHAPE.num_heads, SHAPE.head_dim)
    q = torch.randn(size, generator=generator, dtype=DTYPE, device="cuda")
    new = torch.zeros(step.num_tokens, SHAPE.num_kv_heads, SHAPE.head_dim, device="cuda")
    new = new.to(DTYPE)
    metadata = backend.plan(step)
    found = backend.run(q, new, new, 0, store, metadata).float()
    calls = [partial(backend.run, q, new, new, n, store, metadata) for n in range(NUM_LAYERS)]
    return graph_us(calls), found


def measure(
    prefill: AttentionBackend, num_rows: int, num_queries: int, num_keys: int
) -> tuple[list[str], bool]:
    """A line of the table, and whether the result is that of `prefill`."""
    step = _step(num_rows, num_queries, num_keys)
    size = (len(step.block_ids), NUM_LAYERS, 2, BLOCK_SIZE, SHAPE.num_kv_heads, SHAPE.head_dim)
    store = torch.randn(size, dtype=DTYPE, device="cuda")
    given = {"block_size": BLOCK_SIZE, "dtype": DTYPE, "device": torch.device("cuda")}
    decode_us, _ = _time(
        TritonAttention(SHAPE, **given),  # type: ignore[arg-type]
        _step(num_rows, 1, num_keys),
        store,
    )
    prefill_us, expected = _time(prefill, step, store)
    verify = TritonVerify(SHAPE, max_queries=num_queries, **given)  # type: ignore[arg-type]
    verify_us, found = _time(verify, step, store)
    error = float((found - expected).norm() / expected.norm())
    read_bytes = num_rows * num_keys * 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 2
    floor_us = 1e6 * read_bytes / H200_MEASURED.bytes_per_s
    times_us = (verify_us, prefill_us, decode_us, floor_us)
    cells = [str(num_rows), str(num_queries), str(num_keys), *(f"{us:.1f}" for us in times_us)]
    return [*cells, f"{error:.1e}"], error < MAX_ERROR


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--queries", type=int, nargs="*", default=[2, 4, 5, 9])
    parser.add_argument("--keys", type=int, nargs="*", default=[200, 4096])
    parser.add_argument("--prefill", choices=("flash_attn", "triton"), default="triton")
    args = parser.parse_args(argv)
    name: AttentionName = args.prefill
    prefill = build_attention(
        AttentionNames(prefill=name, decode=name),
        SHAPE,
        block_size=BLOCK_SIZE,
        dtype=DTYPE,
        device=torch.device("cuda"),
        fixed_tile=False,
    )
    columns = ["rows", "queries", "keys", "verify us", f"{name} us", "1 token us", "floor us"]
    lines = [[*columns, "error"]]
    is_good = True
    for num_keys in args.keys:
        for num_rows in args.rows:
            if num_rows * num_keys > 2**19:
                continue
            for num_queries in args.queries:
                line, is_same = measure(prefill, num_rows, num_queries, num_keys)  # type: ignore[arg-type]
                lines.append(line)
                is_good = is_good and is_same
    print(render_rows(lines))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
