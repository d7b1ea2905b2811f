"""How long latent attention (MLA) takes on a GPU beside the time to read its latents.

    python -m load_tests.lab.bench_latent
    python -m load_tests.lab.bench_latent --heads 128 --rows 1 16 64 --keys 4096
    python -m load_tests.lab.bench_latent --heads 16 --rows 64 --keys 4096 --tiles
    python -m load_tests.lab.bench_latent --fp8 --keys 4096
    python -m load_tests.lab.bench_latent --queries 2 4 5         # of rows that verify drafts

Decode: one new token a row, absorbed, in a CUDA graph over several layers, so that latents come
from memory. `attention` is the whole backend: queries of latents, attention, values. Before it is
timed it is held against the torch backend. `--tiles` tries tilings of the decode kernel, other
numbers of chunks, and a kernel that joins parts in place of the last part. Prompts: a layer of the
backends that this machine has, without history.

With `--queries` rows that verify drafts, instead of both: `verify` reads a row's latents once for
all its queries, beside each token as a row of its own (graphs of the prefill backend), the backend
of prompts, which makes keys, and a decode step of as many rows. Its floor is the longer one of the
time to read the latents and that of the products. Exits with 1 if a case differs.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.attention.latent import LatentShape
from kernels.attention.latent_flash import FlashLatent
from kernels.attention.latent_reference import ReferenceLatent
from kernels.attention.latent_triton import TritonLatent
from kernels.attention.latent_verify import LatentVerify
from kernels.attention.latent_work import NEVER_JOINED, LatentConfig, fitted_config
from kernels.attention.protocol import AttentionStep, build_step
from kernels.device import device_properties
from kernels.kv.scales import KvScales
from load_tests.lab.moe_step import H200_MEASURED, MAX_ERROR, graph_us
from load_tests.tables import render_rows

NUM_LAYERS = 8  # whose latents together are far more than an L2 cache holds
BLOCK_SIZE = 16
SCALE = 0.02  # of latents in e4m3
PROMPTS = ((8, 1024), (2, 4096), (1, 16000))
# keys, warps, stages, programs an SM
TILINGS = (
    (32, 4, 2, 2), (32, 4, 3, 2), (32, 4, 4, 1), (32, 4, 5, 1), (32, 8, 3, 2), (32, 8, 5, 1),
    (64, 4, 2, 2), (64, 4, 3, 1), (64, 8, 2, 2), (64, 8, 3, 1), (16, 4, 4, 2), (16, 4, 5, 2),
    (16, 4, 3, 3),
)  # fmt: skip
CHUNKS = (2, 8)


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


def _step(num_rows: int, num_keys: int, num_queries: int = 1) -> AttentionStep:
    num_blocks = -(-num_keys // BLOCK_SIZE)
    blocks = torch.randperm(num_rows * num_blocks).view(num_rows, num_blocks).tolist()
    return build_step([num_queries] * num_rows, [num_keys - num_queries] * num_rows, blocks, "cuda")


def _data(
    shape: LatentShape, step: AttentionStep, scales: KvScales | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, the step's own latents, the up-projection and a store; with scales of e4m3 numbers."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    size = (len(step.block_ids), NUM_LAYERS, 1, BLOCK_SIZE, 1, shape.width)
    num_tokens = step.num_tokens
    made = (shape.num_heads, shape.nope_dim + shape.value_dim, shape.rank)
    store = torch.randn(size, dtype=dtype, device=device)
    if scales is not None:
        store = (store / SCALE).to(torch.float8_e4m3fn).view(torch.uint8)
    return (
        torch.randn(num_tokens, shape.num_heads, shape.query_dim, dtype=dtype, device=device),
        torch.zeros(num_tokens, 1, shape.width, dtype=dtype, device=device),
        torch.randn(made, dtype=dtype, device=device) * shape.rank**-0.5,
        store,
    )


def _scales() -> KvScales:
    return KvScales.of(torch.full((NUM_LAYERS, 2, 1), SCALE, device="cuda"))


def _build(backend: Any, shape: LatentShape, **options: Any) -> Any:  # noqa: ANN401
    device = torch.device("cuda")
    return backend(shape, block_size=BLOCK_SIZE, dtype=torch.bfloat16, device=device, **options)


def measure(
    shape: LatentShape,
    num_rows: int,
    num_keys: int,
    configs: Sequence[LatentConfig | None],
    scales: KvScales | None,
) -> Iterator[tuple[list[str], bool]]:
    """Lines of the table, and whether the result is that of torch; a config of None = the own."""
    step = _step(num_rows, num_keys)
    q, new, up, store = _data(shape, step, scales)
    reference = _build(ReferenceLatent, shape, is_fp8=scales is not None)
    truth = reference.run(q, new, up, 0, store, reference.plan(step), None, scales).float()
    num_bytes = num_rows * num_keys * shape.width * store.element_size()
    floor_us = 1e6 * num_bytes / H200_MEASURED.bytes_per_s
    sizes = [str(shape.num_heads), str(num_rows), str(num_keys)]
    for config in configs:
        tiles = "" if config is None else _told(config)
        if config is not None and not _fits(config, shape):
            yield [*sizes, "", "", "", "too large", tiles], True
            continue
        built = _build(TritonLatent, shape, decode_config=config)
        metadata = built.plan(step)
        found = built.run(q, new, up, 0, store, metadata, None, scales).float()
        error = float((found - truth).norm() / truth.norm())
        calls = [
            partial(built.run, q, new, up, layer, store, metadata, None, scales)
            for layer in range(NUM_LAYERS)
        ]
        us = graph_us(calls)
        cells = [*sizes, f"{us:.1f}", f"{floor_us:.1f}"]
        yield [*cells, f"{floor_us / us:.0%}", f"{error:.1e}", tiles], error < MAX_ERROR


def _fits(config: LatentConfig, shape: LatentShape) -> bool:
    """Whether a tiling of few heads, with a buffer fewer than stages, has room."""
    cut = config.decode
    tiles = 2 * shape.width * (cut.tile_keys * (cut.num_stages - 1) + 16)
    return tiles < device_properties(torch.device("cuda")).shared_memory_per_block_bytes - 4096


def _told(config: LatentConfig) -> str:
    cut = config.decode
    parts = "joined by a kernel" if config.joined_from == NEVER_JOINED else "joined by the last"
    return (
        f"{cut.tile_keys} keys, {cut.num_warps} warps, {cut.num_stages} stages,"
        f" {cut.num_programs}, {config.num_chunks} chunks, {parts}"
    )


def tilings(shape: LatentShape) -> list[LatentConfig]:
    """What `--tiles` tries."""
    device = device_properties(torch.device("cuda"))
    own = fitted_config(shape, device, whole_rows=False)
    cut_otherwise = [replace(own, num_chunks=number) for number in CHUNKS]
    cut_otherwise.append(replace(own, joined_from=NEVER_JOINED))
    return cut_otherwise + [
        replace(
            own,
            decode=replace(
                own.decode,
                tile_keys=tile_keys,
                num_warps=num_warps,
                num_stages=num_stages,
                num_programs=per_sm * device.num_sms,
            ),
        )
        for tile_keys, num_warps, num_stages, per_sm in TILINGS
    ]


def measure_verification(
    shape: LatentShape, num_rows: int, num_keys: int, num_queries: int, scales: KvScales | None
) -> tuple[list[str], bool]:
    """A line of the table, and whether all ways give what torch gives."""
    step = _step(num_rows, num_keys, num_queries)
    given = _data(shape, step, scales)
    q, new, up, store = given
    reference = _build(ReferenceLatent, shape, is_fp8=scales is not None)
    truth = reference.run(q, new, up, 0, store, reference.plan(step), None, scales).float()
    verify = LatentVerify(shape, max_queries=num_queries, device=torch.device("cuda"))
    triton = _build(TritonLatent, shape)
    by_token = triton.open_graph(step.device_rows, max_keys=num_keys, max_tokens=step.num_tokens)
    triton.begin(by_token)
    cells, is_good = [], True
    for backend, metadata in (
        (verify, verify.plan(step)),
        (triton, by_token),
        (triton, triton.plan(step)),
    ):
        found = backend.run(q, new, up, 0, store, metadata, None, scales).float()
        error = float((found - truth).norm() / truth.norm())
        is_good = is_good and error < MAX_ERROR
        cells.append(f"{_layers_us(backend, given, metadata, scales):.1f}")
    singles = _step(num_rows, num_keys)
    few = q[:num_rows], new[:num_rows], up, store
    cells.append(f"{_layers_us(triton, few, triton.plan(singles), scales):.1f}")
    pairs = num_rows * num_keys * num_queries * shape.num_heads
    flops = 2 * pairs * (shape.width + shape.rank)
    num_bytes = num_rows * num_keys * shape.width * store.element_size()
    floor_us = 1e6 * H200_MEASURED.seconds(num_bytes, flops)
    sizes = [str(n) for n in (shape.num_heads, num_rows, num_keys, num_queries)]
    return [*sizes, *cells, f"{floor_us:.1f}"], is_good


def _layers_us(
    backend: Any,  # noqa: ANN401
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    metadata: Any,  # noqa: ANN401
    scales: KvScales | None,
) -> float:
    """Microseconds a layer; given: as of `_data`."""
    q, new, up, store = given
    return graph_us(
        [
            partial(backend.run, q, new, up, layer, store, metadata, None, scales)
            for layer in range(NUM_LAYERS)
        ]
    )


def measure_prompts(
    shape: LatentShape, num_rows: int, num_tokens: int
) -> Iterator[tuple[list[str], bool]]:
    """A line of each backend that this machine has."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    blocks = torch.randperm(num_rows * num_blocks).view(num_rows, num_blocks).tolist()
    step = build_step([num_tokens] * num_rows, [0] * num_rows, blocks, "cuda")
    q, new, up, store = _data(shape, step)
    pairs = num_rows * num_tokens * (num_tokens + 1) / 2
    flops = 2 * pairs * shape.num_heads * sum(shape.head_sizes)
    truth: Tensor | None = None
    for backend in (TritonLatent, FlashLatent):
        try:
            built = _build(backend, shape)
        except (ImportError, ValueError) as reason:
            print(f"{backend.__name__}: {reason}", file=sys.stderr)
            continue
        metadata = built.plan(step)
        found = built.run(q, new, up, 0, store, metadata).float()
        truth = found if truth is None else truth
        error = float((found - truth).norm() / truth.norm())
        run = partial(built.run, q, new, up, 0, store, metadata)
        us = graph_us([run])
        cells = [str(shape.num_heads), f"{num_rows}x{num_tokens}", backend.__name__, f"{us:.1f}"]
        yield [*cells, f"{flops / us / 1e6:.0f}", f"{error:.1e}"], error < MAX_ERROR


def _show_verification(args: argparse.Namespace, scales: KvScales | None) -> int:
    columns = ["heads", "rows", "keys", "queries", "verify us", "by token", "prompts", "1 token"]
    lines = [[*columns, "floor us"]]
    is_good = True
    for num_heads in args.heads:
        for num_rows in args.rows:
            for num_keys in args.keys:
                for num_queries in args.queries:
                    line, is_same = measure_verification(
                        _shape(num_heads), num_rows, num_keys, num_queries, scales
                    )
                    lines.append(line)
                    is_good = is_good and is_same
    print(render_rows(lines))
    return 0 if is_good else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", type=int, nargs="*", default=[16, 128])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--keys", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--tiles", action="store_true", help="try tilings of the decode kernel")
    parser.add_argument("--fp8", action="store_true", help="decode: latents as e4m3 numbers")
    parser.add_argument("--queries", type=int, nargs="*", default=[], help="of rows that verify")
    args = parser.parse_args(argv)
    scales = _scales() if args.fp8 else None
    if args.queries:
        return _show_verification(args, scales)
    lines = [["heads", "rows", "keys", "us a layer", "floor us", "of floor", "error", "tiles"]]
    is_good = True
    for num_heads in args.heads:
        shape = _shape(num_heads)
        configs = [None, *(tilings(shape) if args.tiles else ())]
        for num_rows in args.rows:
            for num_keys in args.keys:
                for line, is_same in measure(shape, num_rows, num_keys, configs, scales):
                    print(*line, file=sys.stderr, flush=True)  # should the time be over before
                    lines.append(line)
                    is_good = is_good and is_same
    print(render_rows(lines), flush=True)
    lines = [["heads", "prompts", "backend", "us a layer", "TFLOP/s of attention", "difference"]]
    for num_heads in () if args.tiles or args.fp8 else args.heads:
        for num_rows, num_tokens in PROMPTS:
            for line, is_same in measure_prompts(_shape(num_heads), num_rows, num_tokens):
                lines.append(line)
                is_good = is_good and is_same
    print(render_rows(lines))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
