"""Digests of the blocks that a step wrote, queued right behind it in its stream.

For workers that send their blocks away: when a step's tokens are on the host, so are the digests,
and a block can go without having been read again. Blocks that are not full yet are digested with
every step that adds to them.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.kv.block_tables import BlockTables
from engine.kv.kv_store import KvStore
from engine.kv.page_locked import to_host
from engine.scheduling.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenBlocks:
    """The blocks of one launched step; their digests are there when the stream has got there."""

    block_ids: list[int]
    digests: Tensor  # int64 [n], on the host
    store: KvStore

    def keep(self) -> None:
        """The step was waited for: write them to the store's books."""
        self.store.digests.keep(self.block_ids, self.digests.tolist())


def digest_written(plan: StepPlan, block_tables: BlockTables, store: KvStore) -> WrittenBlocks:
    """Queue the digests of all blocks that `plan`, launched just now, writes a token to.

    The plan has rows, and its admissions and new blocks were applied to `block_tables`.
    """
    block_size = store.layout.block_size
    num_before = np.array(plan.num_computed_tokens, dtype=np.int64)
    num_after = num_before + np.array(plan.num_new_tokens, dtype=np.int64)
    first = num_before // block_size
    rows = np.array(plan.rows, dtype=np.int64)
    block_ids = block_tables.slices(rows, first, -(-num_after // block_size) - first)
    digests = store.queue_digests(store.index(block_ids))
    return WrittenBlocks(block_ids=block_ids, digests=to_host(digests), store=store)
