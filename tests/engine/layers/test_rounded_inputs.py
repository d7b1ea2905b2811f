"""Experts whose inputs are rounded from some number of tokens on, and only then."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.linear import LinearWeight
from engine.layers.moe import HeldExperts, TorchExperts, expert_matrices
from kernels.moe import reference
from tests.harness.gpus import gpu
from tests.harness.in_process import start_engine
from tests.kernels.interpreter import run_interpreted
from tests.kernels.moe.moe_cases import random_routes, random_tensor
from tests.kernels.quant.quant_cases import Case, fp4_case, fp8_case, int4_case

MODULE = "tests.engine.layers.test_rounded_inputs"
CPU = torch.device("cpu")
FROM = 6  # tokens
NUM_EXPERTS, NUM_ACTIVE, HIDDEN, INNER = 4, 2, 128, 128
FORMS: dict[str, Callable[[tuple[int, int, int]], Case]] = {
    "int4": lambda shape: int4_case(shape, 128, torch.float16, CPU),
    "fp8": lambda shape: fp8_case(shape, (128, 128), torch.float16, CPU, quantizes_inputs=True),
}


def _weights(make: Callable[[tuple[int, int, int]], Case]) -> tuple[LinearWeight, LinearWeight]:
    """Gate and up, and down, by expert."""
    up, down = (
        make((1, NUM_EXPERTS * num_rows, num_columns)).weight.by_expert(NUM_EXPERTS)
        for num_rows, num_columns in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    return up, down


def _on_hopper(check: Callable[[], None]) -> None:
    """Run what chooses kernels by the GPU as on an H200, whatever computes."""
    from engine.layers import moe_cuda
    from kernels.moe import rounded, rounded_int4

    with (
        patch.object(moe_cuda, "device_properties", lambda _: gpu("H200")),
        patch.object(rounded, "device_properties", lambda _: gpu("H200")),
        patch.object(rounded_int4, "device_properties", lambda _: gpu("H200")),
    ):
        check()


def check_steps(form: str) -> None:
    _on_hopper(lambda: _check_steps(form))


def _check_steps(form: str) -> None:
    from engine.layers.moe_cuda import TritonExperts

    up, down = _weights(FORMS[form])
    experts = TritonExperts(up, down, num_active=NUM_ACTIVE, is_deterministic=False)
    twin = TorchExperts(expert_matrices(up), expert_matrices(down))
    exact, rounded = (0.0, 4e-3), (8e-3, 1.0)
    for num_tokens, from_tokens, (low, high) in (
        (FROM - 1, FROM, exact),
        (FROM, FROM, rounded),  # a few tokens whose products cancel are off by far more than most
        (48, FROM, (0.02, 0.08)),
        (FROM, None, exact),
    ):
        experts.round_inputs(from_tokens)
        x = random_tensor(num_tokens, HIDDEN, dtype=torch.float16, device="cpu")
        routes = random_routes(num_tokens, NUM_EXPERTS, NUM_ACTIVE, "cpu")
        error = _distance(experts(x, routes, None), twin(x, routes, None))
        assert low <= error <= high, f"{num_tokens} tokens from {from_tokens}: off by {error}"
    experts.round_inputs(FROM)
    assert FROM - 1 in experts.token_sizes
    fixed = TritonExperts(up, down, num_active=NUM_ACTIVE, is_deterministic=True)
    fixed.round_inputs(None)
    with pytest.raises(AssertionError, match="deterministic"):
        fixed.round_inputs(FROM)


def check_held() -> None:
    _on_hopper(_check_held)


def _check_held() -> None:
    """Ranks with two experts each add up to one with all, but for the order of a sum of two."""
    from engine.layers.moe_cuda import TritonExperts

    up, down = _weights(FORMS["int4"])
    x = random_tensor(9, HIDDEN, dtype=torch.float16, device="cpu")
    routes = random_routes(9, NUM_EXPERTS, NUM_ACTIVE, "cpu")

    def outputs(part: range) -> Tensor:
        own = TritonExperts(
            _part(up, part),
            _part(down, part),
            num_active=NUM_ACTIVE,
            num_experts=NUM_EXPERTS,
            is_deterministic=False,
        )
        held = HeldExperts(own, part, reference.held_routes)
        held.round_inputs(FROM)
        return held(x, routes, None)

    whole, *parts = (outputs(range(*ends)) for ends in ((0, 4), (0, 2), (2, 4)))
    assert _distance(parts[0] + parts[1], whole) < 1e-3


def _part(weight: LinearWeight, part: range) -> LinearWeight:
    assert weight.scales is not None
    scales = weight.scales._each(lambda tensor: tensor[part.start : part.stop].contiguous())
    data = weight.data[part.start : part.stop].contiguous()
    return LinearWeight(data, None, weight.format, scales)


def _distance(ours: Tensor, twin: Tensor) -> float:
    return float((ours.double() - twin.double()).norm() / twin.double().norm())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int4", pytest.param("fp8", marks=pytest.mark.nightly)])
def test_inputs_are_rounded_from_a_number_of_tokens_on(form: str) -> None:
    run_interpreted(f"{MODULE}:check_steps", form)


@pytest.mark.slow
def test_ranks_with_whole_experts_add_up_to_one() -> None:
    run_interpreted(f"{MODULE}:check_held")


def test_experts_that_no_kernel_rounds_inputs_of_are_refused() -> None:
    from engine.layers.moe_cuda import TritonExperts

    def check() -> None:
        for make in (
            lambda shape: fp4_case(shape, 16, torch.float16, CPU),
            lambda shape: fp8_case(shape, (128, 128), torch.float16, CPU),
        ):
            experts = TritonExperts(*_weights(make), num_active=2, is_deterministic=False)
            experts.round_inputs(None)
            with pytest.raises(ConfigError, match=r"round_expert_inputs_from: .* leave it out"):
                experts.round_inputs(FROM)

    _on_hopper(check)
    with pytest.raises(ConfigError, match="has no experts; leave it out"):
        start_engine(execution__round_expert_inputs_from=FROM)
    up, down = (expert_matrices(weight) for weight in _weights(FORMS["int4"]))
    with pytest.raises(ConfigError, match="on a GPU only"):
        TorchExperts(up, down).round_inputs(FROM)
