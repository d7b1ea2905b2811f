"""A row for every route, its inputs in its expert's order."""

import torch

from kernels.moe.route_rows import route_rows_torch
from tests.kernels.interpreter import run_interpreted


def check_rows() -> None:
    """Odd sizes, strided rows, routes without expert; more columns than a program takes."""
    from kernels.moe.route_rows import route_rows

    for num_tokens, num_active, hidden in ((1, 3, 33), (5, 2, 1100), (7, 1, 64)):
        wide = torch.randn(num_tokens, hidden + 5)
        x = wide[:, :hidden]
        order = torch.stack([torch.randperm(hidden) for _ in range(4)]).to(torch.int32)
        ids = torch.randint(-1, 4, (num_tokens, num_active), dtype=torch.int32)
        used = ids.view(-1) >= 0
        found, expected = route_rows(x, ids, order), route_rows_torch(x, ids, order)
        assert torch.equal(found[used], expected[used])


def test_interpreted_rows_are_those_of_torch() -> None:
    run_interpreted("tests.kernels.moe.test_route_rows:check_rows")


def test_torchs_rows_are_the_formula() -> None:
    x, order = torch.randn(3, 6), torch.stack([torch.randperm(6) for _ in range(2)])
    ids = torch.tensor([[1, 0], [0, -1], [1, 1]], dtype=torch.int32)
    found = route_rows_torch(x, ids, order.to(torch.int32)).view(3, 2, 6)
    for token, row in enumerate(ids.tolist()):
        for place, expert in enumerate(row):
            expected = x[token, order[expert]] if expert >= 0 else torch.zeros(6)
            assert torch.equal(found[token, place], expected)
