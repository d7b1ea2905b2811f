"""A host tier over a `FakeExecutor`: keeps what blocks hold, and gives it back as told."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.harness.fakes import NOT_FINITE, FakeExecutor, Written

Stored = tuple[bytes, list[Written]]


@dataclass(slots=True, eq=False)
class FakeLoad:
    blocks: Sequence[Stored]
    block_ids: Sequence[int]
    num_landed: int = 0
    is_over: bool = False
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def resume(self) -> None:
        self.is_cancelled = False


@dataclass(slots=True, eq=False)
class FakeSave:
    blocks: list[tuple[int, bytes]]
    contents: list[list[Written]]  # as it began
    is_over: bool = False


@dataclass(slots=True, eq=False)
class FakeHostTier:
    """`settle` lands as many blocks as it is told to; with `rng`, as many as it likes."""

    block_s: float = 0.0  # predicted
    num_to_land: int = 0  # at the next `settle`
    rng: random.Random | None = None
    max_blocks: int = 1000
    executor: FakeExecutor | None = None
    blocks: dict[bytes, list[Written]] = field(default_factory=dict)  # oldest first
    loads: list[FakeLoad] = field(default_factory=list)
    saves: list["FakeSave"] = field(default_factory=list)
    num_loaded: int = 0
    num_finds: int = 0
    start_s: float = 0.0  # that it takes to begin a load
    clock_s: float = 0.0
    stores: Literal["evicted", "answers"] = "evicted"

    def save(self, evicted: Sequence[tuple[int, bytes]]) -> None:
        for block_id, block_hash in evicted:
            content = self._content(block_id)
            assert NOT_FINITE not in content
            known = self.blocks.pop(block_hash, content)
            assert known == content, "one hash names two contents"
            self.blocks[block_hash] = content
        while len(self.blocks) > self.max_blocks:
            del self.blocks[next(iter(self.blocks))]

    def begin_save(self, evicted: Sequence[tuple[int, bytes]]) -> "FakeSave":
        """Copies only when it is over: until then nobody may overwrite the blocks."""
        save = FakeSave(list(evicted), [self._content(block_id) for block_id, _ in evicted])
        self.saves.append(save)
        return save

    def _content(self, block_id: int) -> list[Written]:
        assert self.executor is not None
        return [self.executor.content(block_id, slot) for slot in range(self._block_size)]

    @property
    def _block_size(self) -> int:
        assert self.executor is not None
        return self.executor._block_size

    def now_s(self) -> float:
        self.clock_s += self.start_s
        return self.clock_s

    @property
    def is_active(self) -> bool:
        return bool(self.loads or self.saves)

    def find(self, hashes: Sequence[bytes]) -> list[Stored]:
        self.num_finds += 1
        return self.look(hashes)

    def look(self, hashes: Sequence[bytes]) -> list[Stored]:
        found = []
        for block_hash in hashes:
            if block_hash not in self.blocks:
                break
            found.append((block_hash, self.blocks[block_hash]))
        return found

    def num_on_disk(self, blocks: Sequence[Stored]) -> int:
        return 0

    def load_seconds(self, blocks: Sequence[Stored]) -> float:
        return self.block_s * len(blocks)

    def load(self, blocks: Sequence[Stored], block_ids: Sequence[int]) -> FakeLoad:
        load = FakeLoad(blocks, list(block_ids))
        self.loads.append(load)
        return load

    def settle(self) -> None:
        for load in self.loads:
            self._go_on(load)
        self.loads = [load for load in self.loads if not load.is_over]
        for save in self.saves:
            if self.rng is None or self.rng.random() < 0.3:
                now = [self._content(block_id) for block_id, _ in save.blocks]
                assert now == save.contents, "blocks were overwritten before they were copied"
                self.save(save.blocks)
                save.is_over = True
        self.saves = [save for save in self.saves if not save.is_over]

    def _go_on(self, load: FakeLoad) -> None:
        num_left = len(load.blocks) - load.num_landed
        num_to_land = min(self.num_to_land, num_left)
        if self.rng is not None:
            num_to_land = self.rng.randrange(num_left + 1)
            if self.rng.random() < 0.1:  # what comes next is not what was stored
                self._write(load, load.num_landed, NOT_FINITE)
                self.blocks.pop(load.blocks[load.num_landed][0], None)
                load.is_over = True
                return
        for index in range(load.num_landed, load.num_landed + num_to_land):
            self._write(load, index)
        load.num_landed += num_to_land
        self.num_loaded += num_to_land
        load.is_over = load.num_landed == len(load.blocks) or load.is_cancelled

    def _write(self, load: FakeLoad, index: int, spoiled: Written | None = None) -> None:
        assert self.executor is not None
        block_id, content = load.block_ids[index], load.blocks[index][1]
        assert block_id not in self.executor.blocks_in_flight
        self.executor._store[block_id] = [spoiled or written for written in content]
