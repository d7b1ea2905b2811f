"""The pieces of work that engine figures are taken of: how many prompts, how long, timed how.

A work is timed in seconds; in which unit that is read, and how it is named in results of other
engines, is the work's own business. Knows no engine.
"""

from dataclasses import dataclass
from enum import Enum

DECODE_STEPS = 128  # timed steps of a decode work, after the first token of every row


class Kind(Enum):
    """What is timed; `value` is the unit it is read in."""

    PREFILL = "tokens/s"  # from adding all prompts until each has its first token
    SHORT_PREFILL = "ms"  # the same, read as a latency
    DECODE = "ms/step"  # one step of all rows, on average over DECODE_STEPS


@dataclass(frozen=True, slots=True)
class Work:
    """`num_rows` prompts of `num_tokens` tokens each."""

    kind: Kind
    num_rows: int
    num_tokens: int

    @property
    def key(self) -> str:
        """Its name in results, ours and others'."""
        match self.kind:
            case Kind.PREFILL:
                return f"prefill_{self.num_rows}x{self.num_tokens}_tok_s"
            case Kind.SHORT_PREFILL:
                return f"short_prefill_{self.num_rows}x{self.num_tokens}_ms"
            case Kind.DECODE:
                return f"decode_bs{self.num_rows}_ctx{self.num_tokens}_ms_per_step"

    @property
    def label(self) -> str:
        """Its name in a table."""
        match self.kind:
            case Kind.PREFILL:
                return f"prefill {self.num_rows}x{self.num_tokens}"
            case Kind.SHORT_PREFILL:
                return f"one batch {self.num_rows}x{self.num_tokens}"
            case Kind.DECODE:
                return f"decode, batch {self.num_rows}, context {self.num_tokens}"

    @property
    def is_rate(self) -> bool:
        """Whether larger values are better."""
        return self.kind is Kind.PREFILL

    def in_unit(self, seconds: float) -> float:
        """A duration of this work (of one step, for decode) as `kind` reads it."""
        if self.is_rate:
            return self.num_rows * self.num_tokens / seconds
        return 1e3 * seconds


LONG_PREFILLS = tuple(Work(Kind.PREFILL, n, t) for n, t in ((32, 1024), (16, 4096), (4, 16000)))
SHORT_PREFILLS = tuple(
    Work(Kind.SHORT_PREFILL, n, t)
    for n, t in ((1, 64), (8, 64), (32, 64), (1, 256), (8, 256), (32, 256))
)
DECODES = tuple(
    Work(Kind.DECODE, n, t) for n, t in ((1, 128), (16, 128), (64, 128), (256, 128), (64, 4096))
)
WORKS = (*LONG_PREFILLS, *SHORT_PREFILLS, *DECODES)
# Before the first work: prompts, their tokens, new tokens. The last are about as long as the first
# work's, whose first round was 40 to 120 ms longer than later ones without them.
WARM_UPS = ((8, 128, 8), (64, 512, 4), (16, 1000, 1))
