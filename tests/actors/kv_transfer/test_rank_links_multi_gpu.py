"""A rank gets its heads from a rank in another process, by a link of each kind."""

from pathlib import Path

import pytest
import torch

from engine.messages import ChannelKind
from engine.ranks.shared_stores import part_of
from tests.actors.kv_transfer.link_stories import READER, WHOLE, drawn_blocks, link_twice
from tests.harness.rank_processes import RankProcesses

MULTI = (
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
)


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        pytest.param("gloo_pair", "cpu", marks=[pytest.mark.slow, pytest.mark.nightly]),
        pytest.param("nccl_pair", "cuda", marks=MULTI),
        pytest.param("gloo_pair", "cuda", marks=MULTI),
        pytest.param("object_store", "cuda", marks=MULTI),
    ],
)
def test_a_rank_gets_its_heads_from_another_process(
    kind: ChannelKind, device: str, tmp_path: Path
) -> None:
    with RankProcesses(2, tmp_path, device) as ranks:
        _, found = ranks.run(link_twice, kind, device, str(tmp_path / "board"))
    assert found is not None
    expected = drawn_blocks()[..., part_of(READER, WHOLE).heads, :].flip(0)
    assert torch.equal(found, expected)
