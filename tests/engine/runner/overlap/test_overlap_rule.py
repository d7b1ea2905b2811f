"""From how many tokens two batches pay, by a cost model of the layers."""

from dataclasses import replace
from pathlib import Path

import pytest

from configs.schema import ExecutionConfig
from engine.errors import ConfigError
from engine.models.spec import load_spec
from engine.ranks.rank import Rank
from engine.runner.overlap.rule import (
    H200,
    MIN_GAIN,
    LayerCosts,
    OverlapCosts,
    OverlapRule,
    PartCosts,
    build_rule,
    layer_costs,
)
from kernels.device import DeviceProperties
from tests.harness.tiny_models import save_model

# Qwen3-30B-A3B on two ranks in bf16: 128 experts of 768, 8 a token, 32 heads and 4 KV heads of 128.
HIDDEN, EXPERTS, ACTIVE, INNER = 2048, 128, 8, 768 // 2
ATTENTION = 2 * HIDDEN * (16 + 2) * 128
MIXTURE = LayerCosts(
    parts=(
        PartCosts(weight_bytes=2 * ATTENTION, flops_per_token=2 * ATTENTION),
        PartCosts(
            weight_bytes=2 * 3 * HIDDEN * EXPERTS * INNER,
            flops_per_token=2 * 3 * HIDDEN * ACTIVE * INNER,
        ),
    ),
    sum_bytes_per_token=2 * 2 * HIDDEN * 2 / 2,
)
# DeepSeek-V2-Lite with DP attention on two ranks: 32 experts of 1,408 on each, 6 a token, of both
# ranks' tokens; two shared ones, and latent attention of 16 heads.
OTHERS = 2048 * (16 * 192 + 576 + 16 * 128 + 3 * 2 * 1408) + 512 * 16 * 256
DP_MIXTURE = LayerCosts(
    parts=(
        PartCosts(weight_bytes=2 * OTHERS, flops_per_token=2 * OTHERS),
        PartCosts(
            weight_bytes=2 * 3 * 2048 * 32 * 1408, flops_per_token=2 * 3 * 2048 * 2 * 3 * 1408
        ),
    ),
    sum_bytes_per_token=2 * 2048 * 2,
    has_dp_attention=True,
)
MEASURED = OverlapCosts(layer=MIXTURE, rates=H200)
DEVICE_ALONE = replace(H200, launches_s=(0.0, 0.0), dp_launches_s=(0.0, 0.0))
COSTS = OverlapCosts(layer=MIXTURE, rates=DEVICE_ALONE)
GPU = DeviceProperties(
    name="NVIDIA H200", capability=(9, 0), memory_bytes=1, num_sms=132,
    shared_memory_per_block_bytes=1,
)  # fmt: skip


def _weight_bytes(costs: LayerCosts) -> float:
    return sum(part.weight_bytes for part in costs.parts)


def _rule() -> OverlapRule:
    return OverlapRule(min_prompt_tokens=None, min_decode_rows=None, costs=COSTS)


def test_a_small_step_reads_its_weights_twice_and_loses() -> None:
    for num_tokens in (64, 1024, 3300):
        assert COSTS.gain(num_tokens // 2, num_tokens // 2) < 0
        assert not _rule().pays(num_tokens // 2, num_tokens // 2, is_decode=False)


def test_a_long_step_hides_its_sums() -> None:
    assert _rule().pays(8192, 8192, is_decode=False)
    hidden = COSTS.sums_s(16384) / (COSTS.sums_s(16384) + COSTS.compute_s(16384))
    assert COSTS.gain(8192, 8192) == pytest.approx(hidden)


def test_the_border_is_where_half_of_a_step_is_bound_by_its_products() -> None:
    paying = [n for n in range(256, 20000, 64) if _rule().pays(n // 2, n // 2, is_decode=False)]
    assert paying == list(range(paying[0], paying[-1] + 1, 64))
    assert 3300 < paying[0] < 6600
    full = COSTS.gain(3300, 3300)
    assert full == pytest.approx(COSTS.gain(8192, 8192), rel=0.01)  # nothing is read twice here


def test_the_gain_is_never_more_than_all_that_is_communicated_or_computed() -> None:
    for num_tokens in (2, 500, 10_000, 100_000):
        whole = COSTS.compute_s(num_tokens) + COSTS.sums_s(num_tokens)
        least = min(COSTS.compute_s(num_tokens), COSTS.sums_s(num_tokens))
        assert COSTS.gain(num_tokens // 2, num_tokens // 2) <= least / whole + 1e-12


def test_steps_that_wait_for_their_launches_lose_as_measured() -> None:
    """Tokens -> whole step over two batches, of two H200s of one host; all of them lost."""
    rule = OverlapRule(min_prompt_tokens=None, min_decode_rows=None, costs=MEASURED)
    for num_tokens, measured in ((2048, 0.388), (8192, 0.422), (32768, 0.977)):
        half = num_tokens // 2
        assert 1 / (1 - MEASURED.gain(half, half)) == pytest.approx(measured, rel=0.1)
        assert not rule.pays(half, half, is_decode=False)
    assert rule.pays(32768, 32768, is_decode=False)


def test_steps_with_dp_attention_take_longer_to_launch() -> None:
    """Of DeepSeek-V2-Lite over two H200s, 8,192 and 16,384 tokens on each rank: 0.50 and 0.72."""
    costs = OverlapCosts(layer=DP_MIXTURE, rates=H200)
    rule = OverlapRule(min_prompt_tokens=None, min_decode_rows=None, costs=costs)
    assert 1 / (1 - costs.gain(4096, 4096)) == pytest.approx(0.499, rel=0.15)
    assert not rule.pays(8192, 8192, is_decode=False)
    own = replace(costs, rates=replace(H200, dp_launches_s=H200.launches_s))
    assert replace(rule, costs=own).pays(8192, 8192, is_decode=False)  # as it was predicted before


def test_single_tokens_are_split_only_if_asked_for() -> None:
    assert not _rule().pays(50_000, 50_000, is_decode=True)
    asked = OverlapRule(min_prompt_tokens=None, min_decode_rows=16)
    assert [asked.pays(n, 8, is_decode=True) for n in (7, 8)] == [False, True]
    assert not asked.pays(8, 8, is_decode=False)


def test_a_slow_link_pays_earlier() -> None:
    slow = OverlapCosts(layer=MIXTURE, rates=replace(DEVICE_ALONE, link_bytes=20e9))
    assert COSTS.gain(1500, 1500) < MIN_GAIN < slow.gain(1500, 1500)


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "Qwen2MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"],
)
def test_costs_of_a_layer_are_those_of_its_weights(architecture: str, tmp_path: Path) -> None:
    settings = {"mlp_only_layers": [0]} if "Moe" in architecture else {}
    model = save_model(tmp_path, architecture, num_hidden_layers=2, **settings)
    names = [
        n
        for n, _ in model.named_parameters()
        if "layers." in n and "_proj" in n and "bias" not in n
    ]
    held = sum(model.get_parameter(name).numel() for name in names)
    costs = layer_costs(load_spec(tmp_path), 1, 4)
    assert _weight_bytes(costs) * 2 == held * 4
    assert costs.sum_bytes_per_token == 0
    flops = sum(part.flops_per_token for part in costs.parts)
    assert (flops * 2 == 2 * held) == (architecture == "LlamaForCausalLM")
    part = layer_costs(load_spec(tmp_path).of_rank(Rank(0, 2)), 2, 4)
    # What makes latents is on every rank.
    on_all = 4 * sum(model.get_parameter(n).numel() for n in names if "_a_proj" in n) / 2
    assert _weight_bytes(part) * 2 == _weight_bytes(costs) + on_all
    assert part.sum_bytes_per_token == 2 * 64 * 4
    if "Moe" in architecture:  # uniform routes: whole experts cost what parts of all do
        whole = load_spec(tmp_path, sharing="experts").of_rank(Rank(0, 2))
        assert layer_costs(whole, 2, 4) == part
        # With DP attention a rank's experts compute tokens of all, and only mixtures communicate.
        own = layer_costs(load_spec(tmp_path, sharing="dp_attention").of_rank(Rank(0, 2)), 2, 4)
        assert sum(part.flops_per_token for part in own.parts) == flops
        mixed = sum(model.get_parameter(n).numel() for n in names if ".experts." in n)
        assert _weight_bytes(own) * 2 == _weight_bytes(costs) * 2 - 4 * mixed / 2
        assert own.sum_bytes_per_token == 2 * 64 * 4 / 2
        assert own.has_dp_attention


def test_a_device_without_rates_needs_a_number() -> None:
    other = DeviceProperties(
        name="NVIDIA A10", capability=(8, 6), memory_bytes=1, num_sms=1,
        shared_memory_per_block_bytes=1,
    )  # fmt: skip
    asked = ExecutionConfig(enable_two_batch_overlap=True)
    assert build_rule(asked, MIXTURE, GPU).costs == MEASURED
    with pytest.raises(ConfigError, match="no rates of NVIDIA A10"):
        build_rule(asked, MIXTURE, other)
    number = ExecutionConfig(enable_two_batch_overlap=True, tbo_min_prompt_tokens=512)
    rule = build_rule(number, MIXTURE, other)
    assert [rule.pays(n, 256, is_decode=False) for n in (255, 256)] == [False, True]
