"""Whole blocks in and out of the store, and the digest that guards them."""

import random

import numpy as np
import pytest
import torch

from engine.kv.layout import KvDtype, KvLayout
from engine.kv.store import KvStore
from engine.kv.tables import BlockTables

DTYPES: list[KvDtype] = ["float32", "bfloat16", "float16"]


def _store(
    dtype: KvDtype, *, num_kv_heads: int = 2, head_dim: int = 6, num_blocks: int = 9, seed: int = 0
) -> KvStore:
    layout = KvLayout.with_heads(
        num_layers=3, block_size=5, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype
    )
    store = KvStore(layout, num_blocks=num_blocks, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    store.tensor.copy_(torch.randn(store.tensor.shape, generator=generator))
    return store


def test_a_new_store_holds_zeros_in_the_layout_shape() -> None:
    layout = KvLayout.with_heads(
        num_layers=3, block_size=5, num_kv_heads=2, head_dim=6, dtype="bfloat16"
    )
    store = KvStore(layout, num_blocks=4, device=torch.device("cpu"))
    assert store.tensor.shape == (4, 3, 2, 5, 2, 6)
    assert store.tensor.dtype == torch.bfloat16
    assert store.tensor[0].nbytes == layout.block_bytes
    assert not store.tensor.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_gathered_blocks_scatter_into_any_other_blocks(dtype: KvDtype, as_bytes: bool) -> None:
    source, target = _store(dtype, seed=1), _store(dtype, seed=2)
    before = target.tensor.clone()
    data = source.gather([7, 0, 3])
    assert data.is_contiguous()
    target.scatter([1, 8, 2], data.view(torch.uint8).flatten() if as_bytes else data)
    for there, here in [(7, 1), (0, 8), (3, 2)]:
        assert torch.equal(target.tensor[here], source.tensor[there])
    untouched = [0, 3, 4, 5, 6, 7]
    assert torch.equal(target.tensor[untouched], before[untouched])


def test_a_gathered_copy_does_not_change_with_the_store() -> None:
    store = _store("float32")
    data = store.gather([2])
    kept = data.clone()
    store.zero([2])
    assert torch.equal(data, kept)


def test_zero_clears_the_named_blocks_only() -> None:
    store = _store("float32")
    before = store.tensor.clone()
    store.zero([4, 0])
    assert not store.tensor[[0, 4]].any()
    assert torch.equal(store.tensor[[1, 2, 3, 5, 6, 7, 8]], before[[1, 2, 3, 5, 6, 7, 8]])


def test_no_blocks_are_a_valid_set() -> None:
    store = _store("float32")
    before = store.tensor.clone()
    data = store.gather([])
    assert data.shape == (0, 3, 2, 5, 2, 6)
    store.scatter([], data)
    store.zero([])
    assert store.digest([]) == []
    assert store.digest_staged(data) == []
    assert torch.equal(store.tensor, before)


@pytest.mark.parametrize("block_ids", [[9], [-1], [0, 12]])
def test_a_block_outside_the_store_is_refused(block_ids: list[int]) -> None:
    store = _store("float32")
    with pytest.raises(AssertionError, match="store of 9"):
        store.gather(block_ids)
    with pytest.raises(AssertionError, match="store of 9"):
        store.zero(block_ids)


def test_data_that_does_not_fit_is_refused() -> None:
    store = _store("float32")
    data = store.gather([0, 1])
    with pytest.raises(AssertionError, match="3 blocks"):
        store.scatter([0, 1, 2], data)
    with pytest.raises(AssertionError, match="bytes for 2 blocks"):
        store.scatter([0, 1], data.view(torch.uint8).flatten()[:-4])
    with pytest.raises(AssertionError, match="named twice"):
        store.scatter([1, 1], data)
    with pytest.raises(AssertionError, match=r"float64 data"):
        store.scatter([0, 1], data.double())


# Blocks of 8-byte words, and (one head of one dimension, 2 bytes each) of 4-byte words.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(2, 6), (1, 1)])
def test_every_flipped_bit_of_a_block_changes_its_digest(
    dtype: KvDtype, num_kv_heads: int, head_dim: int
) -> None:
    store = _store(dtype, num_kv_heads=num_kv_heads, head_dim=head_dim)
    data = store.gather([5, 6])
    clean = store.digest([5, 6])
    assert store.digest_staged(data) == clean
    as_bytes = data.view(torch.uint8).flatten()
    for byte in range(store.layout.block_bytes):
        for bit in (0, 3, 7):
            as_bytes[byte] ^= 1 << bit
            found = store.digest_staged(as_bytes)
            assert found[0] != clean[0], f"bit {bit} of byte {byte}"
            assert found[1] == clean[1]
            as_bytes[byte] ^= 1 << bit
    assert store.digest_staged(data) == clean


@pytest.mark.parametrize("dtype", DTYPES)
def test_exchanged_parts_change_the_digest(dtype: KvDtype) -> None:
    store = _store(dtype)
    data = store.gather([3])
    clean = store.digest_staged(data)
    exchanges = {
        "halves": data.flatten().roll(data.numel() // 2).view_as(data),
        "k_and_v": data.flip(2),
        "layers": data.flip(1),
        "tokens": data.roll(1, dims=3),
        "heads": data.flip(4),
        "dims": data.roll(1, dims=5),
    }
    for name, exchanged in exchanges.items():
        assert store.digest_staged(exchanged) != clean, name


def test_digests_follow_the_order_of_the_blocks() -> None:
    store = _store("bfloat16")
    first, second = store.digest([2, 4])
    assert first != second
    assert store.digest([4, 2]) == [second, first]


def test_a_digest_sees_bits_where_numbers_compare_equal_or_not_at_all() -> None:
    store = _store("float32")
    data = store.gather([0])
    data.fill_(0.0)
    zero = store.digest_staged(data)
    data[0, 0, 0, 0, 0, 0] = -0.0
    assert store.digest_staged(data) != zero
    data.fill_(torch.nan)
    assert store.digest_staged(data) == store.digest_staged(data.clone())


def test_digest_words_wrap_around_in_64_bits() -> None:
    layout = KvLayout.with_heads(
        num_layers=1, block_size=1, num_kv_heads=1, head_dim=4, dtype="float32"
    )
    store = KvStore(layout, num_blocks=1, device=torch.device("cpu"))
    words = [-1, 2**63 - 1, -(2**63), 12345]
    store.tensor.view(-1).view(torch.int64).copy_(torch.tensor(words))
    mask = 2**64 - 1

    def splitmix64(position: int) -> int:
        x = position * 0x9E3779B97F4A7C15 & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return (x ^ (x >> 31)) | 1

    expected = sum(word * splitmix64(i + 1) for i, word in enumerate(words)) & mask
    assert store.digest([0])[0] & mask == expected


def test_block_tables_grow_and_are_cleared_by_row() -> None:
    tables = BlockTables(max_rows=3, max_blocks_per_row=4)
    tables.append([1], [2], [7, 9])
    tables.append([2, 1], [1, 1], [5, 8])
    assert tables.block_ids(1) == [7, 9, 8]
    flat = tables.flatten(np.array([2, 1]), np.array([1, 2]))
    assert (flat.dtype, flat.tolist()) == (np.int32, [5, 7, 9])
    tables.clear(1)
    assert tables.block_ids(1) == []
    tables.append([1, 0], [4, 0], [3, 3, 3, 3])
    with pytest.raises(AssertionError, match=r"rows \[0, 1\]: \[1, 5\] blocks"):
        tables.append([0, 1], [1, 1], [0, 0])


@pytest.mark.parametrize("longest", [1, 5, 90])
def test_flat_tables_are_the_rows_one_after_the_other(longest: int) -> None:
    """Rows of few blocks and rows of many are put together in different ways."""
    rng = random.Random(longest)
    tables = BlockTables(max_rows=12, max_blocks_per_row=longest)
    ids = {row: rng.sample(range(10_000), longest) for row in range(12)}
    for start in range(0, longest, 7):  # by several at once
        parts = {row: block_ids[start : start + 7] for row, block_ids in ids.items()}
        flat = [b for part in parts.values() for b in part]
        tables.append(list(parts), list(map(len, parts.values())), flat)
    assert all(tables.block_ids(row) == block_ids for row, block_ids in ids.items())
    for _ in range(20):
        rows = rng.sample(range(12), rng.randrange(1, 13))
        counts = [rng.randrange(longest + 1) for _ in rows]
        expected = [b for row, count in zip(rows, counts, strict=True) for b in ids[row][:count]]
        assert tables.flatten(np.array(rows), np.array(counts)).tolist() == expected
