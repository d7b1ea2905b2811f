"""How much of a prompt each worker has in its prefix cache, from what the workers report.

Block hashes are chained, and whatever is indexed can be found (engine/kv/index.py): the hit
of a worker is the length of the prompt's chain before the first hash it lacks. A report that does
not follow the last one, or is of another incarnation, is worthless: the worker counts as empty
until it has been asked for everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.messages import BlockChanges


@dataclass(slots=True, eq=False)
class _Worker:
    incarnation: str
    sequence: int
    hashes: set[bytes] = field(default_factory=set)


class PrefixHits:
    """The indexed block hashes of every worker. Mutated by `apply` and `forget` only."""

    def __init__(self, block_size: int) -> None:
        """`block_size` in tokens."""
        self._block_size = block_size
        self._workers: dict[str, _Worker] = {}

    def last_sequence(self, worker: str) -> int | None:
        """The number of the last report applied; None = ask for everything."""
        known = self._workers.get(worker)
        return known.sequence if known else None

    def apply(self, worker: str, changes: BlockChanges) -> bool:
        """Apply a report; False if it does not follow the last: then nothing counts as cached."""
        known = self._workers.get(worker)
        if not changes.is_resync:
            expected = None if known is None else (known.incarnation, known.sequence + 1)
            if known is None or expected != (changes.incarnation, changes.sequence):
                self.forget(worker)
                return False
            known.hashes.difference_update(changes.removed)
            known.hashes.update(changes.added)
            known.sequence = changes.sequence
            return True
        self._workers[worker] = _Worker(
            changes.incarnation, changes.sequence, hashes=set(changes.added)
        )
        return True

    def forget(self, worker: str) -> None:
        """The worker is gone, and its cache with it. Idempotent."""
        self._workers.pop(worker, None)

    def hit_tokens(self, block_hashes: Sequence[bytes]) -> dict[str, int]:
        """Worker -> tokens of the chain it holds; those that hold none are left out."""
        hits = {}
        for name, worker in self._workers.items():
            num_blocks = _num_leading(block_hashes, worker.hashes)
            if num_blocks > 0:
                hits[name] = num_blocks * self._block_size
        return hits

    def num_blocks(self) -> dict[str, int]:
        """Worker -> number of indexed blocks, for display."""
        return {name: len(worker.hashes) for name, worker in self._workers.items()}


def _num_leading(block_hashes: Sequence[bytes], known: set[bytes]) -> int:
    for index, block_hash in enumerate(block_hashes):
        if block_hash not in known:
            return index
    return len(block_hashes)
