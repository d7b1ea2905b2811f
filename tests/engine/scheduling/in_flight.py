"""What must hold for the blocks of steps that were launched and not waited for."""

from engine.kv.cache import BlockCache
from tests.harness.fakes import FakeExecutor


def check_blocks_in_flight(cache: BlockCache, executor: FakeExecutor) -> None:
    """Nobody can get a block that such a step touches, or find one whose content is not settled."""
    available = {b for b in executor.blocks_in_flight if cache.num_references(b) == 0}
    assert not available, f"blocks {available} of a step in flight are available"
    indexed = {b for b in executor.blocks_unsettled if b in cache._index}
    assert not indexed, f"blocks {indexed} are indexed before their step was committed"
