"""A step adds up over the ranks after its embedding and twice a layer, whatever its tokens."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.layers.context import SingleRank
from engine.models.registry import build_model
from engine.ranks.rank import Rank
from tests.engine.runner.step_driver import StepDriver
from tests.harness.tiny_models import save_model


class CountingRank(SingleRank):
    """Rank 0 of two, without the other one: a sum is its own part, and is counted."""

    rank = Rank(0, 2)

    def __init__(self) -> None:
        self.summed: list[tuple[int, ...]] = []  # shapes

    def all_reduce(self, x: Tensor) -> Tensor:
        self.summed.append(tuple(x.shape))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat((x, x))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("counts", [{0: 1}, {0: 9}, {0: 7, 1: 1, 2: 4}])
def test_a_dense_step_has_two_sums_a_layer_and_one_before(
    architecture: str, counts: dict[int, int], tmp_path: Path
) -> None:
    save_model(tmp_path, architecture)
    comm = CountingRank()
    cpu = torch.device("cpu")
    model = build_model(tmp_path, dtype=torch.float32, device=cpu, rank=comm.rank)
    driver = StepDriver(model, seed=1, comm=comm)
    for row, count in counts.items():
        driver.admit(row, list(range(5, 5 + count)))
    driver.sample(counts)
    streams = [shape for shape in comm.summed if shape[-1] == model.spec.hidden_size]
    assert len(streams) == 1 + 2 * model.spec.num_layers
    assert {shape[0] for shape in streams} <= {sum(counts.values()), len(counts)}
