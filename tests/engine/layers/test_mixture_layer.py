"""A mixture as a layer: kernels (interpreted) and torch agree, and which sizes run every kernel."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.context import SINGLE_RANK
from engine.layers.linear import LinearWeight, WeightFormat
from engine.layers.moe import Mixture
from engine.layers.norm import RmsNorm
from engine.layers.operations import Flow, run_in_order
from engine.layers.quantized_weight import Scales
from engine.layers.residual import add_and_norm, sum_over_ranks
from engine.models.mixture import build_mixture
from engine.models.mixture_spec import QWEN_NAMES, MixtureSpec
from engine.models.weights import LayerWeights
from kernels.moe.tiles import ExpertShape, TilePlan, build_plan
from kernels.reference import TorchOps
from tests.harness.gpus import gpu
from tests.kernels.interpreter import run_interpreted

SPEC = MixtureSpec(
    num_experts=6, num_active=3, expert_size=24, shared_size=40, normalises=True,
    layers=(0,), names=QWEN_NAMES,
)  # fmt: skip
HIDDEN = 48


def _weight(*shape: int) -> LinearWeight:
    return LinearWeight(torch.randn(shape) * shape[-1] ** -0.5)


def _layer_weights(spec: MixtureSpec) -> LayerWeights:
    size, shared = spec.expert_size, spec.shared_size or 0
    return LayerWeights(
        input_norm=torch.ones(HIDDEN),
        post_norm=torch.ones(HIDDEN),
        qkv=_weight(1, HIDDEN),
        output=_weight(HIDDEN, 1),
        gate_up=_weight(spec.num_experts, 2 * size, HIDDEN),
        down=_weight(spec.num_experts, HIDDEN, size),
        q_norm=None,
        k_norm=None,
        router=_weight(spec.num_experts, HIDDEN),
        shared_gate_up=_weight(2 * shared, HIDDEN) if shared else None,
        shared_down=_weight(HIDDEN, shared) if shared else None,
        shared_gate=_weight(1, HIDDEN) if shared else None,
    )


def _check_operations(
    mixture: Mixture, x: Tensor, slots: Tensor, output: Tensor, *, has_stream: bool
) -> None:
    """The norm that follows takes the sum over a token's experts, with the bits of both apart."""
    from kernels.rms_norm import rms_norm, rms_norm_add

    ops = SimpleNamespace(rms_norm=rms_norm, rms_norm_add=rms_norm_add)
    norm = RmsNorm(torch.randn(HIDDEN), 1e-6, ops)  # type: ignore[arg-type]
    ctx: Any = SimpleNamespace(comm=SINGLE_RANK, lane=0, fused_sums=None)
    stream = torch.randn(len(x), HIDDEN) if has_stream else None
    flow = Flow(ctx=ctx, x=x, slots=slots, residual=None if stream is None else stream.clone())
    run_in_order(mixture.operations(), flow)
    sum_over_ranks(flow)
    is_left = len(x) > mixture._experts._plan.few_up_to  # type: ignore[attr-defined]
    assert (flow.unsummed is not None) == is_left
    add_and_norm(flow, norm)
    assert flow.unsummed is None
    normed, residual = norm.add(output.clone(), stream)
    assert torch.equal(flow.x, normed)
    assert flow.residual is not None
    assert torch.equal(flow.residual, residual)


def check_interpreted() -> None:
    from engine.layers.moe_cuda import TritonExperts, TritonRouter

    joinable = replace(SPEC, shared_size=2 * SPEC.expert_size)
    for spec in (SPEC, joinable, replace(SPEC, shared_size=None, normalises=False)):
        weights = _layer_weights(spec)
        layer = build_mixture(spec, weights, TorchOps(), is_deterministic=False)
        assert weights.router is not None
        for is_deterministic in (False, True):
            by_kernels = build_mixture(spec, weights, TorchOps(), is_deterministic=False)
            by_kernels.router = TritonRouter(
                weights.router.data,
                num_active=spec.num_active,
                normalises=spec.normalises,
                is_deterministic=is_deterministic,
            )
            by_kernels._experts = TritonExperts(
                weights.gate_up,
                weights.down,
                num_active=spec.num_active,
                is_deterministic=is_deterministic,
            )
            if spec.shared_size is not None:
                assert by_kernels._shared is not None
                assert weights.shared_gate_up is not None
                assert weights.shared_down is not None
                joined = by_kernels._experts.join(weights.shared_gate_up, weights.shared_down)
                assert (joined is not None) == (spec is joinable and not is_deterministic)
                by_kernels._shared._joined = joined
                by_kernels._shared._joins = by_kernels._experts.joins
                if joined is not None:
                    plan = by_kernels._experts._plan
                    by_kernels._experts._plan = replace(plan, joined_up_to=5)
            for num_tokens in (0, 1, 4, 5, 19) if spec is SPEC else (1, 6):
                x = torch.randn(num_tokens, HIDDEN)
                slots = torch.arange(num_tokens, dtype=torch.int32) - int(num_tokens > 3)
                ours, twins = by_kernels(x, 0, slots), layer(x, 0, slots)
                torch.testing.assert_close(ours, twins, rtol=1e-4, atol=1e-5)
                # Of each size once with a stream and once without.
                has_stream = (num_tokens % 2 == 0) != is_deterministic
                _check_operations(by_kernels, x, slots, ours, has_stream=has_stream)


@pytest.mark.slow
def test_kernels_and_torch_compute_the_same_layer() -> None:
    run_interpreted("tests.engine.layers.test_mixture_layer:check_interpreted")


# ---- what is compiled before a worker is ready ---------------------------------------------------


def _choices(num_tokens: int, shape: ExpertShape, plan: TilePlan) -> tuple[object, ...]:
    """What a step's number of tokens decides, each kernel asked for itself."""
    from kernels.moe import align, combine
    from kernels.moe.router import FEW_TOKENS, router_tile

    num_routes = num_tokens * shape.num_active
    return (
        router_tile(num_tokens, is_deterministic=False),
        num_tokens <= FEW_TOKENS,
        num_tokens <= plan.few_up_to,
        plan.pair(num_tokens),
        num_routes > align._MAX_UNCOUNTED,
        num_routes > align._SMALL_CHUNK,
        next(tile for most, tile in combine._TILES if num_tokens <= most),
    )


@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize("name", ["H200", "L4", "B200"])
def test_the_sizes_run_before_ready_choose_every_kernel(
    name: str, is_quantised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.layers import moe_cuda

    monkeypatch.setattr(moe_cuda, "device_properties", lambda _: gpu(name))
    monkeypatch.setattr(moe_cuda, "check_e4m3", lambda _: None)  # there are no numbers
    sizes = ((128, 8, 2048, 768), (8, 2, 4096, 14336), (64, 6, 2048, 1408))
    for num_experts, num_active, hidden, inner in sizes:
        moe_cuda._plan.cache_clear()
        shape = ExpertShape(
            num_experts=num_experts, num_active=num_active, hidden=hidden, inner=inner
        )
        experts = moe_cuda.TritonExperts(
            _meta(num_experts, 2 * inner, hidden, is_quantised=is_quantised),
            _meta(num_experts, hidden, inner, is_quantised=is_quantised),
            num_active=num_active,
            is_deterministic=False,
        )
        plan = experts._plan
        assert plan == build_plan(shape, gpu(name)) or is_quantised

        def choices(
            num_tokens: int, experts: moe_cuda.TritonExperts = experts, shape: ExpertShape = shape
        ) -> tuple[object, ...]:
            joins = experts.joins(num_tokens)
            return (*_choices(num_tokens, shape, experts._plan), joins)

        covered = {choices(size) for size in experts.token_sizes}
        for num_tokens in (*range(1, 2100), *random.sample(range(2100, 40000), 50)):
            assert choices(num_tokens) in covered, num_tokens
    moe_cuda._plan.cache_clear()


def _meta(*shape: int, is_quantised: bool = False) -> LinearWeight:
    """Without numbers; if quantised, in FP8 with tiles of 128."""
    if not is_quantised:
        return LinearWeight(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
    *experts, num_rows, num_columns = shape
    scales = Scales(
        values=torch.empty(*experts, num_rows // 128, num_columns // 128, device="meta"),
        rows=128, columns=128, dtype=torch.bfloat16, quantizes_inputs=True,
    )  # fmt: skip
    data = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
    return LinearWeight(data, None, WeightFormat.FP8, scales)


def test_a_gpu_without_a_table_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from engine.layers import moe_cuda

    monkeypatch.setattr(moe_cuda, "device_properties", lambda _: gpu("L4"))
    moe_cuda._plan.cache_clear()
    with caplog.at_level("INFO", logger=moe_cuda.__name__):
        for _ in range(3):
            moe_cuda.TritonExperts(
                _meta(8, 64, 32), _meta(8, 32, 32), num_active=2, is_deterministic=False
            )
    assert len(caplog.messages) == 1
    assert "NVIDIA L4" in caplog.messages[0]
    moe_cuda._plan.cache_clear()


def test_more_experts_than_a_gpu_routes_are_refused() -> None:
    from engine.layers.moe_cuda import TritonRouter

    with pytest.raises(ConfigError, match="1025 experts"):
        TritonRouter(_meta(1025, 8).data, num_active=2, normalises=True, is_deterministic=False)
