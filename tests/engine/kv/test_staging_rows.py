"""The device memory that a host tier takes beside the KV store, and its rows."""

from unittest.mock import patch

import pytest
import torch

from configs.load import load_config
from engine.build_host_tier import staged_blocks
from engine.errors import ConfigError
from engine.kv.host.staging import StagingRows, num_staged_blocks
from engine.kv.layout import KvLayout
from engine.messages import Role
from engine.runner.kv_memory import num_blocks_that_fit

LAYOUT = KvLayout.with_heads(
    num_layers=36, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16"
)


def test_a_row_is_taken_by_one_at_a_time_and_a_full_staging_gives_what_it_has() -> None:
    rows = StagingRows(5)
    first, second = rows.take(3), rows.take(4)
    assert sorted(first + second) == list(range(5))
    assert rows.take(1) == []
    rows.give_back(second)
    assert sorted(rows.take(9)) == sorted(second)


def test_blocks_are_staged_in_a_64th_of_memory() -> None:
    assert num_staged_blocks(LAYOUT.block_bytes, 80 * 2**30) == 568
    assert num_staged_blocks(LAYOUT.block_bytes, 0) == 0


def test_blocks_taken_beside_the_store_are_not_given_to_it() -> None:
    def fitting(num_staged: int) -> int:
        with (
            patch.object(torch.cuda, "synchronize"),
            patch.object(torch.cuda, "empty_cache"),
            patch.object(torch.cuda, "mem_get_info", lambda: (600, 1000)),
        ):
            return num_blocks_that_fit(
                lambda: None, trial_blocks=3, block_bytes=10, share=0.9, num_staged=num_staged
            )

    assert fitting(0) - fitting(7) == 7
    with pytest.raises(ConfigError, match="staged blocks"):
        fitting(10**3)


@pytest.mark.parametrize(
    ("gpu_gib", "host_gib", "role", "expected"),
    [
        (64, 1.0, "unified", 455),
        (64, 1.0, "prefill", 455),
        (64, 1.0, "decode", 0),  # it has no host tier
        (64, 0.0, "unified", 0),
        (0, 1.0, "unified", 0),
    ],
)
def test_only_a_tier_below_a_gpu_stages(
    gpu_gib: int, host_gib: float, role: Role, expected: int
) -> None:
    config = load_config(None, {"cache.host_gib": host_gib})
    assert staged_blocks(config, role, LAYOUT, gpu_gib * 2**30) == expected
