"""The host tier of ranks with blocks of their own: one moves what is its own, others do nothing.

Whole engines: test_block_parts.py.
"""

import torch

from engine.kv.host.movers import build_mover
from engine.kv.layout import KvLayout
from engine.kv.store import KvStore
from engine.ranks.own_moves import OwnBlocks
from engine.ranks.step_counts import StepCounts
from tests.harness.asked_ranks import AskedRanks

NUM_BLOCKS = 6
LAYOUT = KvLayout.latent(num_layers=2, block_size=3, width=8, dtype="float32")


def test_blocks_that_one_rank_saved_are_loaded_by_another() -> None:
    """From rank 0 to rank 2, and from rank 1 to rank 0; each block's digest is as on one rank."""
    blocks = OwnBlocks(NUM_BLOCKS, 3)
    stores = [KvStore(LAYOUT, num_blocks=NUM_BLOCKS, device=torch.device("cpu")) for _ in range(3)]
    for store in stores:
        store.tensor.copy_(torch.randn(store.tensor.shape))
    arena = torch.zeros(9, LAYOUT.block_bytes, dtype=torch.uint8).numpy()
    movers = [build_mover(store, arena) for store in stores]
    others = [blocks.follow(rank, movers[rank]).begin for rank in (1, 2)]
    before = [store.tensor.clone() for store in stores]
    with AskedRanks(others, kinds=("host save", "host load")) as asked:
        led = blocks.lead(movers[0], asked.rank_tasks, StepCounts())
        assert led.save([4, 1], [0, 8])() == stores[0].digest([4, 1])
        assert led.save([NUM_BLOCKS + 3], [5])() == stores[1].digest([3])
        loaded = led.begin_load()([8, 0], [2 * NUM_BLOCKS, 2 * NUM_BLOCKS + 5])
        assert loaded == stores[0].digest([1, 4])
        assert led.begin_load()([5], [2]) == stores[1].digest([3])
    expected = [tensor.clone() for tensor in before]
    expected[2][[0, 5]] = before[0][[1, 4]]
    expected[0][2] = before[1][3]
    for store, tensor in zip(stores, expected, strict=True):
        assert torch.equal(store.tensor, tensor)
