"""Mixtures of experts (Mixtral, Qwen's, DeepSeek's): what stands in place of a layer's MLP.

    norm -> router -> experts -> weighted sum -> all-reduce
         `-> shared expert, with its gate ---'

Norm, all-reduce and everything before them are those of `DecoderLayer` (llama.py), whose layers may
be mixtures or dense ones in any order.
"""

from collections.abc import Callable

from torch import Tensor

from engine.layers.build_linear import build_linear
from engine.layers.linear import WeightFormat
from engine.layers.mlp import build_mlp
from engine.layers.moe import (
    Experts,
    HeldExperts,
    Mixture,
    Router,
    SharedExpert,
    TorchExperts,
    TorchRouter,
    expert_matrices,
)
from engine.models.mixture_spec import MixtureSpec
from engine.models.weights import LayerWeights
from kernels.moe import reference
from kernels.moe.form import ExpertForm
from kernels.moe.routes import Routes, Selection
from kernels.ops import Ops


def build_mixture(
    spec: MixtureSpec, weights: LayerWeights, ops: Ops, *, is_deterministic: bool
) -> Mixture:
    """The mixture of one layer. Raises ConfigError if its weights are of an unsupported kind."""
    assert weights.router is not None, "a mixture has a router"
    assert weights.router.format is WeightFormat.DENSE, "a router is never quantised"
    is_cuda = weights.router.data.device.type == "cuda"
    build = _build_cuda if is_cuda else _build_torch
    router, experts = build(spec, weights, weights.router.data, is_deterministic)
    if spec.held is not None:
        experts = HeldExperts(experts, spec.held, _held_routes(is_cuda=is_cuda))
    return Mixture(
        router=router,
        experts=experts,
        shared=_build_shared(weights, experts, ops, is_deterministic=is_deterministic),
        is_replicated=spec.replicates_shared and spec.held is not None,
        gathers_tokens=spec.sharing == "gathered",
        has_dp_attention=spec.has_dp_attention and spec.held is not None,
    )


def _held_routes(*, is_cuda: bool) -> Callable[[Routes, range], Routes]:
    if not is_cuda:
        return reference.held_routes
    from kernels.moe.held import held_routes

    return held_routes


def _build_torch(
    spec: MixtureSpec, weights: LayerWeights, router: Tensor, is_deterministic: bool
) -> tuple[Router, Experts]:
    del is_deterministic  # a CPU makes no such promise
    return (
        TorchRouter(
            router,
            num_active=spec.num_active,
            normalises=spec.normalises,
            bias=_router_bias(weights),
            selection=_selection(spec, weights),
        ),
        TorchExperts(
            expert_matrices(weights.gate_up), expert_matrices(weights.down), _form(spec, weights)
        ),
    )


def _build_cuda(
    spec: MixtureSpec, weights: LayerWeights, router: Tensor, is_deterministic: bool
) -> tuple[Router, Experts]:
    # A host without a GPU need not have Triton.
    from engine.layers.moe_cuda import TritonExperts, TritonRouter

    return (
        TritonRouter(
            router,
            num_active=spec.num_active,
            normalises=spec.normalises,
            is_deterministic=is_deterministic,
            bias=_router_bias(weights),
            selection=_selection(spec, weights),
        ),
        TritonExperts(
            weights.gate_up,
            weights.down,
            num_active=spec.num_active,
            num_experts=spec.num_experts,
            is_deterministic=is_deterministic,
            form=_form(spec, weights),
        ),
    )


def _selection(spec: MixtureSpec, weights: LayerWeights) -> Selection | None:
    if spec.is_plain:
        return None
    return Selection(
        scores=spec.scores,
        bias=weights.route_bias,
        num_groups=spec.num_groups,
        num_chosen_groups=spec.num_chosen_groups,
        scale=spec.route_scale,
    )


def _router_bias(weights: LayerWeights) -> Tensor | None:
    return None if weights.router is None else weights.router.bias


def _form(spec: MixtureSpec, weights: LayerWeights) -> ExpertForm:
    return ExpertForm(
        gate=spec.gate, gate_up_bias=weights.gate_up.bias, down_bias=weights.down.bias
    )


def _build_shared(
    weights: LayerWeights, experts: Experts, ops: Ops, *, is_deterministic: bool
) -> SharedExpert | None:
    gate_up, down, gate = weights.shared_gate_up, weights.shared_down, weights.shared_gate
    if gate_up is None or down is None:
        return None
    return SharedExpert(
        mlp=build_mlp(gate_up, down, ops, is_deterministic=is_deterministic),
        gate=None if gate is None else build_linear(gate, is_deterministic=is_deterministic),
        joined=experts.join(gate_up, down),
        joins=experts.joins,
    )
