"""Attention of rows of one token by tile, on a GPU: keys of a tile, warps and stages.

    python -m load_tests.lab.bench_decode_tiles
    python -m load_tests.lab.bench_decode_tiles --rows 16 --keys 160 --tiles 64/4/3 128/4/2 256/8/1

us a layer, of a CUDA graph over several layers, so that keys come from memory, with as many
programs as a graph for contexts of `--max-keys` launches. `chosen` is what an engine would take.
Results are held against the first tile's; exits with 1 if one differs.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.attention.decode_items import DecodeConfig
from kernels.attention.protocol import AttentionShape, AttentionStep, build_step
from kernels.attention.triton import TritonAttention, decode_config_for
from kernels.kv.scales import KvScales, to_e4m3
from load_tests.lab.moe_step import H200_MEASURED, MAX_ERROR, graph_us
from load_tests.tables import render_rows

NUM_LAYERS = 24
BLOCK_SIZE = 16
DTYPE = torch.bfloat16
CUDA = torch.device("cuda")
SHAPE = AttentionShape(
    num_heads=32, num_kv_heads=8, head_dim=128, layer_windows=(None,) * NUM_LAYERS
)
TILES = ["chosen", "64/2/3", "64/8/3", "128/4/2", "128/8/2", "128/8/3", "256/8/1", "32/4/4"]


def tile_of(text: str, num_rows: int) -> DecodeConfig:
    """Of "keys/warps/stages", or what an engine chooses."""
    if text == "chosen":
        return decode_config_for(num_rows)
    tile_keys, num_warps, num_stages = map(int, text.split("/"))
    return DecodeConfig(tile_keys=tile_keys, num_warps=num_warps, num_stages=num_stages)


def _step(num_rows: int, num_keys: int) -> AttentionStep:
    num_blocks = -(-num_keys // BLOCK_SIZE)
    blocks = torch.randperm(num_rows * num_blocks).view(num_rows, num_blocks).tolist()
    return build_step([1] * num_rows, [num_keys - 1] * num_rows, blocks, "cuda")


def _store(num_blocks: int, *, in_fp8: bool) -> tuple[Tensor, KvScales | None]:
    size = (num_blocks, NUM_LAYERS, 2, BLOCK_SIZE, SHAPE.num_kv_heads, SHAPE.head_dim)
    numbers = torch.randn(size, dtype=DTYPE, device=CUDA)
    if not in_fp8:
        return numbers, None
    heads = torch.ones(SHAPE.num_kv_heads, device=CUDA)
    codes = to_e4m3(numbers.view(-1, SHAPE.num_kv_heads, SHAPE.head_dim), heads)
    return codes.view(size), KvScales.of(heads.expand(NUM_LAYERS, 2, -1))


def measure(num_rows: int, num_keys: int, args: argparse.Namespace) -> tuple[list[str], bool]:
    """A line of us a layer by tile, and whether all gave the same."""
    torch.manual_seed(num_rows)
    step = _step(num_rows, num_keys)
    store, scales = _store(len(step.block_ids), in_fp8=args.kv_dtype == "fp8_e4m3")
    q = torch.randn(num_rows, SHAPE.num_heads, SHAPE.head_dim, dtype=DTYPE, device=CUDA)
    new = torch.zeros(num_rows, SHAPE.num_kv_heads, SHAPE.head_dim, dtype=DTYPE, device=CUDA)
    read_bytes = 2 * num_rows * num_keys * SHAPE.num_kv_heads * SHAPE.head_dim
    floor_us = 1e6 * read_bytes * store.element_size() / H200_MEASURED.bytes_per_s
    cells, expected, is_same = [str(num_rows), str(num_keys), f"{floor_us:.1f}"], None, True
    for tile in args.tiles:
        backend = TritonAttention(
            SHAPE,
            block_size=BLOCK_SIZE,
            dtype=DTYPE,
            device=CUDA,
            decode_config=None if tile == "chosen" else tile_of(tile, num_rows),
        )
        work = backend.open_graph(step.device_rows, max_keys=args.max_keys)
        backend.begin(work)
        run = partial(backend.run, q, new, new, store=store, metadata=work, scales=scales)
        found = run(layer=0).float()
        expected = found if expected is None else expected
        error = float((found - expected).norm() / expected.norm())
        is_same = is_same and error < MAX_ERROR
        cells.append(f"{graph_us([partial(run, layer=n) for n in range(NUM_LAYERS)]):.2f}")
    return cells, is_same


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--keys", type=int, nargs="*", default=[160])
    parser.add_argument("--max-keys", type=int, default=16384)
    parser.add_argument("--tiles", nargs="*", default=TILES, help="keys/warps/stages, or chosen")
    parser.add_argument("--kv-dtype", choices=("bfloat16", "fp8_e4m3"), default="fp8_e4m3")
    args = parser.parse_args(argv)
    lines, is_good = [["rows", "keys", "floor us", *args.tiles]], True
    for num_keys in args.keys:
        for num_rows in args.rows:
            line, is_same = measure(num_rows, num_keys, args)
            lines.append(line)
            is_good = is_good and is_same
            print("  ".join(line), flush=True)
    print(render_rows(lines))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
