"""Which pieces of an epoch came, where they may come in any order."""


class PieceNumbers:
    """Sequence numbers from 0, each taken once."""

    def __init__(self) -> None:
        self._claimed: set[int] = set()  # of those from `_num_claimed` on
        self._num_claimed = 0  # every piece below came

    def claim(self, seq: int) -> bool:
        """Take a piece's number; False, without effect, if it came before."""
        if seq in self:
            return False
        self._claimed.add(seq)
        while self._num_claimed in self._claimed:
            self._claimed.remove(self._num_claimed)
            self._num_claimed += 1
        return True

    def __contains__(self, seq: int) -> bool:
        return seq < self._num_claimed or seq in self._claimed
