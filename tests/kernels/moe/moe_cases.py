"""What kernels of mixtures are judged by: float64, expert by expert and token by token."""

import torch
from torch import Tensor

from kernels.moe.routes import Routes

# norm(ours - exact) / norm(exact): sums in fp32, one rounding a product.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def random_tensor(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=device) * scale).to(dtype)


def random_routes(num_tokens: int, num_experts: int, num_active: int, device: str) -> Routes:
    """Different experts for each token, weights that add up to 1; the third token is padding."""
    ids = torch.rand(num_tokens, num_experts, device=device).argsort(dim=1)[:, :num_active]
    ids = ids.int().contiguous()
    ids[2:3] = -1
    weights = torch.rand(num_tokens, num_active, device=device)
    return Routes(ids=ids, weights=weights / weights.sum(dim=1, keepdim=True))


def exact_inner(x: Tensor, weight: Tensor, routes: Routes) -> Tensor:
    """float64 [T k, n]; zeros without expert."""
    ids = routes.ids
    inner = torch.zeros(ids.numel(), weight.shape[1] // 2, dtype=torch.float64, device=x.device)
    for route, expert in enumerate(ids.flatten().tolist()):
        if expert >= 0:
            gate, up = (weight[expert].double() @ x[route // ids.shape[1]].double()).chunk(2)
            inner[route] = gate / (1 + (-gate).exp()) * up
    return inner


def exact_outputs(inner: Tensor, weight: Tensor, routes: Routes) -> Tensor:
    """float64 [T, k, hidden], weighted; zeros without expert."""
    ids, scales = routes.ids.flatten().tolist(), routes.weights.flatten().double()
    outputs = torch.zeros(len(ids), weight.shape[1], dtype=torch.float64, device=inner.device)
    for route, expert in enumerate(ids):
        if expert >= 0:
            outputs[route] = scales[route] * (weight[expert].double() @ inner[route].double())
    return outputs.view(*routes.ids.shape, -1)


def assert_near(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert ours.shape == exact.shape, f"{list(ours.shape)} and {list(exact.shape)}"
    error = float((ours.double() - exact).norm() / exact.norm())
    assert error <= TOLERANCES[dtype], f"off by {error} for {list(exact.shape)}"


def has_expert(routes: Routes) -> Tensor:
    """Bool [T k]."""
    return (routes.ids >= 0).flatten()
