"""Times to the first token in the last five minutes, by class, in pieces of five seconds.

Each piece counts its times in bins 2 % wide, so that it stays small at any rate and pieces add up
to quantiles of the whole; a quantile is right within 1 %. Knows no HTTP and no Prometheus, whose
histograms are for longer times and coarser.
"""

import math
from collections import Counter, deque

import msgspec

from engine.clock import Clock
from engine.length_class import LengthClass
from engine.routing.pools import CLASSES

PIECE_S = 5.0
NUM_PIECES = 60
BIN_RATIO = 1.02
LEAST_S = 1e-4  # shorter times count as this


class TtftPiece(msgspec.Struct, frozen=True, kw_only=True):
    """The first tokens of one piece of time."""

    ago_s: float  # since its middle, which for the piece under way may be to come: then below 0
    num: int
    p50_s: float
    p90_s: float


class ClassTtft(msgspec.Struct, frozen=True, kw_only=True):
    """The first tokens of one class. Quantiles are None without any."""

    num: int
    p50_s: float | None
    p90_s: float | None
    pieces: list[TtftPiece]  # those with a first token, oldest first


class RecentTtft:
    """A ring of counts per class; older ones drop out."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rings: dict[LengthClass, deque[tuple[int, Counter[int]]]] = {
            length_class: deque(maxlen=NUM_PIECES) for length_class in CLASSES
        }

    def add(self, length_class: LengthClass, seconds: float) -> None:
        """Count a first token that came now, `seconds` after its request."""
        ring, piece = self._rings[length_class], self._piece_now()
        if not ring or ring[-1][0] != piece:
            ring.append((piece, Counter()))
        ring[-1][1][_bin(seconds)] += 1

    def summary(self) -> dict[LengthClass, ClassTtft]:
        """The last `NUM_PIECES` pieces, the one under way among them."""
        return {name: self._summary(ring) for name, ring in self._rings.items()}

    def _summary(self, ring: deque[tuple[int, Counter[int]]]) -> ClassTtft:
        now_s, oldest = self._clock.now_s(), self._piece_now() - NUM_PIECES
        recent = [(piece, bins) for piece, bins in ring if piece > oldest]
        total: Counter[int] = sum((bins for _, bins in recent), Counter())
        return ClassTtft(
            num=total.total(),
            p50_s=_quantile_s(total, 0.5) if total else None,
            p90_s=_quantile_s(total, 0.9) if total else None,
            pieces=[
                TtftPiece(
                    ago_s=now_s - (piece + 0.5) * PIECE_S,
                    num=bins.total(),
                    p50_s=_quantile_s(bins, 0.5),
                    p90_s=_quantile_s(bins, 0.9),
                )
                for piece, bins in recent
            ],
        )

    def _piece_now(self) -> int:
        return math.floor(self._clock.now_s() / PIECE_S)


def _bin(seconds: float) -> int:
    return round(math.log(max(seconds, LEAST_S), BIN_RATIO))


def _quantile_s(bins: Counter[int], share: float) -> float:
    """Returns a quantile by nearest rank, as the middle of the bin that holds it."""
    rank = math.ceil(share * bins.total())
    for index in sorted(bins):
        rank -= bins[index]
        if rank <= 0:
            break
    return float(BIN_RATIO**index)
