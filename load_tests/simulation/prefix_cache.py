"""Which blocks of prompts each simulated worker still has, by the names that a trace gives them.

A chain names a prompt's full blocks; each name implies all before it. A worker keeps the blocks of
prompts that it computed, up to a number of tokens, and gives up those unused for longest. Who
places prompts knows of every change at once; in the system it is told some times a second.
"""

from collections import OrderedDict
from collections.abc import Mapping

from engine.request import Request, RequestKey
from load_tests.simulation.workload import Chain


class Chains:
    """The chains of requests under way, and which workers hold which block."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.of: dict[RequestKey, Chain] = {}
        self._holders: dict[int, set[int]] = {}  # block -> workers

    def hit_tokens(self, chain: Chain) -> Mapping[int, int]:
        """Worker -> tokens of the chain that it holds; those that hold none are left out."""
        hits: dict[int, int] = {}
        holders = self._holders.get(chain[0], set()) if chain else set()
        for num_blocks, block in enumerate(chain):
            staying = holders & self._holders.get(block, set())
            hits |= dict.fromkeys(sorted(holders - staying), num_blocks * self.block_tokens)
            holders = staying
            if not holders:
                return hits
        return hits | dict.fromkeys(sorted(holders), len(chain) * self.block_tokens)

    def add_holder(self, block: int, worker: int) -> None:
        self._holders.setdefault(block, set()).add(worker)

    def remove_holder(self, block: int, worker: int) -> None:
        self._holders[block].discard(worker)


class PrefixCache:
    """One worker's."""

    def __init__(self, chains: Chains, worker: int, max_tokens: int) -> None:
        """`worker`: its column, for the index of holders."""
        self._chains = chains
        self._worker = worker
        self._max_blocks = max_tokens // chains.block_tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def hit_tokens(self, request: Request) -> int:
        """How much of its prompt is here; at least its last token is not."""
        num_blocks = 0
        for block in self._chains.of.get(request.key, ()):
            if block not in self._blocks:
                break
            num_blocks += 1
        return min(num_blocks * self._chains.block_tokens, request.num_prompt_tokens - 1)

    def insert(self, request: Request) -> None:
        """Its prompt was computed: keep its blocks, the first ones longest."""
        for block in reversed(self._chains.of.get(request.key, ())):
            if block not in self._blocks:
                self._chains.add_holder(block, self._worker)
                self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            block, _ = self._blocks.popitem(last=False)
            self._chains.remove_holder(block, self._worker)
