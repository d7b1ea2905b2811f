"""The conservation law of blocks, checked when an engine is idle and in every test."""

from collections.abc import Iterable

from engine.kv.block_cache import BlockCache


def check_blocks(cache: BlockCache, owners: Iterable[tuple[str, list[int]]]) -> None:
    """free + cached + held == total, and every held block has exactly its owners' references.

    Raises AssertionError that prints every term and every owner.
    """
    held_by: dict[str, list[int]] = {}
    for name, block_ids in owners:
        held_by.setdefault(name, []).extend(block_ids)
    cache.check_conservation(held_by)


def num_held(owners: Iterable[tuple[str, list[int]]]) -> dict[str, int]:
    """Owner -> number of blocks, for reports and for baselines in tests."""
    return {name: len(block_ids) for name, block_ids in owners if block_ids}
