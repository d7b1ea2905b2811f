"""What the prefix index should hold and in which order it should go, by searching everything.

Written from the rules alone, over contents (salt and tokens) instead of hashes and entries, so
that it can disagree with the index. Sized by the machine that uses it.
"""

from collections.abc import Iterable, Sequence

BLOCK_SIZE = 2
NUM_BLOCKS = 9
MAX_PROTECTED = 4

Content = tuple[str, tuple[int, ...]]  # salt, all tokens from the sequence's start to a block's end


def chain_of(salt: str, tokens: Sequence[int]) -> list[Content]:
    """The contents of a sequence's full blocks."""
    ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
    return [(salt, tuple(tokens[:end])) for end in ends]


def _parent_of(content: Content) -> Content:
    return content[0], content[1][:-BLOCK_SIZE]


def _is_descendant(content: Content, ancestor: Content) -> bool:
    return content[0] == ancestor[0] and content[1][: len(ancestor[1])] == ancestor[1]


class Model:
    def __init__(self) -> None:
        self.block_of: dict[Content, int] = {}
        self.protected: set[Content] = set()
        self.idle_since: dict[Content, int] = {}
        self._time = 0

    def match(self, chain: Sequence[Content]) -> list[int]:
        found = []
        for content in chain:
            if content not in self.block_of:
                break
            found.append(self.block_of[content])
        return found

    def index(self, block_id: int, content: Content) -> None:
        parent = _parent_of(content)
        if content not in self.block_of and (not parent[1] or parent in self.block_of):
            self.block_of[content] = block_id

    def hit(self, chain: Sequence[Content]) -> None:
        for content in chain[: len(self.match(chain))]:
            self.protected.add(content)
            self.idle_since.pop(content, None)

    def let_go(self, block_ids: Iterable[int]) -> None:
        """Nobody holds these any more; what is idle above them is as recent as they are."""
        content_of = {b: c for c, b in self.block_of.items()}
        for below in [content_of[b] for b in block_ids if b in content_of]:
            self._start_idling(below)
            while (above := _parent_of(below)) in self.idle_since:
                if below in self.protected:
                    self.protected.add(above)
                self._start_idling(above)
                below = above

    def evict(self) -> None:
        victim = min(self.idle_since, key=lambda c: (c in self.protected, self.idle_since[c]))
        assert victim not in map(_parent_of, self.idle_since)
        self.remove(victim)

    def remove(self, ancestor: Content) -> None:
        for content in [c for c in self.block_of if _is_descendant(c, ancestor)]:
            del self.block_of[content]
            self.protected.discard(content)
            self.idle_since.pop(content, None)

    def _start_idling(self, content: Content) -> None:
        self.idle_since.pop(content, None)
        self._time += 1
        self.idle_since[content] = self._time
        shielded = [c for c in self.idle_since if c in self.protected]
        if len(shielded) > MAX_PROTECTED:
            oldest = min(shielded, key=lambda c: self.idle_since[c])
            self.protected.remove(oldest)
            self._time += 1
            self.idle_since[oldest] = self._time
