"""How the experts' products are cut into tiles, by shape, number of tokens and GPU.

    up to `few_up_to` tokens   kernels.moe.few: a program reads rows of one expert for one token
    more                       kernels.moe.grouped: routes sorted by expert, `block_m` to a tile

A GPU's table is what `python -m load_tests.lab.bench_moe --tune` printed on it. Other GPUs and
shapes get tiles by the average number of routes an expert, made to fit the shared memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kernels.device import DeviceProperties, stages_that_fit

ALWAYS = 2**30  # more tokens than any step has


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The sizes of a mixture's weights."""

    num_experts: int
    num_active: int
    hidden: int
    inner: int  # intermediate size of an expert


@dataclass(frozen=True, slots=True)
class Tile:
    """The tiling of one grouped product; sizes in elements."""

    block_m: int  # routes of one expert
    block_n: int  # weight rows, of gate and up together
    block_k: int
    group_m: int  # route tiles that share weight tiles in the L2 cache
    num_warps: int
    num_stages: int
    # The copy engine loads the weight: compute capability 9.0 and later.
    by_tma: bool = field(default=False, kw_only=True)
    # Columns of the second weight prefetched to the L2 cache while the first product still runs: 0
    # or a power of two >= 64.
    prefetch_k: int = field(default=0, kw_only=True)
    # Steps of columns that a stage holds, for quantised weights.
    unroll: int = field(default=1, kw_only=True)

    def stage_bytes(self, element_bytes: int) -> int:
        """Shared memory of one stage."""
        return element_bytes * self.block_k * (self.block_m + self.block_n)


@dataclass(frozen=True, slots=True)
class FewTile:
    """The tiling of a product without sorted routes; sizes in elements."""

    block_n: int  # outputs
    block_k: int
    num_warps: int
    prefetch_k: int = field(default=0, kw_only=True)  # as in `Tile`


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The tiles of both products of a step of up to `max_tokens` tokens; equal in `block_m`."""

    max_tokens: int
    gate_up: Tile
    down: Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """The tilings of one mixture on one GPU."""

    few_up_to: int  # tokens; 0 = the kernels of few tokens are not used
    few_gate_up: FewTile
    few_down: FewTile
    pairs: tuple[Pair, ...]  # ascending; the last is for any number of tokens
    # Quantised experts: from so many tokens on they are made matrices first, with this tile then.
    matrices_from: int = ALWAYS
    matrix_tile: Tile | None = None
    # Tokens, of more than `few_up_to`, up to which the products compute an expert that all tokens
    # pass along with the others; not by tiles of the copy engine, and no columns prefetched.
    joined_up_to: int = 0

    def pair(self, num_tokens: int) -> Pair:
        return next(pair for pair in self.pairs if num_tokens <= pair.max_tokens)

    def tiles(self, num_tokens: int) -> tuple[Tile, Tile]:
        """Of gate and up, and of down; of more tokens than `few_up_to`."""
        if num_tokens >= self.matrices_from:
            assert self.matrix_tile is not None, "matrices are multiplied by tiles"
            return self.matrix_tile, self.matrix_tile
        pair = self.pair(num_tokens)
        return pair.gate_up, pair.down

    @property
    def ends(self) -> tuple[int, ...]:
        """Numbers of tokens up to which one of the tilings is used, but for the last."""
        ends = (self.few_up_to, *(pair.max_tokens for pair in self.pairs[:-1]))
        if self.matrices_from < ALWAYS:
            ends = (*ends, self.matrices_from - 1)
        if self.joined_up_to > self.few_up_to:
            ends = (*ends, self.joined_up_to)
        return tuple(end for end in ends if end > 0)


# Of one token of both shapes below on an H200 within 6 % of the best for gate and up, 9 % for down.
_FEW_GATE_UP = _FEW_DOWN = FewTile(2, 1024, 4)
_FEW_TOKENS = 4


def _pair(max_tokens: int, gate_up: Tile, down: Tile) -> Pair:
    return Pair(max_tokens=max_tokens, gate_up=gate_up, down=down)


def _same(max_tokens: int, *sizes: int, by_tma: bool = False) -> Pair:
    tile = Tile(*sizes, by_tma=by_tma)
    return _pair(max_tokens, tile, tile)


# By the name that CUDA gives a GPU.
TUNED: dict[str, dict[ExpertShape, TilePlan]] = {
    "NVIDIA H200": {
        # Qwen3-30B-A3B. Where to begin, from vLLM's table of the same shape; of one token compared.
        ExpertShape(num_experts=128, num_active=8, hidden=2048, inner=768): TilePlan(
            few_up_to=_FEW_TOKENS,
            few_gate_up=FewTile(2, 1024, 4),
            few_down=FewTile(2, 512, 2),
            pairs=(
                _same(8, 16, 64, 64, 1, 4, 5),
                _same(32, 16, 64, 256, 1, 4, 2),
                _same(64, 16, 256, 128, 1, 8, 2),
                _same(128, 16, 128, 128, 1, 4, 2),
                _same(256, 32, 256, 128, 16, 4, 2),
                _same(512, 64, 128, 64, 1, 4, 3),
                _same(ALWAYS, 128, 256, 64, 16, 8, 4, by_tma=True),
            ),
        ),
        # A rank's part of the same, cut over two: compared at 1, 2, 4, 8, 16, 64, 256, 1,024 and
        # 8,192 tokens. From 65 to 1,024 tokens these are the general ones, of which none is better.
        ExpertShape(num_experts=128, num_active=8, hidden=2048, inner=384): TilePlan(
            few_up_to=8,
            few_gate_up=FewTile(2, 1024, 2),
            few_down=FewTile(4, 512, 2, prefetch_k=128),
            pairs=(
                _pair(64, Tile(16, 64, 256, 1, 4, 2, by_tma=True), Tile(16, 128, 128, 1, 4, 2)),
                _same(256, 16, 128, 128, 1, 4, 3),
                _same(512, 32, 128, 64, 4, 4, 4),
                _same(1024, 64, 128, 64, 8, 4, 3),
                _pair(
                    ALWAYS,
                    Tile(128, 256, 64, 16, 8, 3, by_tma=True),
                    Tile(128, 128, 64, 8, 4, 3, by_tma=True),
                ),
            ),
        ),
        # DeepSeek-V2-Lite: compared at 1, 2, 4, 16, 32, 64, 128, 256, 1,024 and 8,192 tokens, up to
        # 256 with the shared expert computed along.
        ExpertShape(num_experts=64, num_active=6, hidden=2048, inner=1408): TilePlan(
            few_up_to=1,
            few_gate_up=FewTile(2, 1024, 2),
            few_down=FewTile(2, 1024, 2),
            pairs=(
                _pair(24, Tile(16, 64, 256, 1, 4, 3), Tile(16, 128, 128, 1, 4, 3)),
                _pair(96, Tile(16, 256, 128, 1, 8, 2), Tile(16, 128, 128, 1, 4, 3)),
                _same(384, 64, 128, 64, 1, 4, 3),
                _same(ALWAYS, 128, 256, 64, 16, 8, 4, by_tma=True),
            ),
            joined_up_to=256,
        ),
    },
}
# One tiling for any number of tokens, so that a token's sums have one order.
_INVARIANT = Tile(64, 128, 64, 8, 4, 4)
# Routes an expert, at most -> tile.
_BY_ROUTES = (
    (16, Tile(16, 128, 128, 1, 4, 3)),
    (32, Tile(32, 128, 64, 4, 4, 4)),
    (64, Tile(64, 128, 64, 8, 4, 3)),
    (ALWAYS, Tile(128, 128, 64, 16, 8, 4)),
)
# The same of quantised experts. Their rows are the left operand, of which a tile has 64 or more.
_CODED_INVARIANT = Tile(64, 64, 128, 8, 4, 3)
_CODED_BY_ROUTES = (
    (16, Tile(16, 64, 128, 1, 4, 4)),
    (32, Tile(32, 64, 128, 4, 4, 4)),
    (64, Tile(64, 64, 128, 8, 4, 3)),
    (ALWAYS, Tile(128, 128, 64, 16, 8, 4)),
)
# Of 4 bits.
_FOUR_BIT_BY_ROUTES = (
    (16, Tile(16, 64, 128, 1, 4, 4)),
    (32, Tile(32, 64, 128, 4, 4, 4)),
    (64, Tile(64, 64, 128, 8, 4, 3)),
    (ALWAYS, Tile(128, 64, 64, 16, 4, 4)),
)
# Of `kernels.moe.mxfp4`. On an H200, gpt-oss-20b, gate and up, and down, in microseconds: 16.6 and
# 11.4 for 1 token, 69 and 39 for 16, 94 and 53 for 64, 193 and 105 for 256, 558 and 297 for 1,024.
# Prefetching the second weight gained nothing.
_MXFP4_INVARIANT = Tile(16, 64, 32, 1, 2, 3, unroll=3)
_MXFP4_BY_ROUTES = (
    (4, Tile(8, 32, 32, 1, 1, 3, unroll=3)),
    (16, Tile(16, 64, 32, 1, 2, 3, unroll=3)),
    (32, Tile(32, 64, 32, 4, 2, 4)),
    (ALWAYS, Tile(64, 64, 32, 8, 2, 3)),
)
# Routes an expert from which quantised experts are made matrices: decoding in registers takes half
# of a product's time, a matrix is written once, two bytes a number, and its products are dense. On
# an H200, gpt-oss-20b: 586 us to write both. At 128 routes an expert 333 and 190 to multiply, 558
# and 297 to do both in registers; at 2,048 routes 2,896 and 1,553.
_MATRIX_ROUTES = 256
_MATRIX_TILE = Tile(128, 256, 64, 8, 8, 4)
_TMA_CAPABILITY = (9, 0)
_LADDER = tuple(2**i for i in range(3, 15))


def is_tuned(shape: ExpertShape, device: DeviceProperties) -> bool:
    """Whether the tables have this shape on this GPU."""
    return shape in TUNED.get(device.name, {})


def build_plan(
    shape: ExpertShape,
    device: DeviceProperties,
    *,
    element_bytes: int = 2,
    is_deterministic: bool = False,
) -> TilePlan:
    """The tilings of a mixture.

    `is_deterministic`: one tiling for all numbers of tokens, so that a token's result does not
    depend on the tokens beside it.
    """
    if is_deterministic:
        tile = fitted(_INVARIANT, device, element_bytes)
        pairs: tuple[Pair, ...] = (Pair(max_tokens=ALWAYS, gate_up=tile, down=tile),)
        return TilePlan(few_up_to=0, few_gate_up=_FEW_GATE_UP, few_down=_FEW_DOWN, pairs=pairs)
    if is_tuned(shape, device) and element_bytes == 2:
        return TUNED[device.name][shape]
    pairs = _pairs_by_routes(shape, device, element_bytes)
    return TilePlan(
        few_up_to=_FEW_TOKENS, few_gate_up=_FEW_GATE_UP, few_down=_FEW_DOWN, pairs=pairs
    )


def build_coded_plan(
    shape: ExpertShape,
    fit_gate_up: Callable[[Tile], Tile],
    fit_down: Callable[[Tile], Tile],
    *,
    is_deterministic: bool = False,
    is_mxfp4: bool = False,
    matrix_device: DeviceProperties | None = None,
) -> TilePlan:
    """The tilings of a mixture of quantised experts; of FP8 not measured yet.

    fit_gate_up, fit_down: what makes a tile one for the weight's scales and the GPU.
    is_mxfp4: whether both weights are of `kernels.moe.mxfp4`.
    matrix_device: of experts of 4 bits, which can be made matrices; None = they cannot.
    """
    by_routes: tuple[tuple[int, Tile], ...] = _MXFP4_BY_ROUTES
    if not is_mxfp4:
        by_routes = _CODED_BY_ROUTES if matrix_device is None else _FOUR_BIT_BY_ROUTES
    invariant = _MXFP4_INVARIANT if is_mxfp4 else _CODED_INVARIANT
    steps = [(ALWAYS, invariant)] if is_deterministic else tiles_by_tokens(shape, by_routes)
    pairs = (
        Pair(max_tokens=most, gate_up=fit_gate_up(tile), down=fit_down(tile))
        for most, tile in steps
    )
    plan = TilePlan(few_up_to=0, few_gate_up=_FEW_GATE_UP, few_down=_FEW_DOWN, pairs=tuple(pairs))
    if is_deterministic or matrix_device is None:
        return plan
    return replace(
        plan,
        matrices_from=-(-_MATRIX_ROUTES * shape.num_experts // shape.num_active),
        matrix_tile=fitted(replace(_MATRIX_TILE, by_tma=has_tma(matrix_device)), matrix_device),
    )


def has_tma(device: DeviceProperties) -> bool:
    """Whether the GPU has a copy engine for tiles."""
    return device.capability is not None and device.capability >= _TMA_CAPABILITY


def _pairs_by_routes(
    shape: ExpertShape, device: DeviceProperties, element_bytes: int
) -> tuple[Pair, ...]:
    pairs: list[Pair] = []
    for max_tokens, wanted in tiles_by_tokens(shape, _BY_ROUTES):
        tile = fitted(wanted, device, element_bytes)
        if pairs and pairs[-1].gate_up == tile:
            pairs.pop()
        pairs.append(Pair(max_tokens=max_tokens, gate_up=tile, down=tile))
    return tuple(pairs)


def tiles_by_tokens(
    shape: ExpertShape, by_routes: tuple[tuple[int, Tile], ...]
) -> list[tuple[int, Tile]]:
    """Tokens, at most -> tile; by_routes: routes an expert, at most -> tile."""
    found: dict[Tile, int] = {}
    for max_tokens in (*_LADDER, ALWAYS):
        per_expert = max_tokens * shape.num_active / shape.num_experts
        found[next(tile for most, tile in by_routes if per_expert <= most)] = max_tokens
    return [(max_tokens, tile) for tile, max_tokens in found.items()]


def fitted(tile: Tile, device: DeviceProperties, element_bytes: int = 2) -> Tile:
    """The tile with as many stages, at least two, as the GPU's shared memory has room for."""
    while True:
        num_stages = stages_that_fit(
            tile.num_stages,
            stage_bytes=tile.stage_bytes(element_bytes),
            shared_memory_bytes=device.shared_memory_per_block_bytes,
        )
        if num_stages >= 2:
            return replace(tile, num_stages=num_stages)
        tile = replace(tile, block_k=tile.block_k // 2)
