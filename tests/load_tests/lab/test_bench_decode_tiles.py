"""The bench of decode's tiles as far as it needs no GPU."""

import pytest

from kernels.attention.triton import decode_config_for
from load_tests.lab.bench_decode_tiles import TILES, tile_of


def test_a_tile_is_named_by_its_keys_warps_and_stages() -> None:
    config = tile_of("128/8/2", 16)
    assert (config.tile_keys, config.num_warps, config.num_stages) == (128, 8, 2)
    assert tile_of("chosen", 16) == decode_config_for(16)
    chosen = decode_config_for(16)
    named = f"{chosen.tile_keys}/{chosen.num_warps}/{chosen.num_stages}"
    assert named not in TILES, "it would be measured twice"
    with pytest.raises(ValueError, match="unpack"):
        tile_of("128/8", 16)
