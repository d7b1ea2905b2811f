"""What linear kernels are judged by: products in float64, and memory that holds NaN before."""

import torch
from torch import Tensor

# norm(ours - exact) / norm(exact): sums in fp32, one rounding of the result.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


def exact_gated(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = exact_product(x, weight, bias).chunk(2, dim=1)
    return gate * torch.sigmoid(gate) * up


def assert_near(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert ours.shape == exact.shape
    assert ours.dtype == dtype
    error = float((ours.double() - exact).norm() / exact.norm())
    assert error <= TOLERANCES[dtype], f"off by {error} for {list(exact.shape)}"


def poison(num_elements: int) -> None:
    """Leaves NaN in a GPU's memory that the next allocations are likely to get."""
    pieces = [torch.full((num_elements,), torch.nan, device=GPU) for _ in range(4)]
    del pieces
