"""Numbers within bounds as grammar, digit by digit; the grammar compiler's own ranges are wrong.

A number is written without exponent, with at most 15 digits before the point and a few more
decimals than its bounds have. So it is a whole number of the last decimal's units, and a range of
numbers is, for each length, a range of strings of digits, where a digit is bounded as long as all
digits before it were those of the bound:

    27 ... 99    "2" [7-9] | [3-9] [0-9]
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

MAX_BOUND = 10**15 - 1  # JSON readers keep all integers up to it
_MIN_DECIMALS, _MAX_DECIMALS = 6, 15
_MORE_DECIMALS = 3  # than the bounds have
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
BOUNDS = (*_LOWER, *_UPPER)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRange:
    """low ... high, in units of the last decimal; empty when low > high."""

    low: int
    high: int
    num_decimals: int

    @property
    def is_empty(self) -> bool:
        return self.low > self.high


def is_bound(name: str, value: object) -> bool:
    """Whether it can be kept. One so far out that it bounds nothing below MAX_BOUND can."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return abs(value) <= MAX_BOUND or name in (_UPPER if value > 0 else _LOWER)


def read_range(schema: Mapping[str, object]) -> NumberRange:
    """Of a schema of type integer or number with at least one bound."""
    bounds = {name: _exact(schema[name]) for name in BOUNDS if name in schema}
    num_decimals = 0
    if schema["type"] == "number":
        wanted = max(_num_decimals(bound) for bound in bounds.values()) + _MORE_DECIMALS
        num_decimals = min(max(_MIN_DECIMALS, wanted), _MAX_DECIMALS)
    unit = 10**num_decimals
    lows = [-MAX_BOUND * unit]
    highs = [MAX_BOUND * unit]
    for name, bound in bounds.items():
        match name:
            case "minimum":
                lows.append(math.ceil(bound * unit))
            case "exclusiveMinimum":
                lows.append(math.floor(bound * unit) + 1)
            case "maximum":
                highs.append(math.floor(bound * unit))
            case "exclusiveMaximum":
                highs.append(math.ceil(bound * unit) - 1)
    return NumberRange(low=max(lows), high=min(highs), num_decimals=num_decimals)


def _exact(bound: object) -> Fraction:
    """As it is written, which for a float is not quite the value that it has."""
    return Fraction(repr(bound))


def _num_decimals(bound: Fraction) -> int:
    """As many as it has, or the most that are of use."""
    return next(
        (num for num in range(_MAX_DECIMALS) if 10**num % bound.denominator == 0), _MAX_DECIMALS
    )


class RangeGrammar:
    """EBNF rules of ranges. What stands behind the last bounded digit is shared by all of them."""

    def __init__(self, prefix: str) -> None:
        """`prefix`: what every rule's name begins with."""
        self._prefix = prefix
        self._num_ranges = 0
        self._rules: dict[str, str] = {}  # name -> expression

    def add(self, numbers: NumberRange) -> str:
        """The name of a rule for a range that is not empty."""
        signs = [("", max(0, numbers.low), numbers.high)]
        signs.append(('"-" ', max(1, -numbers.high), -numbers.low))
        options = [
            sign + self._of_length(low, high, length, numbers.num_decimals)
            for sign, low, high in signs
            if low <= high
            for length in _lengths(low, high, numbers.num_decimals)
        ]
        name = f"{self._prefix}{self._num_ranges}"
        self._num_ranges += 1
        self._rules[name] = " | ".join(options)
        return name

    def as_text(self) -> str:
        return "".join(f"{name} ::= {text}\n" for name, text in self._rules.items())

    def _of_length(self, low: int, high: int, length: int, num_decimals: int) -> str:
        num_whole = length - num_decimals
        first = 10 ** (length - 1) if num_whole > 1 else 0
        lows = str(max(low, first)).zfill(length)
        highs = str(min(high, 10**length - 1)).zfill(length)
        return self._digits(lows, highs, num_whole)

    def _digits(self, lows: str, highs: str, num_whole: int) -> str:
        """What is left of a number's digits, `num_whole` of them before the point.

        lows, highs: of the bounds; all 0 and all 9 where a digit before keeps the bound already.
        """
        if not lows.strip("0") and not highs.strip("9"):
            return self._any_digits(num_whole, len(lows))
        rests: dict[str, list[int]] = {}  # what may follow -> which digits
        first, last = int(lows[0]), int(highs[0])
        for digit in range(first, last + 1):
            low = lows[1:] if digit == first else "0" * len(lows[1:])
            high = highs[1:] if digit == last else "9" * len(highs[1:])
            rests.setdefault(self._digits(low, high, num_whole - 1), []).append(digit)
        options = " | ".join(f"[{found[0]}-{found[-1]}] {rest}" for rest, found in rests.items())
        if num_whole > 0:
            return f"({options})"
        written = f'("." ({options}))' if num_whole == 0 else f"({options})"
        return written if lows.strip("0") else f"{written}?"

    def _any_digits(self, num_whole: int, num_left: int) -> str:
        """A rule for as many as there may be: all before the point, any number behind it."""
        name = f"{self._prefix}_{max(num_whole, -1) + 1}_{num_left}"
        if name in self._rules:
            return name
        self._rules[name] = '""'
        if num_left > 0:
            digit = '"." [0-9]' if num_whole == 0 else "[0-9]"
            rest = self._any_digits(num_whole - 1, num_left - 1)
            self._rules[name] = f"{digit} {rest}" if num_whole > 0 else f'"" | {digit} {rest}'
        return name


def _lengths(low: int, high: int, num_decimals: int) -> range:
    """How many digits the numbers of a range may have, at least one of them before the point."""
    shortest, longest = (max(len(str(value)), num_decimals + 1) for value in (low, high))
    return range(shortest, longest + 1)
