"""Finds the best tiles of a mixture's products for a GPU, and prints them as a table's entry.

Every candidate is compiled first, in several processes at once, then timed at every number of
tokens that it may serve. A candidate that does not compile or fit is left out. When the time that
was given is over, the best so far are taken.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import TypeVar

import torch
from torch import Tensor

from kernels.moe.align import Blocks
from kernels.moe.few import few_down, few_gate_up
from kernels.moe.grouped import grouped_down, grouped_gate_up
from kernels.moe.routes import Routes
from kernels.moe.tiles import ALWAYS, ExpertShape, FewTile, Pair, Tile, TilePlan
from load_tests.lab.moe_step import Call, Layer, MoeStep, Timer

NUM_PROCESSES = 12
TUNED_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
FEW_TOKENS = (1, 2, 4, 8, 16)
PREFETCHES = (0, 128, 256, 512, 2048)  # columns of the second weight
MAX_PREFETCHING_TOKENS = 512

# block_m, block_n, block_k, group_m, warps, stages
TILES = tuple(
    Tile(*sizes, by_tma=by_tma)
    for by_tma in (False, True)
    for sizes in (
        (16, 32, 128, 1, 4, 4), (16, 32, 256, 1, 4, 3), (16, 64, 64, 1, 4, 5),
        (16, 64, 128, 1, 4, 3), (16, 64, 128, 1, 4, 4), (16, 64, 256, 1, 4, 2),
        (16, 64, 256, 1, 4, 3), (16, 128, 64, 1, 4, 4), (16, 128, 64, 1, 4, 6),
        (16, 128, 128, 1, 4, 2), (16, 128, 128, 1, 4, 3), (16, 128, 128, 1, 4, 4),
        (16, 128, 256, 1, 8, 2), (16, 256, 64, 1, 4, 4), (16, 256, 128, 1, 8, 2),
        (16, 256, 128, 1, 8, 3), (16, 256, 64, 1, 8, 4),
        (32, 64, 128, 1, 4, 3), (32, 128, 64, 1, 4, 4), (32, 128, 128, 1, 4, 3),
        (32, 256, 64, 1, 8, 3), (32, 256, 128, 16, 4, 2), (32, 256, 128, 1, 8, 2),
        (64, 64, 128, 1, 4, 3), (64, 128, 64, 1, 4, 3), (64, 128, 64, 8, 4, 4),
        (64, 128, 128, 8, 4, 2), (64, 256, 64, 8, 4, 3), (64, 256, 64, 8, 8, 3),
        (128, 128, 64, 8, 4, 3), (128, 128, 64, 16, 8, 3), (128, 128, 64, 16, 8, 4),
        (128, 128, 128, 8, 8, 2), (128, 256, 64, 16, 8, 3), (128, 256, 64, 16, 8, 4),
        (128, 128, 64, 8, 4, 4), (128, 256, 64, 8, 8, 3), (256, 128, 64, 8, 8, 3),
    )
)  # fmt: skip
FEW_TILES = tuple(
    FewTile(*sizes)
    for sizes in (
        (4, 256, 4), (4, 512, 4), (8, 256, 4), (8, 512, 4), (8, 1024, 4), (8, 1024, 8),
        (16, 128, 4), (16, 256, 4), (16, 256, 8), (16, 512, 4), (16, 512, 8), (32, 256, 8),
        (4, 256, 2), (4, 512, 2), (8, 256, 2), (8, 512, 2), (4, 1024, 4), (2, 1024, 2),
    )
)  # fmt: skip

T = TypeVar("T")


class Tuning:
    """The search for one shape on one GPU."""

    def __init__(
        self, shape: ExpertShape, layers: Sequence[Layer], timer: Timer, *, seconds: float
    ) -> None:
        self._shape = shape
        self._layers = layers
        self._timer = timer
        self._end_s = time.monotonic() + seconds

    def plan(self, tokens: Sequence[int] = TUNED_TOKENS) -> TilePlan:
        """The fastest tilings; reports what was tried on standard error."""
        found = [(size, *self._best_pair(size)) for size in tokens]
        pairs = [replace(pair, max_tokens=size) for size, pair, _ in found]
        pairs[-1] = replace(pairs[-1], max_tokens=ALWAYS)
        one = self._step(1)
        few_up, _ = self._best(FEW_TILES, one.few_gate_up)
        few_down, _ = self._best(FEW_TILES, one.few_down)
        plan = TilePlan(
            few_up_to=0, few_gate_up=few_up, few_down=few_down, pairs=tuple(_merged(pairs))
        )
        plan = replace(plan, few_up_to=self._few_up_to(plan))
        return self._with_prefetches(plan)

    def _best_pair(self, num_tokens: int) -> tuple[Pair, float]:
        """Tiles of both products with one height, and what they and the alignment take."""
        step = self._step(num_tokens)
        best: tuple[Pair, float] | None = None
        for block_m in heights(self._shape, num_tokens):
            tiles = [tile for tile in TILES if tile.block_m == block_m]
            gate_up, gate_up_us = self._best(tiles, step.gate_up)
            down, down_us = self._best(tiles, step.down)
            total_us = gate_up_us + down_us + self._timer(step.align(block_m))
            _say(
                f"{num_tokens} tokens: {gate_up} {gate_up_us:.1f} us, {down} {down_us:.1f} us,"
                f" with alignment {total_us:.1f} us"
            )
            if best is None or total_us < best[1]:
                best = Pair(max_tokens=num_tokens, gate_up=gate_up, down=down), total_us
        assert best is not None, "no tile has a height for so many tokens"
        return best

    def _few_up_to(self, plan: TilePlan) -> int:
        """The most tokens for which the kernels of few tokens take less time, router included."""
        few_up_to = 0
        for num_tokens in FEW_TOKENS:
            step = self._step(num_tokens)
            few_us = self._timer(step.whole(replace(plan, few_up_to=num_tokens)))
            sorted_us = self._timer(step.whole(plan))
            _say(f"{num_tokens} tokens: few {few_us:.1f} us, sorted {sorted_us:.1f} us")
            if few_us >= sorted_us:
                break
            few_up_to = num_tokens
        return few_up_to

    def _with_prefetches(self, plan: TilePlan) -> TilePlan:
        """The second product with as many columns prefetched as make the whole step fastest."""
        if plan.few_up_to > 0:
            few_plans = [
                replace(plan, few_down=replace(plan.few_down, prefetch_k=k)) for k in PREFETCHES
            ]
            plan, _ = self._best(few_plans, self._step(1).whole)
        for index, pair in enumerate(plan.pairs):
            if plan.few_up_to < pair.max_tokens <= MAX_PREFETCHING_TOKENS:
                downs = [replace(pair.down, prefetch_k=k) for k in PREFETCHES]
                plans = [_with_down(plan, index, down) for down in downs]
                plan, took_us = self._best(plans, self._step(pair.max_tokens).whole)
                prefetch_k = plan.pairs[index].down.prefetch_k
                _say(f"{pair.max_tokens} tokens: {prefetch_k} columns prefetched, {took_us:.1f} us")
        return plan

    def _best(self, tiles: Sequence[T], calls: Callable[[T], list[Call]]) -> tuple[T, float]:
        """The fastest tile that runs; of those tried before time was over."""
        best: tuple[T, float] | None = None
        for tile in tiles:
            if best is not None and time.monotonic() > self._end_s:
                break
            try:
                took_us = self._timer(calls(tile))
            except Exception as error:  # noqa: BLE001 - it does not fit, or does not compile
                _say(f"{tile}: {type(error).__name__} {str(error)[:100]}")
                continue
            if best is None or took_us < best[1]:
                best = tile, took_us
        if best is None:
            raise RuntimeError("none of the tiles runs")
        return best

    def _step(self, num_tokens: int) -> MoeStep:
        return MoeStep(self._shape, self._layers, num_tokens)


def heights(shape: ExpertShape, num_tokens: int) -> list[int]:
    """Heights of tiles that may be best: around the average number of routes an expert."""
    average = num_tokens * shape.num_active / shape.num_experts
    if average <= 8:
        return [16]
    if average <= 16:
        return [16, 32]
    if average <= 48:
        return [16, 32, 64]
    if average <= 96:
        return [32, 64, 128]
    return [64, 128] if average <= 256 else [128, 256]


def _with_down(plan: TilePlan, index: int, down: Tile) -> TilePlan:
    pairs = list(plan.pairs)
    pairs[index] = replace(pairs[index], down=down)
    return replace(plan, pairs=tuple(pairs))


def _merged(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Without pairs whose tiles are those of the next."""
    for pair, after in zip(pairs, [*pairs[1:], None], strict=True):
        if after is None or (pair.gate_up, pair.down) != (after.gate_up, after.down):
            yield pair


def render_plan(gpu_name: str, shape: ExpertShape, plan: TilePlan) -> str:
    """The entry of `kernels.moe.tiles.TUNED`."""
    few = {
        name: f"FewTile({tile.block_n}, {tile.block_k}, {tile.num_warps}{_prefetch(tile)})"
        for name, tile in (("few_gate_up", plan.few_gate_up), ("few_down", plan.few_down))
    }
    pairs = "\n".join(
        f"            Pair(max_tokens={'ALWAYS' if pair.max_tokens == ALWAYS else pair.max_tokens},"
        f" gate_up={_code(pair.gate_up)}, down={_code(pair.down)}),"
        for pair in plan.pairs
    )
    few_lines = "".join(f"            {name}={tile},\n" for name, tile in few.items())
    return (
        f'    "{gpu_name}": {{\n        {shape}: TilePlan(\n'
        f"            few_up_to={plan.few_up_to},\n{few_lines}"
        f"            pairs=(\n{pairs}\n            ),\n        ),\n    }},"
    )


def _code(tile: Tile) -> str:
    sizes = (
        tile.block_m, tile.block_n, tile.block_k, tile.group_m, tile.num_warps, tile.num_stages,
    )  # fmt: skip
    by_tma = ", by_tma=True" if tile.by_tma else ""
    return f"Tile({', '.join(map(str, sizes))}{by_tma}{_prefetch(tile)})"


def _prefetch(tile: Tile | FewTile) -> str:
    return f", prefetch_k={tile.prefetch_k}" if tile.prefetch_k else ""


# ---- compiling in several processes --------------------------------------------------------------


def compile_all(shape: ExpertShape, tokens: Sequence[int] = TUNED_TOKENS) -> None:
    """Fill Triton's cache on disk with all that a tuning will run."""
    used = {height for size in tokens for height in heights(shape, size)}
    tiles: list[Tile | FewTile] = [tile for tile in TILES if tile.block_m in used]
    tiles += FEW_TILES
    parts = [tiles[i::NUM_PROCESSES] for i in range(NUM_PROCESSES)]
    try:
        with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn")) as pool:
            for line in pool.map(partial(compile_tiles, shape), parts):
                if line:
                    _say(line)
    except Exception as error:  # noqa: BLE001 - then they are compiled one after the other
        _say(f"compiling in several processes: {type(error).__name__} {error}")


def compile_tiles(shape: ExpertShape, tiles: Sequence[Tile | FewTile], device: str = "cuda") -> str:
    """Run each product once, for one token without experts; returns what could not be compiled."""
    k, hidden, inner = shape.num_active, shape.hidden, shape.inner

    def zeros(*sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=torch.bfloat16, device=device)

    x, rows = zeros(1, hidden), zeros(k, inner)
    gate_up, down = zeros(1, 2 * inner, hidden), zeros(1, hidden, inner)
    ids = torch.full((1, k), -1, dtype=torch.int32, device=device)
    routes = Routes(ids=ids, weights=torch.zeros(1, k, device=device))
    failed = []
    for tile in tiles:
        try:
            if isinstance(tile, FewTile):
                few_gate_up(x, gate_up, routes, tile)
                few_down(rows, down, routes, tile)
            else:
                none = torch.full((1, tile.block_m), -1, dtype=torch.int32, device=device)
                blocks = Blocks(routes=none, experts=none[0, :1])
                grouped_gate_up(x, gate_up, routes, blocks, tile)
                grouped_down(zeros(tile.block_m, inner), down, routes, blocks, tile)
        except Exception as error:  # noqa: BLE001 - the tuning leaves it out too
            failed.append(f"{tile}: {type(error).__name__}")
    return "; ".join(failed)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
