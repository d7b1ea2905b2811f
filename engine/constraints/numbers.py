"""Numbers as the grammar library and every JSON reader read them alike: bounds, steps, constants.

The library reads numbers of more than 15 digits as a neighbouring float, and readers compare
floats. So bounds are rounded inwards to 15 digits, a step has to be exact in binary, and what
cannot be written exactly is refused. Knows no schemas but these keywords.
"""

import json
import math
from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction

from engine.constraints.keywords import LOWER, MAX_BOUND, STRICT, UPPER, Schema, refused

_MAX_CONSTANT = 2**53 - 1  # readers that use floats represent all integers up to it exactly
_NUM_DIGITS = 15  # distinct decimals with up to this many digits are distinct floats
_LEAST_EXPONENT = -18  # of the last digit of a bound
_MAX_STEP = 1000  # of the digits of a step: a grammar has a state for each remainder
_MAX_STEP_DECIMALS = 4

Bounds = Mapping[str, int | float]  # by keyword


def strictest(schemas: Sequence[Schema]) -> Bounds:
    """The bounds of all `schemas`; Draft 4's boolean exclusive bounds as numbers."""
    found: dict[str, int | float] = {}
    for schema in schemas:
        for name, value in _read_bounds(schema).items():
            pick = max if name in LOWER else min
            found[name] = pick(found[name], value) if name in found else value
    return found


def _read_bounds(schema: Schema) -> dict[str, int | float]:
    found: dict[str, int | float] = {}
    for names in (LOWER, UPPER):
        is_strict = schema.get(names[1]) is True
        for name in names:
            value = schema.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                found[names[1] if is_strict else name] = value
    return found


def number_bounds(own: Bounds) -> dict[str, int | float] | None:
    """Bounds of a number, inclusive and of few digits, within those of `own`; None if empty.

    Readers compare floats: a decimal text close enough to an exclusive bound reads as the bound
    itself. Decimals of up to 15 digits are distinct floats, and rounding keeps their order. The
    library never writes a prefix of an upper bound: below 0.99 it has 0.90, not 0.9.
    """
    lows, highs = [-Decimal(MAX_BOUND)], [Decimal(MAX_BOUND)]
    for name, value in own.items():
        bound = Decimal(repr(value))
        is_lower, is_strict = name in LOWER, name in STRICT
        if bound == 0:
            quantum = Decimal(1).scaleb(_LEAST_EXPONENT)
        else:
            exponent = max(bound.adjusted() - _NUM_DIGITS + 1, _LEAST_EXPONENT)
            quantum = Decimal(1).scaleb(exponent)
        rounding = ROUND_CEILING if is_lower else ROUND_FLOOR
        nearest = bound.quantize(quantum, rounding=rounding)
        if is_strict and nearest == bound:
            nearest += quantum if is_lower else -quantum
        (lows if is_lower else highs).append(nearest)
    low, high = max(lows), min(highs)
    if low > high:
        return None
    kept: dict[str, int | float] = {}
    if any(name in own for name in LOWER):
        kept["minimum"] = _plain_number(low)
    if any(name in own for name in UPPER):
        kept["maximum"] = _plain_number(high)
    return kept


def integer_bounds(own: Bounds) -> dict[str, int | float] | None:
    """Bounds of an integer as integers, within those of `own`; None if empty."""
    lows, highs = [-MAX_BOUND], [MAX_BOUND]
    for name, value in own.items():
        bound = Fraction(repr(value))
        if name in LOWER:
            lows.append(math.floor(bound) + 1 if name in STRICT else math.ceil(bound))
        else:
            highs.append(math.ceil(bound) - 1 if name in STRICT else math.floor(bound))
    if max(lows) > min(highs):
        return None
    kept: dict[str, int | float] = {}
    if any(name in own for name in LOWER):
        kept["minimum"] = max(lows)
    if any(name in own for name in UPPER):
        kept["maximum"] = min(highs)
    return kept


def _plain_number(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)


# ---- steps ---------------------------------------------------------------------------------------


def common_step(steps: Sequence[int | float]) -> Fraction:
    """The least number above 0 that is a multiple of every one of `steps`."""
    found = [Fraction(repr(step)) for step in steps]
    numerator = math.lcm(*(step.numerator for step in found))
    return Fraction(numerator, math.gcd(*(step.denominator for step in found)))


def is_exact_step(step: Fraction) -> bool:
    """Whether the library keeps to `step`, and every reader divides by it without an error."""
    is_binary = step.denominator & (step.denominator - 1) == 0
    num_decimals = step.denominator.bit_length() - 1
    return is_binary and num_decimals <= _MAX_STEP_DECIMALS and step * 10**num_decimals <= _MAX_STEP


def is_multiple(value: int | float, step: int | float) -> bool:
    """Whether `value` is a multiple of `step` both exactly and by the division of floats."""
    is_exact = (Fraction(repr(value)) / Fraction(repr(step))).denominator == 1
    return is_exact and (isinstance(step, int) or float(value / step).is_integer())


def multiples_within(
    steps: Sequence[int | float], bounds: Mapping[str, int | float], max_num: int
) -> list[int | float] | None:
    """The multiples of all `steps` from `minimum` to `maximum`; None if there are too many."""
    if "minimum" not in bounds or "maximum" not in bounds:
        return None
    step = common_step(steps)
    first = math.ceil(Fraction(repr(bounds["minimum"])) / step)
    last = math.floor(Fraction(repr(bounds["maximum"])) / step)
    if last - first >= max_num:
        return None
    found = [_plain_fraction(number * step) for number in range(first, last + 1)]
    return [value for value in found if all(is_multiple(value, step) for step in steps)]


def _plain_fraction(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


# ---- constants -----------------------------------------------------------------------------------


def constant(value: object, where: str) -> object:
    """A constant as the library reads it without a change; RequestError if that is impossible."""
    match value:
        case dict():
            return {key: constant(inner, where) for key, inner in value.items()}
        case list():
            return [constant(inner, where) for inner in value]
        case bool():
            return value
        case int() | float() if not abs(value) <= _MAX_CONSTANT:
            raise refused(where, f"a number in it is beyond {_MAX_CONSTANT}; make it a string")
        case float() if value.is_integer():
            return int(value)
        case float():
            digits, exponent = Decimal(repr(value)).as_tuple()[1:]
            if len(digits) > _NUM_DIGITS or not isinstance(exponent, int) or exponent < -22:
                raise refused(where, f"a number in it has more than {_NUM_DIGITS} digits")
    return value


def identity_of(value: object) -> str:
    """A text that two JSON values share if they are equal: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_with_plain_numbers(value), sort_keys=True)


def _with_plain_numbers(value: object) -> object:
    match value:
        case dict():
            return {key: _with_plain_numbers(inner) for key, inner in value.items()}
        case list():
            return [_with_plain_numbers(inner) for inner in value]
        case float() if value.is_integer():
            return int(value)
    return value
