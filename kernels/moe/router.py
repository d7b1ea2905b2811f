"""The router of a mixture of experts on a GPU: logits, softmax, the best experts, their weights.

    p = softmax(x Wr^T (+ br));  ids = the k largest p, of equal ones the lower index first
    weights = p, divided by their sum if `normalises`

Two kernels. The first computes logits in fp32, the columns of the weight in `split_k` parts, so
that few tokens too occupy many multiprocessors. The second adds the parts in their order and
chooses. Padding (slot -1) gets no expert. A token whose logits are not finite gets some experts
and weights that are NaN: its own output shows it, and no other's. Torch twin:
`kernels.moe.reference.route`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.small import prefetch_rows
from kernels.moe.limited_choice import choose_limited
from kernels.moe.routes import Routes, Selection
from kernels.pdl import pdl_supported


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTile:
    """The tiling of the logits' product; sizes in elements."""

    block_m: int  # tokens
    block_n: int  # experts
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int


_FEW = RouterTile(block_m=16, block_n=32, block_k=128, split_k=8, num_warps=4, num_stages=2)
_MANY = RouterTile(block_m=64, block_n=64, block_k=64, split_k=1, num_warps=4, num_stages=4)
# One tiling for any number of tokens, so that a token's sums have one order.
_INVARIANT = RouterTile(block_m=64, block_n=32, block_k=64, split_k=4, num_warps=4, num_stages=3)
FEW_TOKENS = 256
_PREFETCH_K = tl.constexpr(256)  # columns prefetched while the norm before still runs


def router_tile(num_tokens: int, *, is_deterministic: bool) -> RouterTile:
    if is_deterministic:
        return _INVARIANT
    return _FEW if num_tokens <= FEW_TOKENS else _MANY


@triton.jit(do_not_specialize=["num_tokens"])
def _moe_router_kernel(
    x_ptr,  # [num_tokens, K]
    weight_ptr,  # [E, K]
    # outputs
    logits_ptr,  # fp32 [SPLIT_K, num_tokens, E]
    # constants
    num_tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    PART: tl.constexpr = (K + SPLIT_K * BLOCK_K - 1) // (SPLIT_K * BLOCK_K) * BLOCK_K
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    experts = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        first_rows = tl.minimum(experts, E - 1).to(tl.int64)
        prefetch_rows(weight_ptr, first_rows, part * PART, K, _PREFETCH_K)
        tl.extra.cuda.gdc_wait()
    is_token = (tokens < num_tokens)[:, None]
    k_offsets = part * PART + tl.arange(0, BLOCK_K)
    # Experts past the end repeat the last and are not stored.
    rows = tl.minimum(experts, E - 1)
    x_pointers = x_ptr + tokens[:, None].to(tl.int64) * K + k_offsets[None, :]
    w_pointers = weight_ptr + rows[:, None] * K + k_offsets[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, PART, BLOCK_K):
        is_column = (k_offsets + k < K)[None, :]
        x = tl.load(x_pointers + k, mask=is_token & is_column, other=0.0)
        w = tl.load(w_pointers + k, mask=is_column, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    offsets = (part * num_tokens.to(tl.int64) + tokens[:, None]) * E + experts[None, :]
    tl.store(logits_ptr + offsets, acc, mask=is_token & (experts < E)[None, :])


@triton.jit(
    do_not_specialize=["num_tokens", "has_slots"], do_not_specialize_on_alignment=["slots_ptr"]
)
def _moe_top_k_kernel(
    logits_ptr,  # fp32 [SPLIT_K, num_tokens, E]
    slots_ptr,  # int32 [num_tokens] if has_slots
    bias_ptr,  # [E] or None
    # outputs
    ids_ptr,  # int32 [num_tokens, TOP_K]
    weights_ptr,  # fp32 [num_tokens, TOP_K]
    # constants
    num_tokens,
    has_slots,  # 0 or 1: no constant, for then a second kernel would have to be compiled
    E: tl.constexpr,
    SPLIT_K: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = tokens < num_tokens
    experts = tl.arange(0, BLOCK_E)
    places = tl.arange(0, BLOCK_TOP)
    mask = is_token[:, None] & (experts < E)[None, :]
    logits = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    for part in tl.static_range(SPLIT_K):
        offsets = (part * num_tokens.to(tl.int64) + tokens[:, None]) * E + experts[None, :]
        logits += tl.load(logits_ptr + offsets, mask=mask, other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + experts, mask=experts < E, other=0.0)
        logits += bias.to(tl.float32)[None, :]
    logits = tl.where((experts < E)[None, :], logits, float("-inf"))
    shares = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    total = tl.sum(shares, axis=1)
    shares = shares / total[:, None]
    # Experts past the end come after all others, also after those of a share of 0.
    shares = tl.where((total == total)[:, None], shares, 0.0)
    left = tl.where((experts < E)[None, :], shares, -1.0)
    ids = tl.zeros((BLOCK_T, BLOCK_TOP), dtype=tl.int32)
    weights = tl.zeros((BLOCK_T, BLOCK_TOP), dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        best = tl.max(left, axis=1)
        is_best = left == best[:, None]
        chosen = tl.min(tl.where(is_best, experts[None, :], BLOCK_E), axis=1)
        ids = tl.where((places == place)[None, :], chosen[:, None], ids)
        weights = tl.where((places == place)[None, :], best[:, None], weights)
        left = tl.where(experts[None, :] == chosen[:, None], -2.0, left)
    if NORMALISES:
        weights = weights / tl.sum(weights, axis=1)[:, None]
    weights = tl.where((total == total)[:, None], weights, float("nan"))
    slots = tl.load(slots_ptr + tokens, mask=is_token & (has_slots != 0), other=0)
    ids = tl.where((slots >= 0)[:, None], ids, -1)
    offsets = tokens[:, None] * TOP_K + places[None, :]
    is_place = is_token[:, None] & (places < TOP_K)[None, :]
    tl.store(ids_ptr + offsets, ids, mask=is_place)
    tl.store(weights_ptr + offsets, weights, mask=is_place)


def router_logits(x: Tensor, weight: Tensor, tile: RouterTile) -> Tensor:
    """Parts of x weight^T: x [T, hidden], weight [experts, hidden]; fp32 [parts, T, experts]."""
    num_tokens, num_columns = x.shape
    num_experts = weight.shape[0]
    assert weight.shape[1] == num_columns, f"{x.shape} against {weight.shape}"
    assert x.dtype == weight.dtype, f"{x.dtype} against {weight.dtype}"
    assert x.is_contiguous(), f"x has strides {x.stride()}"
    assert weight.is_contiguous(), f"the weight has strides {weight.stride()}"
    logits = torch.empty(
        (tile.split_k, num_tokens, num_experts), dtype=torch.float32, device=x.device
    )
    use_pdl = pdl_supported(x.device)
    num_tiles = (
        triton.cdiv(num_tokens, tile.block_m),
        triton.cdiv(num_experts, tile.block_n),
        tile.split_k,
    )
    _moe_router_kernel[num_tiles](
        x,
        weight,
        logits,
        num_tokens,
        E=num_experts,
        K=num_columns,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SPLIT_K=tile.split_k,
        USE_PDL=use_pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=use_pdl,
    )
    return logits


def top_k(
    logits: Tensor,
    num_active: int,
    *,
    normalises: bool,
    slots: Tensor | None = None,
    is_deterministic: bool = False,
    bias: Tensor | None = None,
) -> Routes:
    """logits: fp32 [parts, T, experts], to be added; slots: int32 [T] or None; see `route`."""
    split_k, num_tokens, num_experts = logits.shape
    assert 0 < num_active <= num_experts, f"{num_active} of {num_experts} experts"
    ids = torch.empty((num_tokens, num_active), dtype=torch.int32, device=logits.device)
    weights = torch.empty_like(ids, dtype=torch.float32)
    use_pdl = pdl_supported(logits.device)
    block_t = 1 if is_deterministic or num_tokens <= FEW_TOKENS else 4
    _moe_top_k_kernel[(triton.cdiv(num_tokens, block_t),)](
        logits,
        ids if slots is None else slots,
        bias,
        ids,
        weights,
        num_tokens,
        int(slots is not None),
        E=num_experts,
        SPLIT_K=split_k,
        TOP_K=num_active,
        NORMALISES=normalises,
        BLOCK_T=block_t,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_TOP=triton.next_power_of_2(num_active),
        USE_PDL=use_pdl,
        num_warps=block_t,
        launch_pdl=use_pdl,
    )
    return Routes(ids=ids, weights=weights)


def route(
    x: Tensor,
    weight: Tensor,
    num_active: int,
    *,
    normalises: bool,
    slots: Tensor | None = None,
    is_deterministic: bool = False,
    bias: Tensor | None = None,
    selection: Selection | None = None,
) -> Routes:
    """The `num_active` best experts of each token.

    x: [T, hidden], weight: [experts, hidden], slots: int32 [T], -1 = padding, or None = no padding.
    bias: [experts], of the logits; not with a selection. selection: None = those of the largest
    softmax. `is_deterministic`: a token's routes do not depend on the tokens beside it.
    """
    num_tokens = x.shape[0]
    if num_tokens == 0:
        ids = torch.empty((0, num_active), dtype=torch.int32, device=x.device)
        return Routes(ids=ids, weights=ids.float())
    tile = router_tile(num_tokens, is_deterministic=is_deterministic)
    logits = router_logits(x, weight, tile)
    if selection is not None:
        return choose_limited(
            logits,
            num_active,
            selection,
            normalises=normalises,
            slots=slots,
            is_deterministic=is_deterministic,
        )
    return top_k(
        logits,
        num_active,
        normalises=normalises,
        slots=slots,
        is_deterministic=is_deterministic,
        bias=bias,
    )
