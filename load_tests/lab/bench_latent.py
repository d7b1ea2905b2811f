"""How long latent attention (MLA) takes on a GPU beside the time to read its latents.

    python -m load_tests.lab.bench_latent
    python -m load_tests.lab.bench_latent --heads 128 --rows 1 16 64 --keys 4096

Decode: one new token a row, absorbed, in a CUDA graph over several layers, so that latents come
from memory. `attention` is the whole backend: queries of latents, attention, values. Before it is
timed it is held against the torch backend. Exits with 1 if a case differs.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.attention.latent import LatentShape
from kernels.attention.latent_reference import ReferenceLatent
from kernels.attention.latent_triton import TritonLatent
from kernels.attention.protocol import AttentionStep, build_step
from load_tests.lab.moe_step import H200_MEASURED, MAX_ERROR, graph_us
from load_tests.tables import render_rows

NUM_LAYERS = 8  # whose latents together are far more than an L2 cache holds
BLOCK_SIZE = 16


def _shape(num_heads: int) -> LatentShape:
    return LatentShape(
        num_layers=NUM_LAYERS,
        num_heads=num_heads,
        rank=512,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        scale=192**-0.5,
    )


def _step(num_rows: int, num_keys: int) -> AttentionStep:
    num_blocks = -(-num_keys // BLOCK_SIZE)
    blocks = torch.randperm(num_rows * num_blocks).view(num_rows, num_blocks).tolist()
    return build_step([1] * num_rows, [num_keys - 1] * num_rows, blocks, "cuda")


def measure(shape: LatentShape, num_rows: int, num_keys: int) -> tuple[list[str], bool]:
    """A line of the table, and whether the result is that of torch."""
    step = _step(num_rows, num_keys)
    device, dtype = torch.device("cuda"), torch.bfloat16
    num_blocks = len(step.block_ids)
    size = (num_blocks, NUM_LAYERS, 1, BLOCK_SIZE, 1, shape.width)
    store = torch.randn(size, dtype=dtype, device=device)
    q = torch.randn(num_rows, shape.num_heads, shape.query_dim, dtype=dtype, device=device)
    made = (shape.num_heads, shape.nope_dim + shape.value_dim, shape.rank)
    up = torch.randn(made, dtype=dtype, device=device) * shape.rank**-0.5
    new = torch.zeros(num_rows, 1, shape.width, dtype=dtype, device=device)
    outs: list[Tensor] = []
    backends: tuple[Any, ...] = (ReferenceLatent, TritonLatent)
    for backend in backends:
        built = backend(shape, block_size=BLOCK_SIZE, dtype=dtype, device=device)
        metadata = built.plan(step)
        outs.append(built.run(q, new, up, 0, store, metadata).float())
    error = float((outs[1] - outs[0]).norm() / outs[0].norm())
    calls = [partial(built.run, q, new, up, layer, store, metadata) for layer in range(NUM_LAYERS)]
    us = graph_us(calls)
    floor_us = 1e6 * num_rows * num_keys * shape.width * 2 / H200_MEASURED.bytes_per_s
    cells = [str(shape.num_heads), str(num_rows), str(num_keys), f"{us:.1f}", f"{floor_us:.1f}"]
    return [*cells, f"{floor_us / us:.0%}", f"{error:.1e}"], error < MAX_ERROR


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", type=int, nargs="*", default=[16, 128])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--keys", type=int, nargs="*", default=[1024, 4096])
    args = parser.parse_args(argv)
    lines = [["heads", "rows", "keys", "us a layer", "floor us", "of floor", "error"]]
    is_good = True
    for num_heads in args.heads:
        for num_rows in args.rows:
            for num_keys in args.keys:
                line, is_same = measure(_shape(num_heads), num_rows, num_keys)
                lines.append(line)
                is_good = is_good and is_same
    print(render_rows(lines))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
