"""Which steps a worker runs before it is ready."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.plan import StepPlan
from engine.runner.warm_up import warm_up


@pytest.mark.parametrize("least", [None, 4096, 8000, 9000])
def test_the_smallest_step_whose_rows_ranks_share_out_is_run(least: int | None) -> None:
    """Else a kernel that gathers only shares of that size would compile while requests wait."""
    launched = []

    def launch(plan: StepPlan) -> SimpleNamespace:
        launched.append(plan.num_tokens)
        return SimpleNamespace(wait=lambda: None)

    device = SimpleNamespace(type="cuda")
    executor: Any = SimpleNamespace(
        layout=SimpleNamespace(block_size=16),
        model=SimpleNamespace(device=device, token_sizes=()),
        attends_few_tokens_apart=False,
        min_exchanged_tokens=least,
        launch=launch,
    )
    warm_up(executor, num_rows=8, num_blocks=1000, max_tokens=8000, max_row_tokens=2000)
    assert max(launched) == 8000
    assert (4096 in launched) == (least == 4096)
