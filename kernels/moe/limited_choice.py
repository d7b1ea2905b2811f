"""The choice of experts within groups on a GPU (DeepSeek-V2, V3); `Selection` states the rule.

    s = softmax(logits) or sigmoid(logits);  r = s + bias
    the best `num_chosen_groups` groups by their best r (sigmoid: the sum of their best two)
    ids = the k largest r in them, of equal ones the lower index first;  weights = s of ids,
    divided by their sum if `normalises`, times scale

One kernel after the product that makes the logits (router.py), whose parts it adds in their order.
Padding (slot -1) gets no expert. A token whose logits are not finite gets some experts and weights
that are NaN. Torch twin: `kernels.moe.reference.route`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.moe.routes import Routes, Selection
from kernels.pdl import pdl_supported

_ALONE_TOKENS = 256  # up to here a program has one token


@triton.jit
def _best(values, experts, NUM: tl.constexpr):
    """Of each line the largest value, and the lowest index that has it."""
    best = tl.max(values, axis=1)
    index = tl.min(tl.where(values == best[:, None], experts[None, :], NUM), axis=1)
    return best, index


@triton.jit
def _in_best_groups(
    ranked,
    experts,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """`ranked` with -inf for experts of groups that are not chosen; of equal groups the first."""
    nothing: tl.constexpr = float("-inf")
    groups = tl.arange(0, BLOCK_G)
    of_groups = tl.full((BLOCK_T, BLOCK_G), nothing, dtype=tl.float32)
    for group in tl.static_range(NUM_GROUPS):
        members = tl.where((experts // GROUP_SIZE == group)[None, :], ranked, nothing)
        best, index = _best(members, experts, BLOCK_E)
        if IS_SIGMOID:
            others = tl.where(experts[None, :] == index[:, None], nothing, members)
            best += tl.max(others, axis=1)
        of_groups = tl.where((groups == group)[None, :], best[:, None], of_groups)
    is_chosen = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.int1)
    for _ in tl.static_range(NUM_CHOSEN):
        _, group = _best(of_groups, groups, BLOCK_G)
        is_chosen = is_chosen | ((experts // GROUP_SIZE)[None, :] == group[:, None])
        of_groups = tl.where(groups[None, :] == group[:, None], nothing, of_groups)
    return tl.where(is_chosen, ranked, nothing)


@triton.jit(
    do_not_specialize=["num_tokens", "has_slots"], do_not_specialize_on_alignment=["slots_ptr"]
)
def _moe_limited_choice_kernel(
    logits_ptr,  # fp32 [SPLIT_K, num_tokens, E]
    bias_ptr,  # fp32 [E] if HAS_BIAS
    slots_ptr,  # int32 [num_tokens] if has_slots
    # outputs
    ids_ptr,  # int32 [num_tokens, TOP_K]
    weights_ptr,  # fp32 [num_tokens, TOP_K]
    # constants
    num_tokens,
    has_slots,  # 0 or 1: no constant, for then a second kernel would have to be compiled
    scale: tl.constexpr,
    E: tl.constexpr,
    SPLIT_K: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALISES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    NOTHING: tl.constexpr = float("-inf")
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = tokens < num_tokens
    experts = tl.arange(0, BLOCK_E)
    is_expert = (experts < E)[None, :]
    mask = is_token[:, None] & is_expert
    logits = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    for part in tl.static_range(SPLIT_K):
        offsets = (part * num_tokens.to(tl.int64) + tokens[:, None]) * E + experts[None, :]
        logits += tl.load(logits_ptr + offsets, mask=mask, other=0.0)
    zero = tl.sum(logits - logits, axis=1)  # NaN where a logit is not finite
    is_finite = (zero == 0.0)[:, None]
    logits = tl.where(is_finite, logits, 0.0)
    if IS_SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        shown = tl.where(is_expert, logits, NOTHING)
        shares = tl.exp(shown - tl.max(shown, axis=1)[:, None])
        scores = shares / tl.sum(shares, axis=1)[:, None]
    ranked = scores
    if HAS_BIAS:
        ranked += tl.load(bias_ptr + experts, mask=experts < E, other=0.0)[None, :]
    ranked = tl.where(is_expert, ranked, NOTHING)

    if NUM_GROUPS > NUM_CHOSEN:
        ranked = _in_best_groups(
            ranked, experts, E // NUM_GROUPS, NUM_GROUPS, NUM_CHOSEN, IS_SIGMOID,
            BLOCK_T, BLOCK_E, BLOCK_G,
        )  # fmt: skip
    places = tl.arange(0, BLOCK_TOP)
    ids = tl.zeros((BLOCK_T, BLOCK_TOP), dtype=tl.int32)
    weights = tl.zeros((BLOCK_T, BLOCK_TOP), dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        _, chosen = _best(ranked, experts, BLOCK_E)
        is_it = experts[None, :] == chosen[:, None]
        weight = tl.sum(tl.where(is_it, scores, 0.0), axis=1)
        ids = tl.where((places == place)[None, :], chosen[:, None], ids)
        weights = tl.where((places == place)[None, :], weight[:, None], weights)
        ranked = tl.where(is_it, NOTHING, ranked)
    if NORMALISES:
        weights = weights / tl.sum(weights, axis=1)[:, None]
    weights = tl.where(is_finite, weights * scale, float("nan"))
    slots = tl.load(slots_ptr + tokens, mask=is_token & (has_slots != 0), other=0)
    ids = tl.where((slots >= 0)[:, None], ids, -1)
    offsets = tokens[:, None] * TOP_K + places[None, :]
    is_place = is_token[:, None] & (places < TOP_K)[None, :]
    tl.store(ids_ptr + offsets, ids, mask=is_place)
    tl.store(weights_ptr + offsets, weights, mask=is_place)


def choose_limited(
    logits: Tensor,
    num_active: int,
    selection: Selection,
    *,
    normalises: bool,
    slots: Tensor | None = None,
    is_deterministic: bool = False,
) -> Routes:
    """logits: fp32 [parts, T, experts], to be added; slots: int32 [T] or None."""
    split_k, num_tokens, num_experts = logits.shape
    assert 0 < num_active <= num_experts, f"{num_active} of {num_experts} experts"
    assert num_experts % selection.num_groups == 0, f"{num_experts} in {selection.num_groups}"
    bias = selection.bias
    assert bias is None or bias.dtype == torch.float32, f"a bias in {bias.dtype}"
    ids = torch.empty((num_tokens, num_active), dtype=torch.int32, device=logits.device)
    weights = torch.empty_like(ids, dtype=torch.float32)
    use_pdl = pdl_supported(logits.device)
    block_t = 1 if is_deterministic or num_tokens <= _ALONE_TOKENS else 4
    _moe_limited_choice_kernel[(triton.cdiv(num_tokens, block_t),)](
        logits,
        weights if bias is None else bias,
        ids if slots is None else slots,
        ids,
        weights,
        num_tokens,
        int(slots is not None),
        scale=selection.scale,
        E=num_experts,
        SPLIT_K=split_k,
        TOP_K=num_active,
        NUM_GROUPS=selection.num_groups,
        NUM_CHOSEN=selection.num_chosen_groups,
        IS_SIGMOID=selection.scores == "sigmoid",
        HAS_BIAS=bias is not None,
        NORMALISES=normalises,
        BLOCK_T=block_t,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_G=triton.next_power_of_2(selection.num_groups),
        BLOCK_TOP=triton.next_power_of_2(num_active),
        USE_PDL=use_pdl,
        num_warps=block_t,
        launch_pdl=use_pdl,
    )
    return Routes(ids=ids, weights=weights)
