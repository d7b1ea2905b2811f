"""Tokens of every expert are counted, read without waiting, and summed up by expert and rank."""

from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from engine.layers.moe import Mixture
from engine.messages import ExpertTotals
from engine.models.registry import WeightSource, build_model
from engine.runner.expert_load import CountingRouter, ExpertLoads, imbalance
from kernels.moe.routes import Routes
from tests.engine.runner.step_driver import StepDriver
from tests.harness.in_process import GREEDY, answer, start_engine
from tests.harness.tiny_models import save_model

CPU = torch.device("cpu")


class _Spy:
    """Counts what a router chose."""

    def __init__(self, counting: CountingRouter) -> None:
        self._counting = counting
        self.total = torch.zeros(6, dtype=torch.int64)

    def __call__(self, x: Tensor, slots: Tensor | None) -> Routes:
        routes = self._counting(x, slots)
        self.total = self.total + routes.ids.flatten().bincount(minlength=6)
        return routes


def test_counts_are_those_of_all_steps_up_to_the_last_read(tmp_path: Path) -> None:
    save_model(tmp_path, "Qwen2MoeForCausalLM", num_hidden_layers=3, mlp_only_layers=[1])
    source = WeightSource(sharing="experts")
    model = build_model(tmp_path, dtype=torch.float32, device=CPU, source=source)
    loads = ExpertLoads(model, read_every=2, num_ranks=3)
    driver = StepDriver(model, seed=1)
    spies = []
    for layer in model.layers:
        if isinstance(layer.mlp, Mixture):
            assert isinstance(layer.mlp.router, CountingRouter)
            layer.mlp.router = spy = _Spy(layer.mlp.router)
            spies.append(spy)
    driver.admit(0, list(range(30)))
    driver.sample({0: 4})
    loads.reset()
    start = [spy.total for spy in spies]
    driver.executor.expert_loads = loads
    after = []
    for num_new in (5, 6, 8, 7, 1):  # read after the second and the fourth, known a step later
        driver.sample({0: num_new})
        after.append([spy.total for spy in spies])
    found = loads.newest
    assert found is not None
    assert found.layers == (0, 2)
    for index in range(2):
        assert found.counts[index] == tuple((after[3][index] - start[index]).tolist())
        newly = after[3][index] - after[1][index]
        assert newly.any()
        assert found.expert_imbalance[index] == pytest.approx(newly.max() / newly.double().mean())
        ranks = newly.view(3, 2).sum(dim=1)
        assert found.rank_imbalance[index] == pytest.approx(ranks.max() / ranks.double().mean())


def test_a_model_that_is_used_again_is_counted_once(tmp_path: Path) -> None:
    save_model(tmp_path, "MixtralForCausalLM")
    model = build_model(tmp_path, dtype=torch.float32, device=CPU)
    for _ in range(2):
        loads = ExpertLoads(model, read_every=1)
    driver = StepDriver(model, seed=1)
    driver.executor.expert_loads = loads
    driver.admit(0, list(range(9)))
    for _ in range(2):
        driver.sample({0: 3})
    assert loads.newest is not None
    assert sum(loads.newest.counts[0]) == 2 * 3
    assert loads.newest.rank_imbalance == ()


def test_steps_before_the_first_request_leave_nothing(tmp_path: Path) -> None:
    save_model(tmp_path, "MixtralForCausalLM")
    model = build_model(tmp_path, dtype=torch.float32, device=CPU)
    loads = ExpertLoads(model, read_every=1)
    driver = StepDriver(model, seed=1)
    driver.executor.expert_loads = loads
    driver.admit(0, list(range(40)))
    for _ in range(3):
        driver.sample({0: 9})
    assert loads.newest is not None
    loads.reset()
    assert loads.newest is None
    driver.sample({0: 3})
    assert loads.newest is None, "a copy from before was read"
    driver.sample({0: 1})
    assert loads.newest is not None
    assert sum(loads.newest.counts[0]) == 2 * 3
    assert loads.newest.expert_imbalance[0] >= 1.0


@pytest.mark.parametrize("counts", [True, False])
def test_an_engine_reports_them_if_asked_to(counts: bool, tmp_path: Path) -> None:
    save_model(tmp_path, "MixtralForCausalLM")
    settings = {"model__path": str(tmp_path), "cache__num_blocks": 64}
    tries_lookups = {"speculation__drafter": "ngram", "scheduler__overlap": True}
    engine = start_engine(**settings | tries_lookups, execution__expert_load_steps=int(counts))
    assert engine.expert_totals() is None
    engine.core.scheduler.drafting.drafter = None  # from here on steps are plain
    answer(engine, [(range(20), GREEDY)])
    totals = engine.expert_totals()
    assert (totals is not None) == counts
    if totals is not None:
        # Neither the last token, nor the last step. The last layer has sampled tokens only.
        assert sum(totals.counts[0]) == 2 * (20 + GREEDY.max_tokens - 2)
        assert sum(totals.counts[1]) < sum(totals.counts[0])
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(totals), type=ExpertTotals) == totals


def test_imbalance_is_the_fullest_over_the_mean() -> None:
    assert imbalance([2, 2, 2]) == 1.0
    assert imbalance([0, 9, 0]) == 3.0
    assert imbalance([0, 0]) == 0.0
