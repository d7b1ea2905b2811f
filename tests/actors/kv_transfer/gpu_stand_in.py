"""A KV store on the CPU whose pieces are treated as a GPU's: named, staged, pulled."""

import random

import torch

from actors.kv_transfer.contracts import StoredBlocks
from actors.kv_transfer.kv_pieces import KvPieces
from engine.kv.layout import KvLayout
from engine.kv.store import KvStore

LAYOUT = KvLayout.with_heads(
    num_layers=2, block_size=3, num_kv_heads=1, head_dim=7, dtype="bfloat16"
)


def random_store(num_blocks: int, rng: random.Random, layout: KvLayout = LAYOUT) -> KvStore:
    store = KvStore(layout, num_blocks=num_blocks, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(rng.randrange(2**60))
    store.tensor.copy_(torch.randn(store.tensor.shape, generator=generator))
    know_digests(store)
    return store


def know_digests(store: KvStore) -> None:
    """Of all that is in it now, as if steps had written it."""
    block_ids = range(store.num_blocks)
    store.digests.keep(block_ids, store.digest(block_ids))


def random_blocks(num_blocks: int, store: KvStore, rng: random.Random) -> list[int]:
    return rng.sample(range(store.num_blocks), num_blocks)


def stored(block_ids: list[int], pieces: KvPieces) -> StoredBlocks:
    return StoredBlocks(block_ids=tuple(block_ids), nbytes=len(block_ids) * pieces.block_bytes)
