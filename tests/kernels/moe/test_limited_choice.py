"""The choice of experts within groups: twin against transformers, kernel against its twin."""

from itertools import product
from typing import Any

import pytest
import torch

from kernels.moe import reference
from kernels.moe.routes import Routes, Selection
from tests.kernels.interpreter import drawn, run_interpreted

HIDDEN = 48


def _inputs(num_tokens: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(num_tokens, HIDDEN), torch.randn(num_experts, HIDDEN) * HIDDEN**-0.5


def _dense(routes: Routes, num_experts: int) -> torch.Tensor:
    """[T, experts] weights."""
    found = torch.zeros(len(routes.ids), num_experts)
    return found.scatter_(1, routes.ids.long(), routes.weights)


@pytest.mark.parametrize(("num_groups", "num_chosen"), [(1, 1), (4, 2), (6, 5)])
@pytest.mark.parametrize("normalises", [False, True])
def test_sigmoid_routes_are_those_of_transformers(
    num_groups: int, num_chosen: int, normalises: bool
) -> None:
    # Imported late: the interpreter's process reads this file, too.
    from transformers.models.deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    x, weight = _inputs(33, 24)
    config = DeepseekV3Config(
        hidden_size=HIDDEN, n_routed_experts=24, num_experts_per_tok=4, n_group=num_groups,
        topk_group=num_chosen, norm_topk_prob=normalises, routed_scaling_factor=2.5,
    )  # fmt: skip
    router = DeepseekV3TopkRouter(config)
    bias = 0.4 * torch.randn(24)
    router.weight.data.copy_(weight)
    router.e_score_correction_bias.copy_(bias)
    _, weights, ids = router(x)
    selection = Selection(
        scores="sigmoid", bias=bias, num_groups=num_groups, num_chosen_groups=num_chosen, scale=2.5
    )
    ours = reference.route(x, weight, 4, normalises=normalises, selection=selection)
    theirs = _dense(Routes(ids=ids, weights=weights), 24)
    torch.testing.assert_close(_dense(ours, 24), theirs)


@pytest.mark.parametrize(("num_groups", "num_chosen"), [(1, 1), (4, 2), (6, 5)])
def test_softmax_routes_within_groups_are_those_of_transformers(
    num_groups: int, num_chosen: int
) -> None:
    # Imported late: the interpreter's process reads this file, too.
    from transformers.models.deepseek_v2 import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    x, weight = _inputs(33, 24)
    config = DeepseekV2Config(
        hidden_size=HIDDEN, num_attention_heads=4, n_routed_experts=24, num_experts_per_tok=4,
        n_group=num_groups, topk_group=num_chosen, topk_method="group_limited_greedy",
        routed_scaling_factor=16.0,
    )  # fmt: skip
    router = DeepseekV2TopkRouter(config)
    router.weight.data.copy_(weight)
    _, weights, ids = router(x)
    selection = Selection(
        scores="softmax", bias=None, num_groups=num_groups, num_chosen_groups=num_chosen, scale=16.0
    )
    ours = reference.route(x, weight, 4, normalises=False, selection=selection)
    theirs = _dense(Routes(ids=ids, weights=weights), 24)
    torch.testing.assert_close(_dense(ours, 24), theirs)


# ---- the kernel ----------------------------------------------------------------------------------

# Experts, groups, chosen groups, experts a token; the last are DeepSeek-V3's and V2's.
CASES = [(6, 1, 1, 3), (12, 4, 2, 3), (15, 3, 3, 1), (21, 7, 2, 5), (256, 8, 4, 8), (160, 8, 3, 6)]


def check_interpreted() -> None:
    from kernels.moe import limited_choice

    limited_choice._ALONE_TOKENS = 2
    kinds = list(product(CASES, ("sigmoid", "softmax"), (False, True)))
    check_kernel(drawn(kinds, 3), "cpu", few=2, many=6)


def _is_clear(
    x: torch.Tensor, weight: torch.Tensor, num_active: int, twin: Routes, arguments: Any
) -> torch.Tensor:
    """bool [T]: whether rounding cannot change the choice. Equal scores stay equal, and count."""
    is_clear = x.isfinite().all(1)
    for factor in (1 - 2**-14, 1 + 2**-14):  # logits stay exact
        other = reference.route(x, weight * factor, num_active, **arguments)
        is_clear &= (other.ids.sort(1)[0] == twin.ids.sort(1)[0]).all(1)
    return is_clear


def check_kernel(cases: list[Any], device: str, few: int, many: int) -> None:
    from kernels.moe.router import route

    for case, scores, has_bias in cases:
        num_experts, num_groups, num_chosen, num_active = case
        bias = 0.3 * torch.randn(num_experts, device=device) if has_bias else None
        selection = Selection(
            scores=scores, bias=bias, num_groups=num_groups, num_chosen_groups=num_chosen, scale=2.5
        )
        for num_tokens, normalises in ((few, True), (many, False)):
            # Small integers: logits are exact in any order of addition, and many are equal. None is
            # negative: sigmoids of opposite numbers add up to 1, the same but for their rounding.
            x = torch.randint(0, 3, (num_tokens, HIDDEN), device=device).float()
            weight = torch.randint(0, 2, (num_experts, HIDDEN), device=device).float() / 16
            slots = torch.arange(num_tokens, dtype=torch.int32, device=device) - 1
            x[-1, 3] = torch.inf
            arguments = {"normalises": normalises, "slots": slots, "selection": selection}
            ours = route(x, weight, num_active, **arguments)
            twin = reference.route(x, weight, num_active, **arguments)
            assert bool((ours.ids[0] == -1).all())
            is_clear = _is_clear(x, weight, num_active, twin, arguments)
            assert is_clear.sum() >= (num_tokens - 1) // 2, case
            chosen, expected = ours.ids[is_clear].sort(1)[0], twin.ids[is_clear].sort(1)[0]
            assert torch.equal(chosen, expected), case
            torch.testing.assert_close(ours.weights[is_clear], twin.weights[is_clear])
            assert bool(ours.weights[-1].isnan().all())
            assert bool(((ours.ids[-1] >= 0) & (ours.ids[-1] < num_experts)).all())
            assert bool(twin.weights[-1].isnan().all())


@pytest.mark.slow
def test_the_kernel_chooses_as_its_twin() -> None:
    run_interpreted("tests.kernels.moe.test_limited_choice:check_interpreted")


@pytest.mark.gpu
def test_the_kernel_chooses_as_its_twin_on_a_gpu() -> None:
    kinds = product(CASES, ("sigmoid", "softmax"), (False, True))
    check_kernel(list(kinds), "cuda", few=250, many=3000)
